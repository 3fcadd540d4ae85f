"""Buffers on the symmetric heap that are used again, for what torch allocates at every step."""

from __future__ import annotations

import weakref
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
        self._context = weakref.ref(ctx)
        self._made: dict[int, list[tuple[torch.Tensor, int]]] = {}  # by stream: memory, and references when unused

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of (numel,), uninitialised, on the smallest unused buffer that holds it, or on a new one."""
        ctx = self._context()
        if ctx is None:
            raise ArgumentError("the context of these buffers is gone")
        nbytes = numel * dtype.itemsize
        stream = torch.cuda.current_stream(ctx.device).cuda_stream if ctx.device != "cpu" else 0
        made = self._made.setdefault(stream, [])
        unused = [each for each, references in made if each.nbytes >= nbytes and _references(each) == references]
        if unused:
            memory = min(unused, key=lambda each: each.nbytes)
        else:
            memory = ctx.empty(max(nbytes, 1), dtype=torch.uint8)
            made.append((memory, _references(memory)))
        return memory[:nbytes].view(dtype)


def _references(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
