"""Heaps on a GPU, and ranges of them as torch takes them in."""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from iris_core.errors import HeapClosedError
from iris_core.types import CreateRequest

_release: Any = ctypes.PYFUNCTYPE(None, ctypes.py_object)(("Py_DecRef", ctypes.pythonapi))


class Range:
    """A range of memory: `__cuda_array_interface__`, version 3.  `keep` lives as long as the storage."""

    def __init__(self, ptr: int, nbytes: int, keep: object) -> None:
        self.ptr, self.nbytes, self._keep = ptr, nbytes, keep
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
            "version": 3,
        }

    def tensor(self, device: str, on_release: Callable[[], None]) -> torch.Tensor:
        """Return a 1-D uint8 tensor; `on_release` is called when its storage is gone.

        References that torch leaks are released: from 2.11 on it takes some to the tuples of the interface and drops
        none (pytorch/pytorch#194877), 140 bytes for each tensor.
        """
        shape, data = (self.__cuda_array_interface__[name] for name in ("shape", "data"))
        before = sys.getrefcount(shape), sys.getrefcount(data)
        try:
            out = torch.as_tensor(self, device=device)
        finally:
            kept = sys.getrefcount(shape) - before[0], sys.getrefcount(data) - before[1]
            for each, count in (shape, kept[0]), (data, kept[1]):
                for _ in range(count):
                    _release(each)
        weakref.finalize(self, on_release).atexit = False
        return out


class GpuHeap:
    """What allocators of GPU memory share: size, tensors, and that all memory is there from the beginning.

    `_memory` keeps the memory, and every tensor's storage holds it, too; it is None once the heap is closed.
    """

    base_ptr: int
    generation = 1
    _memory: Any

    def __init__(self, request: CreateRequest, granularity: int) -> None:
        self._rank, self._device = request.rank, request.target.torch_device
        self.granularity = granularity
        self.nbytes = max(1, -(-request.heap_nbytes // granularity)) * granularity

    def commit(self, offset_bytes: int, nbytes: int) -> None:
        """Do nothing: all memory is allocated at opening."""

    def tensor(self, offset_bytes: int, nbytes: int, on_release: Callable[[], None]) -> torch.Tensor:
        self._check_open()
        return Range(self.base_ptr + offset_bytes, nbytes, self._memory).tensor(self._device, on_release)

    def _check_open(self) -> None:
        if self._memory is None:
            raise HeapClosedError("the heap is closed")
