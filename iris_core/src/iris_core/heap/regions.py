"""Memory of groups of ranks, unknown to the other ranks.

The system area follows the space for users' allocations.  Every rank has it from the start, at the same offset; the
members of a group agree on a range that none of them uses.  Its content is zero when a range is handed out.

If that is not enough, groups use the upper end of the heap: users' allocations have the same offsets on all ranks and
lie below a limit that is equal on all.  Above it, the members of a group agree on a range below the regions that any of
them has already.  When allocations need more, all ranks raise the limit together, at most up to the lowest region.

Only a group's members take part, so a group never waits for other ranks.  Ranges are never given back or moved:
captured graphs hold the addresses.

Threads of a rank may take regions for several groups, and for allocations, at the same time.  Each rank has a lock, and
a step holds those of all members, taken in the order of ranks, so that no two steps wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from iris_core.errors import HeapClosedError, HeapExhaustedError, UnsupportedError
from iris_core.heap.blocks import HeapState
from iris_core.heap.offsets import MIN_ALIGNMENT, RangeSet
from iris_core.types import Block
from iris_core.world import World
from iris_core.world.failures import on_all_ranks

_FIRST_SHARE, _STEPS = 2, 16
"""Allocations have a half of the heap at first, and then a sixteenth more at a time, at least."""


@dataclass(frozen=True, slots=True)
class Region:
    """Symmetric memory of a team."""

    offset_bytes: int  #: where it begins, from the beginning of each member's heap
    tensor: torch.Tensor  #: this rank's bytes (uint8)
    fill: int | None = 0  #: value of every byte at first; None for any

    @property
    def nbytes(self) -> int:
        """Size in bytes on each member."""
        return self.tensor.numel()

    def clear(self) -> None:
        """Fill this rank's bytes as they were at first, and wait until that is done."""
        if self.fill is not None:
            self.tensor.fill_(self.fill)
            if self.tensor.device.type != "cpu":
                torch.cuda.current_stream(self.tensor.device).synchronize()


class SystemArea:
    """One rank's view of the system area: which ranges its groups use."""

    def __init__(self, state: HeapState) -> None:
        self._state = state
        self.nbytes = state.allocator.nbytes - state.usable  #: size of the area in bytes
        self._lock = threading.Lock()
        self._used = RangeSet()

    def clear(self) -> None:
        """Fill the area with zeros; once, before peers know of it.  Host memory is zero, and stays sparse."""
        whole = self.tensor(0, self.nbytes)
        if whole.device.type != "cpu":
            whole.zero_()

    def tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """Return this rank's bytes of a range (uint8), for Iris itself."""
        if self._state.closed:
            raise HeapClosedError(self._state.closed)
        return self._state.allocator.tensor(self._state.usable + offset_bytes, nbytes, lambda: None)

    def region(self, offset_bytes: int, nbytes: int) -> Region:
        """Return a range as a region."""
        return Region(self._state.usable + offset_bytes, self.tensor(offset_bytes, nbytes))

    def reserve_at_opening(self, nbytes: int) -> int:
        """Reserve a range for the whole world, without an exchange.

        Collective: every rank calls it with the same size while the context is opened, before any group has a range.
        """
        begin = max((end for _, end in self._used), default=0)
        self._used.add(begin, begin + _up(nbytes, MIN_ALIGNMENT))
        return begin

    def reserve(self, world: World, nbytes: int, what: str, share: int = 1) -> int:
        """Find a range for a group of ranks in the first part of the area, one of `share`; `what` says what for.

        Collective: every member calls it with the same arguments, and no other rank.
        """
        size = _up(operator.index(nbytes), MIN_ALIGNMENT)  # a float would stay in the table
        while True:
            used = RangeSet()
            for first, end in itertools.chain(*world.all_gather_object(list(self._used))):
                used.add(first, end)
            begin: int = next(end for _, end in [(0, 0), *used] if not used.intersection(end, end + size))
            if begin + size > self.nbytes // share:
                raise UnsupportedError(
                    f"{what} needs {size} bytes of the heap's system area, but of its {self.nbytes} bytes only "
                    f"{max(self.nbytes - begin, 0)} are left at its end to this group of {world.world_size} ranks; "
                    "use the same groups again, or open the context with a larger IRIS_SYSTEM_SIZE"
                )
            with self._lock:
                kept = not self._used.intersection(begin, begin + size)
                if kept:
                    self._used.add(begin, begin + size)
            if all(each for (each,) in world.all_gather_ints([kept])):
                return begin
            if kept:  # another thread of a member has given the range to another group meanwhile
                with self._lock:
                    self._used.remove(begin, begin + size)


