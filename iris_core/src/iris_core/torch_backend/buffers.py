"""Buffers on the symmetric heap that are used again, for what torch allocates at every step."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING

import torch

from iris_core.errors import ArgumentError

if TYPE_CHECKING:
    from iris_core.api import Iris


class Buffers:
    """Tensors on a context's heap, each used again on its stream when nothing refers to it any longer.

    Collective: all ranks take and drop buffers of the same sizes in the same order, as FSDP2 does; then they lie at the
    same offsets.  FSDP2 orders its streams before it drops a buffer, as it must with torch's own allocator.
    """

    def __init__(self, ctx: Iris) -> None:
        self._context, self._gpu = weakref.ref(ctx), ctx._binder.gpu
        # by stream and bytes: memory, and references when unused, the one that was taken longest ago first
        self._made: dict[int, dict[int, deque[tuple[torch.Tensor, int]]]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of (numel,), uninitialised, on the smallest unused buffer that holds it, or on a new one."""
        ctx = self._context()
        if ctx is None:
            raise ArgumentError("the context of these buffers is gone")
        nbytes = numel * dtype.itemsize
        stream = 0 if self._gpu is None else torch._C._cuda_getCurrentRawStream(self._gpu)
        made = self._made.setdefault(stream, {})
        for size in sorted(each for each in made if each >= nbytes):
            for _ in range(len(made[size])):
                memory, references = made[size][0]
                made[size].rotate(-1)
                if _references(memory) == references:
                    return memory[:nbytes].view(dtype)
        memory = ctx.empty(max(nbytes, 1), dtype=torch.uint8)
        made.setdefault(memory.nbytes, deque()).append((memory, _references(memory)))
        return memory[:nbytes].view(dtype)


def _references(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
