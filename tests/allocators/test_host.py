"""What the kit does not know of the "host" allocator: sparse, sealed, zero when it comes again, huge pages."""

import ctypes
import gc
import os

import pytest
from tables import raises

from iris_allocators.host import GRANULE, HostAllocator
from iris_allocators.settings import HostSettings
from iris_core.errors import HeapClosedError, HeapError
from iris_core.testing.conformance import oracle
from iris_core.types import CreateRequest, Segment

from .cluster import CPU, nothing


def make(nbytes=1 << 20, rank=0, **settings):
    return HostAllocator(CreateRequest(CPU, rank, 2, nbytes, HostSettings(**settings)))


def shared_kib():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssShmem"))


def test_a_large_heap_is_sparse_and_freed_granules_read_as_zero():
    allocator = make(64 << 30)
    assert allocator.committed_bytes == 0
    t = allocator.tensor(63 << 30, 4 * GRANULE, nothing).fill_(7)
    assert allocator.committed_bytes == 4 * GRANULE
    allocator.decommit((63 << 30) + GRANULE, 2 * GRANULE)
    assert allocator.committed_bytes == 2 * GRANULE
    assert [int(t[i * GRANULE]) for i in range(4)] == [7, 0, 0, 7]
    allocator.close()
    for use in (lambda: allocator.committed_bytes, lambda: allocator.decommit(0, GRANULE)):
        with pytest.raises(HeapClosedError):
            use()
    held = shared_kib()
    del t
    gc.collect()
    assert held - shared_kib() >= 2 * GRANULE // 1024, "memory goes with the last tensor"


@pytest.mark.parametrize("huge_pages", [False, True])
def test_peers_keep_the_memory_and_no_descriptor_is_left_behind(huge_pages):
    before = oracle.open_descriptors()
    one, two = make(5000, huge_pages=huge_pages), make(5000, rank=1, huge_pages=huge_pages)
    assert one.nbytes == 8192, "whole pages"
    fd = one.export()[0].fd
    assert os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:"), "a small /dev/shm is no limit"
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    mapping = two.import_peer(0, [Segment(0, one.nbytes, fd=os.dup(fd))])
    one.tensor(100, 1, nothing).fill_(42)
    for segments, key in (
        ([Segment(0, 10, fd=os.dup(0)), Segment(10, 10, fd=os.dup(0))], "one file"),
        ([Segment(0, 1 << 30, fd=os.dup(fd))], "fewer"),
    ):
        with raises(HeapError, f"allocators.{key}"):
            two.import_peer(1, segments)
    one.close()
    assert ctypes.c_uint8.from_address(mapping.base_ptr + 100).value == 42, "the peer's mapping holds the pages"
    del two  # forgotten without close
    assert oracle.open_descriptors() == before
