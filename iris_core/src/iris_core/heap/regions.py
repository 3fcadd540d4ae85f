"""The upper end of the heap: regions that groups of ranks take, although the other ranks know nothing of it.

What users allocate has the same offsets on all ranks and lies below a limit that is equal everywhere.  Above it, the
members of a group agree on a range among themselves: below the regions that any of them has already, so groups without
a common member may have the same offsets, and those with one never do.  When allocations need more, all ranks come
together, and the limit rises as far as no rank's regions are in the way.  Regions are never given back: captured graphs
may know them.

Threads of a rank may do this for several groups, and for allocations, at the same time.  Each rank has a lock, and who
wants memory holds those of all members meanwhile.  Members lock one after the other, in the order of ranks, so of those
that want memory at the same time none waits for one that waits for it.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import insort
from typing import TYPE_CHECKING

from iris_core.errors import HeapExhaustedError
from iris_core.types import Block
from iris_core.world.failures import raise_failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from iris_core.heap.backing import PeerMap
    from iris_core.heap.offsets import SubAllocator
    from iris_core.heap.residency import Residency
    from iris_core.protocols import Allocator
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
        self.blocks: list[Block] = []
        """The regions, by offset."""
        if world.world_size > 1:
            sub.limit = min(self._up(sub.nbytes // _FIRST_SHARE), sub.nbytes)

    @property
    def floor(self) -> int:
        """Where the lowest region of this rank begins."""
        return self.blocks[0].offset_bytes if self.blocks else self._sub.nbytes

    @contextlib.contextmanager
    def _alone(self, world: World, members: Sequence[int]) -> Iterator[list[int]]:
        """Hold the locks of some ranks; yields `floor` of each.

        Collective: every member calls it.
        """
        world.all_gather_ints([0])  # all are here: from now on, who holds a lock waits for such steps alone
        with contextlib.ExitStack() as locked:
            for member in sorted(members):
                if member == self._world.rank:
                    locked.enter_context(self._lock)
                floors = [floor for (floor,) in world.all_gather_ints([self.floor])]
            yield floors

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
        with self._alone(world, members) as floors:
            end, limit = min(floors), self._sub.limit
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
            error: Exception | None = None
            try:
                self._allocator.commit(offset, nbytes)  # allocations never come there, so nothing else has to know
            except Exception as e:  # noqa: BLE001 - raised once the other members know
                error = e
            try:
                oks = [ok for (ok,) in world.all_gather_ints([error is None])]
                raise_failure(world, error, oks, f"could not get memory for {what}", ranks=members)
                if self._residency.grows:
                    self._peers.exchange(world, members)
            except BaseException:
                if self._residency.grows:  # else regions share granules; what was got serves the next one there
                    self._residency.take_back(offset, nbytes)
                raise
            insort(self.blocks, Block(offset, nbytes, what), key=lambda block: block.offset_bytes)
        return offset

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
        if not sub.limit < needed <= self.end_of_all(floors):
            return False
        with self._alone(self._world, range(self._world.world_size)) as floors:
            end = self.end_of_all(floors)
            if needed > end:
                return False
            sub.limit = min(self._up(max(needed, sub.limit + sub.nbytes // _STEPS)), end)
        return True

    def _up(self, nbytes: int) -> int:
        return -(-nbytes // self._granule) * self._granule
