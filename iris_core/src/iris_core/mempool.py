"""A torch MemPool whose memory is the symmetric heap, so that any torch operator can make symmetric tensors.

torch asks for memory in segments (2 MiB, 20 MiB or more) through two C functions and hands out parts of them itself.
The functions here are Python behind ctypes: a segment is a block of the heap like any other, made by the same
collective growth and given back by the same agreement of all ranks as a tensor that was dropped.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import UnsupportedError
from iris_core.logs import logger

if TYPE_CHECKING:
    from iris_core.heap import SymmetricHeap
    from iris_core.types import DeviceTarget

ALIGNMENT = 512
"""What torch's caching allocator expects of a segment's address, in bytes."""

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)


class _Segments:
    """The two functions that torch calls, and the segments that it has.

    Args:
        heap: where segments come from; not kept alive.
        index: torch's index of the heap's device.
    """

    def __init__(self, heap: SymmetricHeap, index: int) -> None:
        self._heap = weakref.ref(heap)
        self._index = index
        self._live: dict[int, torch.Tensor] = {}  # by address; a tensor keeps its block of the heap
        self.functions = _ALLOCATE(self._allocate), _FREE(self._free)
        self.allocator: Any = None

    def _allocate(self, nbytes: int, device: int, stream: int | None) -> int | None:
        """Return a segment's address; None makes torch free what it caches, try again, and raise OutOfMemoryError."""
        heap = self._heap()
        try:
            if heap is None or device != self._index:
                raise UnsupportedError(f"the pool is for cuda:{self._index} and an open context")
            segment = heap.allocate_unscoped(nbytes, ("mem_pool", nbytes), ALIGNMENT)
        except Exception as e:  # noqa: BLE001 - there is no Python above to catch it; torch raises its own error
            logger.error("mem_pool: no segment of %d bytes: %s", nbytes, str(e))
            return None
        ptr = segment.data_ptr()
        self._live[ptr] = segment
        return ptr

    def _free(self, ptr: int, nbytes: int, device: int, stream: int | None) -> None:
        """Drop a segment: the heap reclaims it when all ranks have."""
        del self._live[ptr]


# torch keeps plain pointers to the functions and calls them as long as it has a segment, also when the pool is gone.
_kept: list[_Segments] = []


def make_mem_pool(heap: SymmetricHeap, target: DeviceTarget) -> torch.cuda.MemPool:
    """Make a MemPool on a heap.

    Args:
        heap: an open heap on a GPU.
        target: the heap's device.

    Raises:
        UnsupportedError: the device is no GPU.
    """
    if target.torch_device == "cpu":
        raise UnsupportedError("mem_pool: torch has memory pools for GPUs only; make CPU tensors with ctx.empty(...)")
    segments = _Segments(heap, target.index)
    allocate, free = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in segments.functions)
    segments.allocator = torch._C._cuda_customAllocator(allocate, free)
    _kept.append(segments)
    return torch.cuda.MemPool(segments.allocator)
