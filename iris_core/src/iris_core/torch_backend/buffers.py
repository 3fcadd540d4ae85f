"""Buffers on the symmetric heap that are used again, for what torch allocates at every step."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Sequence

import torch

from iris_core.api import Iris
from iris_core.errors import ArgumentError


class _Buffer:
    """Memory that is unused while only this holds its storage."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self._storage = memory, memory.untyped_storage()._cdata
        self._typed: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._references = self._count()

    def _count(self) -> int:
        return torch._C._storage_Use_Count(self._storage)

    def is_unused(self) -> bool:
        return self._count() == self._references

    def view(self, nbytes: int, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of a size at the begin of the memory, which is unused."""
        typed = self._typed.get((nbytes, dtype))
        if typed is None:
            typed = self._typed[nbytes, dtype] = self.memory[:nbytes].view(dtype)
            self._references = self._count()
        return typed.view(size)


class Buffers:
    """Tensors on a context's heap, each used again on its stream when nothing refers to it any longer.

    Collective: all ranks take and drop buffers of the same sizes in the same order, as FSDP2 does; then they lie at the
    same offsets.  FSDP2 orders its streams before it drops a buffer, as it must with torch's own allocator.
    """

    def __init__(self, ctx: Iris) -> None:
        self._context, self._gpu = weakref.ref(ctx), ctx._binder.gpu
        # by stream and bytes, the one that was taken longest ago first
        self._made: dict[int, dict[int, deque[_Buffer]]] = {}

    def take(self, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of a size, uninitialised, on the smallest unused buffer that holds it, or on a new one."""
        ctx = self._context()
        if ctx is None:
            raise ArgumentError("the context of these buffers is gone")
        nbytes = math.prod(size) * dtype.itemsize
        stream = 0 if self._gpu is None else torch._C._cuda_getCurrentRawStream(self._gpu)
        made = self._made.setdefault(stream, {})
        for enough in sorted(each for each in made if each >= nbytes):
            for _ in range(len(made[enough])):
                made[enough].rotate(-1)
                if made[enough][-1].is_unused():
                    return made[enough][-1].view(nbytes, size, dtype)
        buffer = _Buffer(ctx.empty(max(nbytes, 1), dtype=torch.uint8))
        made.setdefault(buffer.memory.nbytes, deque()).append(buffer)
        return buffer.view(nbytes, size, dtype)
