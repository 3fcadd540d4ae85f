"""What calls of `ctx.ops` have prepared, held by the caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from iris_core.dispatch.bind import Launches
from iris_core.dispatch.host import Scratch


@dataclass(eq=False)
class FusedWorkspace:
    """Plans of `ctx.ops` and their memory, for calls that are repeated.

    The context keeps what it prepares for every kind of call by itself, as long as it is open; so nobody needs a
    workspace for speed.  With a workspace, plans and their local memory are the caller's, and can be let go of.
    Memory that peers reach stays with the context.

    It serves one context: another one may use it after `reset()` or `clear()`, or when the first one was closed.
    A graph that was captured with it needs it for its replays, neither reset nor cleared.

    Nothing has to be reset between calls: flags count, and are never set back.

    Attributes:
        operation: of the last call; empty before the first one.
        shape: (m, n, k) of the product that each rank computed in it.
        dtype: of its operands.
        world_size: ranks that took part.
        variant: the algorithm.
        aux_buffer: memory of this rank that the algorithm stages in (uint8); None if it needs none.
        locks: local flags of the algorithm; None if it has none.
        prepared: whether the last call, or a preamble, has prepared it.
        calls, held, scratch, owner: the plans, those that graphs know, their memory, and whose they are; the library's.
    """

    operation: str = ""
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    world_size: int = 0
    variant: str = ""
    aux_buffer: torch.Tensor | None = field(default=None, repr=False)
    locks: torch.Tensor | None = field(default=None, repr=False)
    prepared: bool = False
    calls: Launches = field(default_factory=Launches, repr=False)
    held: dict[int, Any] = field(default_factory=dict, repr=False)
    scratch: Scratch = field(default_factory=Scratch, repr=False)
    owner: object = field(default=None, repr=False)

    def matches(
        self, operation: str, shape: tuple[int, ...], dtype: torch.dtype, world_size: int, variant: str = ""
    ) -> bool:
        """Whether it is prepared for such a call; with `variant`, for that algorithm."""
        same = (self.operation, self.shape, self.dtype, self.world_size) == (operation, shape, dtype, world_size)
        return self.prepared and same and variant in ("", self.variant)

    def reset(self) -> None:
        """Forget the plans; local memory stays, for the next call."""
        self.calls.clear()
        self.held.clear()
        self.owner = None
        self.aux_buffer = self.locks = None
        self.prepared = False

    def clear(self) -> None:
        """Forget everything, and let go of the local memory."""
        self.reset()
        self.operation, self.shape, self.dtype, self.world_size, self.variant = "", (), None, 0, ""
        self.scratch.clear()

    def describe(self, bound: Any) -> None:
        """Take over what a call has prepared; a plan may have the attributes `aux_buffer` and `locks`."""
        if (request := bound.request) is None:
            return
        self.operation, self.shape, self.dtype = request.op, request.shape, getattr(torch, request.dtype)
        self.world_size, self.variant, self.prepared = request.group_size, bound.algorithm, True
        self.aux_buffer, self.locks = getattr(bound.plan, "aux_buffer", None), getattr(bound.plan, "locks", None)
