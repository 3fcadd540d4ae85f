"""Ranges of a heap on a GPU, as torch takes them in."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


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
        """Return a 1-D uint8 tensor, which `as_bytes` makes; `on_release` is called when its storage is gone."""
        out = as_bytes(self)
        weakref.finalize(self, on_release).atexit = False
        return out