# -- the end of the heap ----------------------------------------------------------------------------------------------
def set_first_limit(state: HeapState) -> None:
    """Leave a part of the heap to groups, where there are several ranks."""
    offsets = state.offsets
    if state.world.world_size > 1:
        offsets.limit = min(_up(offsets.nbytes // _FIRST_SHARE, _granule(state)), offsets.nbytes)


def take(state: HeapState, world: World, members: Sequence[int], nbytes: int, what: str) -> int:
    """Find a range for a group of ranks, the members of `world`, and back it with memory; `what` says what for.

    Collective: every member calls it with the same arguments, and no other rank.
    """
    backing, offsets = state.backing, state.offsets
    alignment = _granule(state) if backing.grows else MIN_ALIGNMENT  # what has not the same peers is apart
    with _alone(state, world, members) as floors:
        end, limit = min(floors), offsets.limit
        room = end - limit
        offset = (end - nbytes) // alignment * alignment
        if offset < limit:
            raise HeapExhaustedError(
                f"{what} needs {nbytes} bytes, but only {room} at the end of the heap are left to this group of "
                f"{world.world_size} ranks, of {offsets.nbytes}; open the context with a larger heap_size",
                requested_bytes=nbytes, free_bytes=room, largest_free_bytes=room,
            )  # fmt: skip
        try:
            # allocations never come there, so nothing else has to know
            commit = f"could not get memory for {what}"
            on_all_ranks(world, commit, lambda: state.allocator.commit(offset, nbytes), ranks=members)
            if backing.grows:
                backing.exchange(world, members)
        except BaseException:
            if backing.grows:  # else regions share granules; what was got serves the next one there
                backing.take_back(offset, nbytes)
            raise
        insort(state.groups, Block(offset, nbytes, what), key=lambda block: block.offset_bytes)
        state.floor = state.groups[0].offset_bytes
    return offset


def end_of_all(state: HeapState, floors: Iterable[int]) -> int:
    """How far allocations may reach where the regions of the ranks begin at `floors`."""
    end, granule = min(floors), _granule(state)
    return max(state.offsets.limit, end if end == state.offsets.nbytes else end // granule * granule)


def raise_limit(state: HeapState, nbytes: int, alignment: int, floors: Sequence[int]) -> bool:
    """Raise the limit of allocations if that makes space for a block; return whether it did.

    Collective: every rank calls it with the same arguments; `floors` are where regions of groups begin on each.
    """
    offsets = state.offsets
    last, _ = offsets.free_ranges.around(offsets.nbytes, offsets.nbytes)  # where all blocks end
    needed = _up(last, alignment) + offsets.rounded(nbytes)
    if not offsets.limit < needed <= end_of_all(state, floors):
        return False
    with _alone(state, state.world, range(state.world.world_size)) as floors:
        end = end_of_all(state, floors)
        if needed > end:
            return False
        offsets.limit = min(_up(max(needed, offsets.limit + offsets.nbytes // _STEPS), _granule(state)), end)
    return True


@contextlib.contextmanager
def _alone(state: HeapState, world: World, members: Sequence[int]) -> Iterator[list[int]]:
    """Hold the locks of some ranks, which all call it; yields where the regions of groups begin on each."""
    world.all_gather_ints([0])  # all are here: from now on, who holds a lock waits for such steps alone
    with contextlib.ExitStack() as locked:
        for member in sorted(members):
            if member == state.world.rank:
                locked.enter_context(state.groups_lock)
            floors = [floor for (floor,) in world.all_gather_ints([state.floor])]
        yield floors


def _granule(state: HeapState) -> int:
    """By how much allocations get and give back memory."""
    return max(state.allocator.granularity, MIN_ALIGNMENT)


def _up(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule
