"""Allocators with one mistake each; all else is the host allocator's."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import mmap
import os
import weakref

import torch

from iris_allocators.host import HostAllocator
from iris_core.testing.conformance.plugin_jobs import received
from iris_core.types import PeerMapping
from kit_mutants import wrong

_kept = []  # what leaks on purpose


def made(change):
    """An allocator that is changed once it is made."""
    return wrong(HostAllocator, __init__=lambda self, init, request: (init(request), change(self))[0])


CrookedBase = made(lambda self: setattr(self, "base_ptr", self.base_ptr + 1))
ShortHeap = made(lambda self: setattr(self, "nbytes", self.nbytes - mmap.PAGESIZE))
LeakyDescriptor = made(lambda self: _kept.append(os.dup(self._memory[0])))
OddGranularity = wrong(HostAllocator, granularity=property(lambda self: 3 * mmap.PAGESIZE))
OneMemory = made(lambda self: setattr(self, "base_ptr", mmap.PAGESIZE << 20))
"""Every heap of the process is the same memory."""
RestlessGeneration = wrong(HostAllocator, generation=property(lambda self, reads=itertools.count(): next(reads)))
"""Another one whenever it is asked for."""


class SwappedParameters(HostAllocator):
    def tensor(self, nbytes, offset_bytes, on_release):
        return super().tensor(offset_bytes, nbytes, on_release)


class UndeclaredCapability(HostAllocator):
    """Offers decommit, but its plugin does not say so."""


class PlainError(HostAllocator):
    """A size that cannot be becomes an error that is none of Iris."""

    def __init__(self, request):
        if request.heap_nbytes > 1 << 60:
            raise OverflowError("too large")
        super().__init__(request)


# By (self, the right method, offset, size, what is called at the end).
def in_tensor(function):
    return wrong(HostAllocator, tensor=function)


ShiftedTensor = in_tensor(lambda self, tensor, at, n, release: tensor(at + 1, n, release))
SharedStorage = in_tensor(lambda self, tensor, at, n, release: tensor(0, self.nbytes, release)[at : at + n])
CopiedTensor = in_tensor(lambda self, tensor, at, n, release: tensor(at, n, release).clone())
OverlappingTensors = in_tensor(lambda self, tensor, at, n, release: tensor(max(at - 1, 0), n, release))
ReleaseTwice = in_tensor(lambda self, tensor, at, n, release: tensor(at, n, lambda: (release(), release())))
ReleaseNever = in_tensor(lambda self, tensor, at, n, release: tensor(at, n, lambda: None))
UsableAfterClose = in_tensor(
    lambda self, tensor, at, n, release: tensor(at, n, release) if self._memory else torch.empty(n, dtype=torch.uint8)
)


@in_tensor
def ReleaseEarly(self, tensor, at, n, release):
    """Called when the first tensor object is gone, although views live."""
    made = tensor(at, n, lambda: None)
    weakref.finalize(made, release).atexit = False
    return made


@in_tensor
def ReleaseByPlace(self, tensor, at, n, release):
    """Tensors on the same range are taken for one."""
    waiting = self.__dict__.setdefault("_waiting", {})
    waiting[at] = release
    return tensor(at, n, lambda: waiting.pop(at, lambda: None)())


class ReleaseAtClose(HostAllocator):
    """Called once more by close()."""

    def tensor(self, offset_bytes, nbytes, on_release):
        self._last = on_release
        return super().tensor(offset_bytes, nbytes, on_release)

    def close(self):
        if self._memory is not None and hasattr(self, "_last"):
            self._last()
        super().close()


CommitClears = wrong(HostAllocator, commit=lambda self, _, at, n: ctypes.memset(self.base_ptr + at, 0, n))
DecommitTooMuch = wrong(HostAllocator, decommit=lambda self, decommit, at, n: decommit(at, n + self.granularity))


class CloseOnce(HostAllocator):
    def close(self):
        if self._memory is None:
            raise RuntimeError("closed already")
        super().close()


class CloseTakesMemory(HostAllocator):
    """Tensors that outlive close() crash."""

    def close(self):
        if self._memory is not None:
            libc = ctypes.CDLL(None)
            libc.mprotect(ctypes.c_void_p(self.base_ptr), ctypes.c_size_t(self.nbytes), 0)
        super().close()


LeakyMapping = wrong(HostAllocator, close=lambda self, close: (_kept.append(self._memory), close()))
ShortExport = wrong(
    HostAllocator, export=lambda self, export: tuple(dataclasses.replace(s, nbytes=s.nbytes - 1) for s in export())
)
ExportOpens = wrong(HostAllocator, export=lambda self, export: tuple(received(export())))
"""A new descriptor with every export."""


def in_import(function):
    """Function of (self, the right method, rank, segments)."""
    return wrong(HostAllocator, import_peer=function)


@in_import
def WrongPeer(self, import_peer, rank, segments):
    """All peers are the first one."""
    first = min(self._peers, default=rank)
    mapping = import_peer(rank, segments)
    return dataclasses.replace(self._peers[first][1], rank=mapping.rank)


@in_import
def OwnPeer(self, import_peer, rank, segments):
    """Every peer is this rank itself."""
    import_peer(rank, segments)
    return PeerMapping(rank, self.base_ptr, self.nbytes)


@in_import
def ShiftedPeer(self, import_peer, rank, segments):
    mapping = import_peer(rank, segments)
    return dataclasses.replace(mapping, base_ptr=mapping.base_ptr + 8)


@in_import
def ImportAgain(self, import_peer, rank, segments):
    """Another mapping with every import."""
    _kept.append(self._peers.pop(rank, None))
    return import_peer(rank, segments)


@in_import
def LeakyImport(self, import_peer, rank, segments):
    _kept.extend(received(segments))
    return import_peer(rank, segments)


@in_import
def LeakyError(self, import_peer, rank, segments):
    """The caller's descriptors stay open when it raises."""
    mapping = import_peer(rank, received(segments))
    for segment in segments:
        if segment.fd is not None:
            os.close(segment.fd)
    return mapping


KeptDescriptors = in_import(lambda self, import_peer, rank, segments: import_peer(rank, received(segments)))
"""The caller's descriptors stay open."""


class SnapshotPeer(HostAllocator):
    """A private copy of what the peer had."""

    def _map_fd(self, fd, nbytes):
        if not hasattr(self, "_memory"):
            return super()._map_fd(fd, nbytes)
        return mmap.mmap(fd, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
