"""The host allocator alone: sparse, sealed, leak-free, and harmless after close."""

import ctypes
import gc
import os
import subprocess
import sys

import pytest
import torch

from iris_allocators.host import GRANULE, HostAllocator
from iris_allocators.settings import HostSettings
from iris_core.errors import HeapClosedError, HeapError
from iris_core.types import CreateRequest, DeviceTarget, DeviceType, Segment


def make(nbytes=1 << 20, rank=0, **settings):
    return HostAllocator(CreateRequest(DeviceTarget(DeviceType.CPU), rank, 2, nbytes, HostSettings(**settings)))


@pytest.fixture
def allocator():
    allocator = make(8 * GRANULE)
    yield allocator
    allocator.close()


def open_descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def nothing():
    pass


def test_a_large_heap_is_sparse():
    allocator = make(64 << 30)
    assert allocator.committed_bytes == 0
    allocator.tensor(63 << 30, 4096, nothing).fill_(1)
    assert 0 < allocator.committed_bytes <= GRANULE
    allocator.close()


def test_size_is_rounded_to_pages():
    allocator = make(5000)
    assert allocator.nbytes == 8192
    allocator.close()


def test_a_tensor_lies_where_it_was_asked_for(allocator):
    t = allocator.tensor(4096, 100, nothing)
    assert t.dtype == torch.uint8
    assert t.shape == (100,)
    assert t.data_ptr() == allocator.base_ptr + 4096
    assert t.untyped_storage().nbytes() == 100


def test_release_is_told_once_when_the_last_view_is_gone(allocator):
    told = []
    t = allocator.tensor(0, 256, lambda: told.append(1))
    view = t.view(torch.float32)[3:5]
    del t
    gc.collect()
    assert told == []
    del view
    assert told == [1]


def test_freed_granules_are_given_back_and_read_as_zero(allocator):
    t = allocator.tensor(0, 4 * GRANULE, nothing)
    t.fill_(7)
    before = allocator.committed_bytes
    allocator.decommit(GRANULE, 2 * GRANULE)
    assert allocator.committed_bytes == before - 2 * GRANULE
    assert t[GRANULE].item() == 0
    assert t[0].item() == 7
    assert t[3 * GRANULE].item() == 7


def test_a_peer_sees_the_same_memory():
    one, two = make(rank=0), make(rank=1)
    (segment,) = one.export()
    received = Segment(0, segment.nbytes, fd=os.dup(segment.fd))
    mapping = two.import_peer(0, [received])
    assert mapping.base_ptr != one.base_ptr
    assert mapping.base_ptr != two.base_ptr
    one.tensor(100, 1, nothing).fill_(42)
    assert ctypes.c_uint8.from_address(mapping.base_ptr + 100).value == 42
    again = two.import_peer(0, [Segment(0, segment.nbytes, fd=os.dup(segment.fd))])
    assert again == mapping
    one.close()
    assert ctypes.c_uint8.from_address(mapping.base_ptr + 100).value == 42  # the peer's mapping holds the pages
    two.close()


def test_no_descriptor_is_left_behind():
    before = open_descriptors()
    one, two = make(rank=0), make(rank=1)
    two.import_peer(0, [Segment(0, one.nbytes, fd=os.dup(one.export()[0].fd))])
    with pytest.raises(HeapError, match="did not send one memory file"):
        two.import_peer(1, [Segment(0, 10, fd=os.dup(0)), Segment(10, 10, fd=os.dup(0))])
    with pytest.raises(HeapError, match="fewer than the promised"):
        two.import_peer(1, [Segment(0, 1 << 30, fd=os.dup(one.export()[0].fd))])
    one.close()
    one.close()
    del two  # forgotten without close
    gc.collect()
    assert open_descriptors() == before


def test_a_peer_cannot_shrink_the_memory(allocator):
    with pytest.raises(PermissionError):
        os.ftruncate(allocator.export()[0].fd, 0)


def test_an_impossible_size_is_an_error_and_leaves_nothing():
    before = open_descriptors()
    with pytest.raises(HeapError, match="cannot"):
        make(1 << 62)
    assert open_descriptors() == before


def test_after_close_new_uses_raise_and_old_tensors_live():
    allocator = make()
    t = allocator.tensor(0, 16, nothing)
    t.fill_(5)
    allocator.close()
    assert t.sum().item() == 80
    for use in (lambda: allocator.tensor(0, 1, nothing), allocator.export, lambda: allocator.decommit(0, GRANULE)):
        with pytest.raises(HeapClosedError):
            use()


def test_memory_goes_with_the_last_tensor():
    allocator = make(64 * GRANULE)
    t = allocator.tensor(0, 32 * GRANULE, nothing)
    t.fill_(1)
    allocator.close()
    del allocator
    held = shared_kib()
    del t
    gc.collect()
    assert held - shared_kib() >= 32 * GRANULE // 1024


def test_huge_pages_can_be_asked_for():
    allocator = make(4 * GRANULE, huge_pages=True)
    allocator.tensor(0, 16, nothing).fill_(1)
    allocator.close()


def test_works_with_a_small_dev_shm():
    code = (
        "from iris_core import Iris; import torch\n"
        "ctx = Iris('256MiB', device='cpu')\n"
        "t = ctx.ones(192 << 20, dtype=torch.uint8)\n"
        "print(int(t[::4096].sum())); ctx.close()"
    )
    script = f'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "{sys.executable}" -c "{code}"'
    try:
        allowed = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this user may not make mount namespaces")
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str((192 << 20) // 4096)


def shared_kib():
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith("RssShmem"))
