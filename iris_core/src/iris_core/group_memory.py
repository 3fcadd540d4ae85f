"""The upper end of the heap: regions that groups of ranks take, although the other ranks know nothing of it.

What users allocate has the same offsets on all ranks and lies below a limit that is equal everywhere.  Above it, the
members of a group agree on a range among themselves: below the regions that any of them has already, so groups without
a common member may have the same offsets, and those with one never do.  When allocations need more, all ranks come
together, and the limit rises as far as no rank's regions are in the way.  Regions are never given back: captured graphs
may know them.
"""

from __future__ import annotations

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
        self._sub = sub
        self._peers = peers
        self._residency = residency
        self._granule = max(allocator.granularity, sub.alignment)  # by which allocations get and give back memory
        self._alignment = self._granule if residency.grows else sub.alignment  # what has not the same peers is apart
        self.floor = sub.nbytes
        """Where the lowest region of this rank begins."""
        self.blocks: list[Block] = []
        """The regions, by offset."""
        if world.world_size > 1:
            sub.limit = min(self._up(sub.nbytes // _FIRST_SHARE), sub.nbytes)

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
        everyone = world.all_gather_ints([self.floor, self._sub.limit])
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
        error: Exception | None = None
        try:
            self._allocator.commit(offset, nbytes)  # allocations never come there, so nothing else has to know
        except Exception as e:  # noqa: BLE001 - raised below, once the other members know
            error = e
        try:
            outcomes = [ok for (ok,) in world.all_gather_ints([error is None])]
            raise_failure(world, error, outcomes, f"could not get memory for {what}", ranks=members)
            if self._residency.grows:
                self._peers.exchange(world, members)
        except BaseException:
            if self._residency.grows:  # else regions share granules; what was got serves the next one there
                self._residency.take_back(offset, nbytes)
            raise
        self.floor = offset
        self.blocks.insert(0, Block(offset, nbytes, what))
        return offset

    def end_of_all(self, floors: Iterable[int]) -> int:
        """How far allocations may reach where the regions of the ranks begin at `floors`."""
        end = min(floors)
        return max(self._sub.limit, end if end == self._sub.nbytes else end // self._granule * self._granule)

    def raise_limit(self, nbytes: int, alignment: int, floors: Sequence[int]) -> bool:
        """Let allocations have more of the heap, if that is enough for a block that has found no room.

        Symmetric: every rank calls it with the same arguments, after an exchange.

        Args:
            nbytes: size of the block.
            alignment: alignment of the block.
            floors: `floor` of every rank.

        Returns:
            Whether there is room now.
        """
        sub, end = self._sub, self.end_of_all(floors)
        needed = sub.end_behind_all(nbytes, alignment)
        if not sub.limit < needed <= end:
            return False
        sub.limit = min(self._up(max(needed, sub.limit + sub.nbytes // _STEPS)), end)
        return True

    def _up(self, nbytes: int) -> int:
        return -(-nbytes // self._granule) * self._granule
