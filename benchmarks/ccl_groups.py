"""The axis "group" of benchmarks/ccl.py and benchmarks/fused.py: the whole world, or its two halves side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

if TYPE_CHECKING:
    from iris_core import Iris
    from iris_core.bench import RunOptions

WORLD, HALF = "world", "half"
_FEWEST = 4  # ranks of which half is a group

_halves: dict[tuple[int, ...], Any] = {}


class Part(NamedTuple):
    """The group that a benchmark runs on.

    Attributes:
        members: for `group=`; None for all ranks.
        rank: this rank in it.
        size: how many ranks it has.
    """

    members: tuple[int, ...] | None
    rank: int
    size: int

    @property
    def process_group(self) -> Any:
        """The same for torch.distributed; None for all ranks.  Collective, the first time: every rank of the world."""
        if self.members is None:
            return None
        if not _halves:
            for first in (0, self.size):
                ranks = tuple(range(first, first + self.size))
                _halves[ranks] = dist.new_group(list(ranks))
        return _halves[self.members]


def groups(options: RunOptions) -> list[str]:
    """Values of the axis."""
    has_halves = options.num_ranks >= _FEWEST and options.num_ranks % 2 == 0
    return [WORLD, HALF] if has_halves else [WORLD]


def part_of(ctx: Iris, group: str) -> Part:
    """The group of a value that this rank is in."""
    if group == WORLD:
        return Part(None, ctx.cur_rank, ctx.num_ranks)
    size = ctx.num_ranks // 2
    first = ctx.cur_rank // size * size
    return Part(tuple(range(first, first + size)), ctx.cur_rank - first, size)
