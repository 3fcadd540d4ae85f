"""What an algorithm of `ctx.ops` gets to prepare with: the team, memory, and the collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.config import Config
    from iris_core.dispatch.team import Region, Team
    from iris_core.types import CollectiveRequest

_STEP = 16 << 20
_REGION = "ops"


class Scratch:
    """Local memory that the plans of one team share: their calls run one after the other.

    A plan that was given a tensor keeps it, so memory that has become too small lives as long as such plans.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[tuple[int, ...], str], torch.Tensor] = {}

    def take(self, team: Team, nbytes: int, what: str) -> torch.Tensor:
        """Return at least so many bytes (uint8) for a team; the same as before if they are enough.

        Two names, of `what` they are for, never share memory.
        """
        key = team.members, what
        tensor = self._tensors.get(key)
        if tensor is None or tensor.numel() < nbytes:
            tensor = self._tensors[key] = torch.empty(rounded(nbytes), dtype=torch.uint8, device=team.device)
        return tensor

    def clear(self) -> None:
        """Let go of it."""
        self._tensors.clear()


class Host:
    """What `FusedOperation.prepare` gets.

    Attributes:
        team: the members; see docs/collectives.md.
        processors: multiprocessors (SMs, CUs) of the device, of the smallest one of all ranks; on the CPU 1.
    """

    def __init__(self, serve: Callable[..., Any], team: Team, scratch: Scratch, processors: int) -> None:
        self._serve = serve
        self.team = team
        self._scratch = scratch
        self.processors = processors

    def collective(self, request: CollectiveRequest, config: Config | None = None) -> Any:
        """Return what serves a collective: a `Bound`, whose `launch` runs it as a part of an operation.

        A `config` may name the algorithm.

        Collective: every member calls it.
        """
        return self._serve(request, config, within=self.team)

    def symmetric(self, nbytes: int) -> Region | None:
        """Return memory of at least so many bytes that peers can reach, at the same place on all; None without room.

        The plans of one team share it: what a call left there is lost at the next one.

        Collective: every member calls it with the same size, and gets the same answer.
        """
        exhausted = self.team.exhausted  # asking again would be an exchange that the others may not take part in
        for size in (rounded(nbytes), -(-nbytes // _STEP) * _STEP):  # with room for larger calls, or without
            if size < exhausted.get(_REGION, size + 1):
                try:
                    return self.team.region(_REGION, size, fill=None)
                except UnsupportedError:
                    exhausted[_REGION] = size
        reason = f"there is no room for {nbytes} bytes; open the context with a larger heap_size"
        self.team.warn_once("fused operations do without memory that peers reach", reason)
        return None

    def scratch(self, nbytes: int, what: str = "") -> torch.Tensor:
        """Return local memory of at least so many bytes (uint8), which the plans of one team share; see `Scratch`."""
        return self._scratch.take(self.team, nbytes, what)


def rounded(nbytes: int) -> int:
    """A power of two: what calls that grow leave behind on their way is no more than what they use at last."""
    return max(256, 1 << (nbytes - 1).bit_length())
