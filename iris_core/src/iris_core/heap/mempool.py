"""A torch MemPool whose memory is the symmetric heap, so that any torch operator can make symmetric tensors.

torch asks for memory in segments (2 MiB, 20 MiB or more) through two C functions and hands out parts of them itself.
These functions are Python callbacks through ctypes; a segment is a block of the heap like any other.  No error can pass
through torch's allocator, so it is kept, and `use_mem_pool` raises it in the place of torch's OutOfMemoryError.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from iris_core.errors import UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.logs import logger
from iris_core.types import DeviceTarget

ALIGNMENT = 512
"""Alignment in bytes that torch's caching allocator expects of a segment's address."""

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class _Segments:
    """The two functions that torch calls, and the segments that it has."""

    def __init__(self, heap: SymmetricHeap, index: int) -> None:
        self._heap = weakref.ref(heap)
        self._index = index
        self.live: dict[int, torch.Tensor] = {}  # by address; a tensor keeps its block of the heap
        self.functions = _ALLOCATE(self._allocate), _FREE(self._free)
        self.allocator: Any = None
        self.pool: weakref.ref[torch.cuda.MemPool] | None = None
        self.is_shared = False
        self.failure: Exception | None = None  # why the last request was refused; None if it was not

    def _allocate(self, nbytes: int, device: int, stream: int | None) -> int | None:
        """Return a segment's address; None makes torch free what it caches, try again, and raise OutOfMemoryError."""
        heap = self._heap()
        try:
            if heap is None or device != self._index:
                raise UnsupportedError(f"the pool is for cuda:{self._index} and an open context")
            segment = heap.allocate_unscoped(nbytes, ("mem_pool", nbytes), ALIGNMENT)
        except Exception as e:  # noqa: BLE001 - there is no Python above to catch it; torch raises its own error
            logger.error("mem_pool: no segment of %d bytes: %s", nbytes, str(e))
            self.failure = e
            each: BaseException | None = e
            while each is not None:  # it is kept, and must not keep the heap alive
                each.__traceback__ = None
                each = each.__cause__ or each.__context__
            return None
        self.failure = None
        ptr = segment.data_ptr()
        self.live[ptr] = segment
        return ptr

    def _free(self, ptr: int, nbytes: int, device: int, stream: int | None) -> None:
        """Drop a segment: the heap reclaims it when all ranks have."""
        del self.live[ptr]


# torch keeps plain pointers to the functions and calls them as long as it has a segment, also when the pool is gone.
# Those that are done are dropped when the next pool is made, and not in the call that frees the last segment.
_kept: list[_Segments] = []


def make_mem_pool(heap: SymmetricHeap, target: DeviceTarget) -> torch.cuda.MemPool:
    """Make a MemPool on a heap."""
    if target.torch_device == "cpu":
        raise UnsupportedError("mem_pool: torch has memory pools for GPUs only; make CPU tensors with ctx.empty(...)")
    _kept[:] = [each for each in _kept if each.live or each.is_shared or each.pool is None or each.pool() is not None]
    segments = _Segments(heap, target.index)
    allocate, free = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in segments.functions)
    segments.allocator = torch._C._cuda_customAllocator(allocate, free)
    _kept.append(segments)
    pool = torch.cuda.MemPool(segments.allocator)
    segments.pool = weakref.ref(pool)
    return pool


def share_mem_pool(pool: torch.cuda.MemPool) -> Any:
    """Return the allocator of a pool of `make_mem_pool`, for further pools; as torch does not say which, for good."""
    segments = _segments_of(pool)
    segments.is_shared = True
    return segments.allocator


def _segments_of(pool: torch.cuda.MemPool) -> _Segments:
    return next(each for each in _kept if each.pool is not None and each.pool() is pool)


@contextlib.contextmanager
def use_mem_pool(pool: torch.cuda.MemPool, target: DeviceTarget) -> Iterator[None]:
    """`torch.cuda.use_mem_pool` for a pool of `make_mem_pool`, with the heap's errors instead of torch's."""
    segments = _segments_of(pool)
    segments.failure = None  # of an earlier block
    try:
        with torch.cuda.use_mem_pool(pool, target.torch_device):
            yield
    except torch.OutOfMemoryError as e:
        if segments.failure is None:
            raise
        raise segments.failure from e
    finally:
        segments.failure = None
