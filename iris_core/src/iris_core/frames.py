"""What ranks send first in every exchange between hosts: what kind of exchange they are in, and what fits beside that.

All exchanges begin alike, so ranks that are in different ones notice it and can say so, instead of reading each other's
data as something else.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from iris_core.agreement import name_ranks
from iris_core.errors import RankMismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

WORDS = 16
"""Integers of 64 bits in a frame: the kind, the size, and what fits."""

ROOM = WORDS - 2
ROOM_NBYTES = 8 * ROOM

PLACE_NBYTES = 256
"""How much a rank says about where it is, when others are elsewhere."""


class Kind(enum.IntEnum):
    """Kinds of exchanges; integers go together only if all ranks have equally many."""

    INTEGERS = 1
    OBJECTS = 2
    BROADCAST = 3
    BARRIER = 4


def alike(frames: Sequence[Sequence[int]]) -> bool:
    """Whether the ranks are in the same exchange."""
    compared = 2 if frames[0][0] == Kind.INTEGERS else 1
    return len({tuple(frame[:compared]) for frame in frames}) == 1


def where_called() -> str:
    """Say which function of Iris was called last by somebody else, and where; for messages."""
    frame, inner = sys._getframe(1), None
    while frame.f_globals.get("__name__", "").startswith("iris_"):
        if frame.f_back is None:
            return frame.f_code.co_name
        frame, inner = frame.f_back, frame
    assert inner is not None
    return f"{inner.f_code.co_name}(), called at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def mismatch(places: Sequence[str]) -> RankMismatchError:
    """The error of ranks that are in different exchanges.

    Args:
        places: of each rank, what `where_called` has said there.
    """
    by_place: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        by_place.setdefault(place, []).append(rank)
    lines = "".join(f"\n  {name_ranks(ranks)}: {place}" for place, ranks in by_place.items())
    return RankMismatchError(
        f"the ranks are in different calls that all of them take part in:{lines}\nIf one of them went on after an "
        "error, the others were still waiting for it; if a call lies inside `if rank == ...`, all ranks must make it."
    )
