"""The "host" allocator: a symmetric heap in CPU shared memory.

Each rank's heap is one memfd: anonymous, sparse (a page exists once it is touched, so a heap of 64 GiB opens at once
and costs nothing), not limited by the size of /dev/shm, and gone with its last mapping.  Peers receive the descriptor
and map the same pages, so loads, stores and atomics of every rank act on the same memory.

Lifetime: mappings are never unmapped by hand.  Every tensor's storage holds the memory map that it lies in; close()
drops the allocator's own reference, and the kernel takes the pages back when the last tensor is gone.  A tensor that
outlives the heap therefore stays readable instead of crashing the interpreter.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence

import torch

from iris_allocators.info import HOST_INFO
from iris_core.errors import HeapClosedError, HeapError
from iris_core.types import CreateRequest, PeerMapping, Segment
from iris_core.world.exchange import close_all

GRANULE = 2 << 20  # bytes by which freed memory is given back to the system

# Seals limit what peers can do with the descriptor: no process can shrink the file under a mapping (SIGBUS).
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryFile:
    """One rank's heap in a memfd; satisfies `iris_core.protocols.Allocator`.  HeapError if the system refuses it."""

    info = HOST_INFO
    granularity = GRANULE
    generation = 1  # the whole heap is exported at once and never grows

    def __init__(self, request: CreateRequest) -> None:
        self._rank = request.rank
        self.nbytes = max(1, -(-request.heap_nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        self._huge_pages = bool(getattr(request.settings, "huge_pages", False))
        self._peers: dict[int, tuple[mmap.mmap, PeerMapping]] = {}
        try:
            fd = os.memfd_create(f"iris-heap-{request.rank}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as e:
            raise HeapError(f"cannot create a memory file for rank {self._rank}'s heap: {e.strerror}") from e
        try:
            os.ftruncate(fd, self.nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            mapped = self._map_fd(fd, self.nbytes)
        except (OSError, HeapError, OverflowError) as e:
            os.close(fd)
            if isinstance(e, HeapError):
                raise
            raise HeapError(f"cannot make a heap of {self.nbytes} bytes for rank {self._rank}: {e}") from e
        self._memory: tuple[int, mmap.mmap, memoryview] | None = fd, mapped, memoryview(mapped)
        self.base_ptr = address_of(mapped)
        # a process that forgets close() must not keep the descriptor when the allocator is collected
        self._fd_guard = weakref.finalize(self, os.close, fd)

    # -- memory -------------------------------------------------------------------------------------------------------
    def commit(self, offset_bytes: int, nbytes: int) -> None:
        """Do nothing: pages are allocated on first access."""

    def tensor(self, offset_bytes: int, nbytes: int, on_release: Callable[[], None]) -> torch.Tensor:
        _, _, view = self._opened()
        part = view[offset_bytes : offset_bytes + nbytes]  # torch holds it until the storage dies, and it holds the map
        weakref.finalize(part, on_release).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)

    # -- peers --------------------------------------------------------------------------------------------------------
    def export(self) -> Sequence[Segment]:
        return (Segment(offset_bytes=0, nbytes=self.nbytes, fd=self._opened()[0]),)

    def import_peer(self, rank: int, segments: Sequence[Segment]) -> PeerMapping:
        """Map a peer's heap and close the received descriptors; HeapError if they are not one heap of this kind."""
        try:
            self._opened()
            if rank in self._peers:
                return self._peers[rank][1]
            if len(segments) != 1 or segments[0].fd is None or segments[0].offset_bytes != 0:
                raise HeapError(f"rank {rank} did not send one memory file: its allocator is not 'host'")
            nbytes, fd = segments[0].nbytes, segments[0].fd
            if os.fstat(fd).st_size < nbytes:
                raise HeapError(f"rank {rank}'s memory file has fewer than the promised {nbytes} bytes")
            mapped = self._map_fd(fd, nbytes)
            mapping = PeerMapping(rank=rank, base_ptr=address_of(mapped), nbytes=nbytes)
            self._peers[rank] = (mapped, mapping)
            return mapping
        finally:
            close_all(each.fd for each in segments if each.fd is not None)

    def close(self) -> None:
        """Drop the peers' mappings, then this rank's; live tensors keep theirs."""
        self._peers.clear()
        self._memory = None
        self._fd_guard()

    def _opened(self) -> tuple[int, mmap.mmap, memoryview]:
        """Return the memory file's descriptor, the map, and a view of it."""
        if self._memory is None:
            raise HeapClosedError("the heap is closed")
        return self._memory

    def _map_fd(self, fd: int, nbytes: int) -> mmap.mmap:
        try:
            mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, OverflowError) as e:
            hint = ""
            if isinstance(e, OSError) and e.errno == errno.ENOMEM:
                hint = "; look at `ulimit -v` and vm.overcommit_memory, or choose a smaller heap_size"
            raise HeapError(f"cannot map {nbytes} bytes of shared memory: {e}{hint}") from e
        if self._huge_pages and sys.platform == "linux":
            try:
                mapped.madvise(mmap.MADV_HUGEPAGE)
            except OSError as e:
                raise HeapError(
                    f"the kernel refuses huge pages for shared memory ({e.strerror}): unset IRIS_HOST__HUGE_PAGES"
                ) from e
        return mapped


class HostAllocator(MemoryFile):
    """A memory file whose freed parts go back to the system; satisfies `SupportsDecommit` as well."""

    @property
    def committed_bytes(self) -> int:
        return os.fstat(self._opened()[0]).st_blocks * 512

    def decommit(self, offset_bytes: int, nbytes: int) -> None:
        """Return whole granules to the system; they read as zero afterwards."""
        _, mapped, _ = self._opened()
        try:
            mapped.madvise(mmap.MADV_REMOVE, offset_bytes, nbytes)
        except OSError as e:
            raise HeapError(f"cannot give {nbytes} bytes at offset {offset_bytes} back: {e.strerror}") from e


def address_of(mapped: mmap.mmap) -> int:
    """Return where a map begins in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
