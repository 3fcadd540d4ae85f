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
    from collections.abc import Mapping, Sequence

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
    GIVEN_UP = 5  # of a rank that only lets the others know; see `whereabouts`


def alike(frames: Sequence[Sequence[int]]) -> bool:
    """Whether the ranks are in the same exchange."""
    compared = 2 if frames[0][0] == Kind.INTEGERS else 1
    return len({tuple(frame[:compared]) for frame in frames}) == 1


def where_called() -> str:
    """Say which function of Iris was called last by somebody else, and where; for messages."""
    return place().decode(errors="replace")


def place() -> bytes:
    """The same, encoded and cut to the room there is; quick, because every exchange asks."""
    frame, inner = sys._getframe(1), None
    while frame.f_globals.get("__name__", "").startswith("iris_"):
        if frame.f_back is None:
            return frame.f_code.co_name.encode()[:PLACE_NBYTES]
        frame, inner = frame.f_back, frame
    assert inner is not None
    key = frame.f_code.co_filename, frame.f_lineno, inner.f_code.co_name
    found = _places.get(key)
    if found is None:
        if len(_places) >= _MOST_PLACES:
            _places.clear()
        text = f"{inner.f_code.co_name}(), called at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        found = _places[key] = text.encode()[:PLACE_NBYTES]
    return found


_MOST_PLACES = 4096
_places: dict[tuple[str, int, str], bytes] = {}


def mismatch(places: Mapping[int, str]) -> RankMismatchError:
    """The error of ranks that are in different exchanges.

    Args:
        places: by rank, what `where_called` has said there.
    """
    by_place: dict[str, list[int]] = {}
    for rank, where in places.items():
        by_place.setdefault(where, []).append(rank)
    lines = "".join(f"\n  {name_ranks(ranks)}: {where}" for where, ranks in by_place.items())
    return RankMismatchError(
        f"the ranks are in different calls that all of them take part in:{lines}\nIf one of them went on after an "
        "error, the others were still waiting for it; if a call lies inside `if rank == ...`, all ranks must make it."
    )


def stuck(found: str) -> RankMismatchError:
    """The error of ranks that wait for each other in different exchanges.

    Args:
        found: where each of them is, in lines.
    """
    return RankMismatchError(
        f"these ranks wait for each other and cannot go on:{found}\nAll members of a group must make its calls, in the "
        "same order as those of other groups that they are in, and name the same members."
    )


def too_late(rank: int, ranks: Sequence[int], found: str) -> RankMismatchError:
    """The error of a rank that comes to an exchange after others have given it up.

    Args:
        rank: this rank.
        ranks: those that gave it up.
        found: where the ranks were that waited for each other, in lines.
    """
    return RankMismatchError(
        f"rank {rank} came to an exchange that {name_ranks(ranks)} had given up, because ranks waited for each other "
        f"and could not go on:{found}"
    )
