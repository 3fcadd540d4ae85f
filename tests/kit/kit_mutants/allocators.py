"""Allocators with one mistake each; all else is the host allocator's."""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import weakref

import torch

from iris_allocators.host import HostAllocator
from iris_core.testing.conformance.plugin_jobs import received
from iris_core.types import PeerMapping

_kept = []  # what leaks on purpose


def _close(segments):
    for segment in segments:
        if segment.fd is not None:
            os.close(segment.fd)


# -- description ------------------------------------------------------------------------------------------------------
class CrookedBase(HostAllocator):
    def __init__(self, request):
        super().__init__(request)
        self.base_ptr += 1


class ShortHeap(HostAllocator):
    def __init__(self, request):
        super().__init__(request)
        self.nbytes -= mmap.PAGESIZE


class OddGranularity(HostAllocator):
    granularity = property(lambda self: 3 * mmap.PAGESIZE)


class RestlessGeneration(HostAllocator):
    _reads = 0

    @property
    def generation(self):
        self._reads += 1
        return self._reads


class OneMemory(HostAllocator):
    """Every heap of the process is the same memory."""

    _first = None

    def __init__(self, request):
        super().__init__(request)
        cls = type(self).__mro__[1]
        fd, *own = self._memory
        if cls._first is None or cls._first[1] < self.nbytes:
            cls._first = own, self.nbytes, self.base_ptr
        shared, _, self.base_ptr = cls._first
        self._memory = (fd, *shared)


class SwappedParameters(HostAllocator):
    def tensor(self, nbytes, offset_bytes, on_release):
        return super().tensor(offset_bytes, nbytes, on_release)


class UntoldCapability(HostAllocator):
    """Offers decommit, but its plugin does not say so."""


class PlainError(HostAllocator):
    """A size that cannot be becomes an error that is none of Iris."""

    def __init__(self, request):
        if request.heap_nbytes > 1 << 60:
            raise OverflowError("too large")
        super().__init__(request)


# -- memory -----------------------------------------------------------------------------------------------------------
class ShiftedTensor(HostAllocator):
    def tensor(self, offset_bytes, nbytes, on_release):
        return super().tensor(offset_bytes + 1, nbytes, on_release)


class SharedStorage(HostAllocator):
    def tensor(self, offset_bytes, nbytes, on_release):
        return super().tensor(0, self.nbytes, on_release)[offset_bytes : offset_bytes + nbytes]


class CopiedTensor(HostAllocator):
    """The tensor is somewhere else."""

    def tensor(self, offset_bytes, nbytes, on_release):
        return super().tensor(offset_bytes, nbytes, on_release).clone()


class OverlappingTensors(HostAllocator):
    """Neighbours share the bytes at their border."""

    def tensor(self, offset_bytes, nbytes, on_release):
        return super().tensor(max(offset_bytes - 1, 0), nbytes, on_release)


class ReleaseTwice(HostAllocator):
    def tensor(self, offset_bytes, nbytes, on_release):
        return super().tensor(offset_bytes, nbytes, lambda: (on_release(), on_release()))


class ReleaseNever(HostAllocator):
    def tensor(self, offset_bytes, nbytes, on_release):
        return super().tensor(offset_bytes, nbytes, lambda: None)


class ReleaseEarly(HostAllocator):
    """Told when the first tensor object is gone, although views live."""

    def tensor(self, offset_bytes, nbytes, on_release):
        tensor = super().tensor(offset_bytes, nbytes, lambda: None)
        weakref.finalize(tensor, on_release).atexit = False
        return tensor


class ReleaseAtClose(HostAllocator):
    """Told once more by close()."""

    def tensor(self, offset_bytes, nbytes, on_release):
        self._last = on_release
        return super().tensor(offset_bytes, nbytes, on_release)

    def close(self):
        if self._memory is not None and hasattr(self, "_last"):
            self._last()
        super().close()


class ReleaseByPlace(HostAllocator):
    """Tensors on the same range are taken for one."""

    def tensor(self, offset_bytes, nbytes, on_release):
        waiting = self.__dict__.setdefault("_waiting", {})
        waiting[offset_bytes] = on_release
        return super().tensor(offset_bytes, nbytes, lambda: waiting.pop(offset_bytes, lambda: None)())


class CommitClears(HostAllocator):
    def commit(self, offset_bytes, nbytes):
        ctypes.memset(self.base_ptr + offset_bytes, 0, nbytes)


class DecommitTooMuch(HostAllocator):
    def decommit(self, offset_bytes, nbytes):
        super().decommit(offset_bytes, nbytes + self.granularity)


# -- the end ----------------------------------------------------------------------------------------------------------
class CloseOnce(HostAllocator):
    def close(self):
        if self._memory is None:
            raise RuntimeError("closed already")
        super().close()


class UsableAfterClose(HostAllocator):
    def tensor(self, offset_bytes, nbytes, on_release):
        if self._memory is None:
            return torch.empty(nbytes, dtype=torch.uint8)
        return super().tensor(offset_bytes, nbytes, on_release)


class CloseTakesMemory(HostAllocator):
    """Tensors that outlive close() crash."""

    def close(self):
        if self._memory is not None:
            libc = ctypes.CDLL(None)
            libc.mprotect(ctypes.c_void_p(self.base_ptr), ctypes.c_size_t(self.nbytes), 0)
        super().close()


class LeakyDescriptor(HostAllocator):
    def __init__(self, request):
        super().__init__(request)
        _kept.append(os.dup(self._memory[0]))


class LeakyMapping(HostAllocator):
    def close(self):
        _kept.append(self._memory)
        super().close()


# -- peers ------------------------------------------------------------------------------------------------------------
class ShortExport(HostAllocator):
    def export(self):
        return tuple(dataclasses.replace(segment, nbytes=segment.nbytes - 1) for segment in super().export())


class ExportOpens(HostAllocator):
    """A new descriptor with every export."""

    def export(self):
        return tuple(received(super().export()))


class WrongPeer(HostAllocator):
    """All peers are the first one."""

    def import_peer(self, rank, segments):
        first = min(self._peers, default=rank)
        mapping = super().import_peer(rank, segments)
        return dataclasses.replace(self._peers[first][1], rank=mapping.rank)


class OwnPeer(HostAllocator):
    """Every peer is this rank itself."""

    def import_peer(self, rank, segments):
        super().import_peer(rank, segments)
        return PeerMapping(rank, self.base_ptr, self.nbytes)


class ShiftedPeer(HostAllocator):
    def import_peer(self, rank, segments):
        mapping = super().import_peer(rank, segments)
        return dataclasses.replace(mapping, base_ptr=mapping.base_ptr + 8)


class SnapshotPeer(HostAllocator):
    """A private copy of what the peer had."""

    def _map_fd(self, fd, nbytes):
        if not hasattr(self, "_memory"):
            return super()._map_fd(fd, nbytes)
        return mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


class ImportAgain(HostAllocator):
    """Another mapping with every import."""

    def import_peer(self, rank, segments):
        _kept.append(self._peers.pop(rank, None))
        return super().import_peer(rank, segments)


class LeakyImport(HostAllocator):
    def import_peer(self, rank, segments):
        _kept.extend(received(segments))
        return super().import_peer(rank, segments)


class KeptDescriptors(HostAllocator):
    """The caller's descriptors stay open."""

    def import_peer(self, rank, segments):
        return super().import_peer(rank, received(segments))


class LeakyError(HostAllocator):
    """The caller's descriptors stay open when it raises."""

    def import_peer(self, rank, segments):
        mapping = super().import_peer(rank, received(segments))
        _close(segments)
        return mapping
