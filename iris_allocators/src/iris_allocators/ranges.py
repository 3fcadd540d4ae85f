"""Ranges of a heap on a GPU, as torch takes them in."""

from __future__ import annotations

import ctypes
import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

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

    def tensor(self, as_bytes: Callable[[Range], torch.Tensor], on_release: Callable[[], None]) -> torch.Tensor:
        """Return a 1-D uint8 tensor, which `as_bytes` makes; `on_release` is called when its storage is gone.

        References that torch leaks are released: from 2.11 on it takes some to the tuples of the interface and drops
        none (pytorch/pytorch#194877), 140 bytes for each tensor.
        """
        shape, data = (self.__cuda_array_interface__[name] for name in ("shape", "data"))
        before = sys.getrefcount(shape), sys.getrefcount(data)
        try:
            out = as_bytes(self)
        finally:
            kept = sys.getrefcount(shape) - before[0], sys.getrefcount(data) - before[1]
            for each, count in (shape, kept[0]), (data, kept[1]):
                for _ in range(count):
                    _release(each)
        weakref.finalize(self, on_release).atexit = False
        return out
