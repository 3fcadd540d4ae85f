"""The upper end of the heap: regions that groups of ranks take, although the other ranks know nothing of it.

What users allocate has the same offsets on all ranks and lies below a limit that is equal everywhere.  Above it, the
members of a group agree on a range among themselves: below the regions that any of them has already, so groups without
a common member may have the same offsets, and those with one never do.  When allocations need more, all ranks come
together, and the limit rises as far as no rank's regions are in the way.  Regions are never given back: captured graphs
may know them.

Threads of a rank may do this for several groups, and for allocations, at the same time.  So what ranks compute from
each other's answers is only a proposal: each of them keeps the range from then on, or says that it no longer can, and
all begin again.
"""

from __future__ import annotations

import threading
from bisect import insort
from typing import TYPE_CHECKING

from iris_core.errors import HeapExhaustedError
from iris_core.types import Block
from iris_core.world.failures import raise_failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from iris_core.peers import PeerMap
    from iris_core.protocols import Allocator
    from iris_core.residency import Residency
    from iris_core.suballocator import SubAllocator
    from iris_core.world import World

_FIRST_SHARE, _STEPS = 2, 16
"""Allocations have a half of the heap at first, and then a sixteenth more at a time, at least."""


class GroupMemory:
    """One rank's regions at the end of the heap.

    Args:
        allocator: of the heap.
        world: the ranks of the heap.
        sub: the free list of what users allocate; gets its limit here.
        peers: to be told of new memory.
        residency: of the heap.
    """

    def __init__(
        self, allocator: Allocator, world: World, sub: SubAllocator, peers: PeerMap, residency: Residency
    ) -> None:
        self._allocator = allocator
        self._world = world
        self._sub = sub
        self._peers = peers
        self._residency = residency
        self._granule = max(allocator.granularity, sub.alignment)  # by which allocations get and give back memory
        self._alignment = self._granule if residency.grows else sub.alignment  # what has not the same peers is apart
        self._lock = threading.Lock()
        self._kept: list[int] = []  # where regions begin, also those that members have not agreed on yet
        self.blocks: list[Block] = []
        """The regions, by offset."""
        if world.world_size > 1:
            sub.limit = min(self._up(sub.nbytes // _FIRST_SHARE), sub.nbytes)
        self._limit = sub.limit  # or what it becomes if all ranks agree

    @property
    def floor(self) -> int:
        """Where the lowest region of this rank begins."""
        return min(self._kept, default=self._sub.nbytes)

    def take(self, world: World, members: Sequence[int], nbytes: int, what: str) -> int:
        """Find a range for a group of ranks, and back it with memory.

        Collective: every member calls it with the same arguments, and nobody else.

        Args:
            world: the members.
            members: their ranks.
            nbytes: size of the range.
            what: what it is for.

        Returns:
            Its offset in the heap, the same on every member.  The content is undefined.

        Raises:
            HeapExhaustedError: there is no room; on every member, and nothing has changed.
            HeapError, PeerAccessError: a member could not get or map memory; on every member.
        """
        while (offset := self._try(world, members, nbytes, what)) is None:
            pass
        with self._lock:
            insort(self.blocks, Block(offset, nbytes, what), key=lambda block: block.offset_bytes)
        return offset

    def _try(self, world: World, members: Sequence[int], nbytes: int, what: str) -> int | None:
        """See `take`; None if a member has given the range to others meanwhile."""
        everyone = world.all_gather_ints([self.floor, self._limit])
        end, limit = min(floor for floor, _ in everyone), max(each for _, each in everyone)
        room = end - limit
        offset = (end - nbytes) // self._alignment * self._alignment
        if offset < limit:
            raise HeapExhaustedError(
                f"{what} needs {nbytes} bytes, but only {room} at the end of the heap are left to this group of "
                f"{world.world_size} ranks, of {self._sub.nbytes}; open the context with a larger heap_size",
                requested_bytes=nbytes,
                free_bytes=room,
                largest_free_bytes=room,
            )
        kept, error, done = self._keep(offset, nbytes), None, False
        try:
            if kept:
                error = self._commit(offset, nbytes)
            outcomes = world.all_gather_ints([error is None, kept])
            raise_failure(world, error, [ok for ok, _ in outcomes], f"could not get memory for {what}", ranks=members)
            if all(kept for _, kept in outcomes):
                if self._residency.grows:
                    self._peers.exchange(world, members)
                done = True
        finally:
            if kept and not done:
                self._give_up(offset, nbytes)
        return offset if done else None

    def _keep(self, offset: int, nbytes: int) -> bool:
        """Keep a range for a group, if it is still free."""
        with self._lock:
            free = self._limit <= offset and offset + nbytes <= self.floor
            if free:
                self._kept.append(offset)
        return free

    def _commit(self, offset: int, nbytes: int) -> Exception | None:
        try:
            self._allocator.commit(offset, nbytes)  # allocations never come there, so nothing else has to know
        except Exception as e:  # noqa: BLE001 - raised once the other members know
            return e
        return None

    def _give_up(self, offset: int, nbytes: int) -> None:
        if self._residency.grows:  # else regions share granules; what was got serves the next one there
            self._residency.take_back(offset, nbytes)
        with self._lock:
            self._kept.remove(offset)

    def end_of_all(self, floors: Iterable[int]) -> int:
        """How far allocations may reach where the regions of the ranks begin at `floors`."""
        end = min(floors)
        return max(self._sub.limit, end if end == self._sub.nbytes else end // self._granule * self._granule)

    def raise_limit(self, nbytes: int, alignment: int, floors: Sequence[int]) -> bool:
        """Let allocations have more of the heap, if that is enough for a block that has found no room.

        Collective: every rank calls it with the same arguments, after an exchange.

        Args:
            nbytes: size of the block.
            alignment: alignment of the block.
            floors: `floor` of every rank.

        Returns:
            Whether there is room now.
        """
        sub, needed = self._sub, self._sub.end_behind_all(nbytes, alignment)
        while sub.limit < needed <= (end := self.end_of_all(floors)):
            wanted = min(self._up(max(needed, sub.limit + sub.nbytes // _STEPS)), end)
            try:
                with self._lock:
                    free = wanted <= self.floor
                    if free:
                        self._limit = wanted
                rows = self._world.all_gather_ints([free, self.floor])
                if all(free for free, _ in rows):
                    sub.limit = wanted
                    return True
            finally:
                self._limit = sub.limit
            floors = [floor for _, floor in rows]
        return False

    def _up(self, nbytes: int) -> int:
        return -(-nbytes // self._granule) * self._granule
