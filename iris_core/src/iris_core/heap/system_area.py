"""The system area of a heap: memory behind what users allocate, handed out to groups of ranks.

Every rank has the area from the start, at the same offset.  A group's members agree on a range that none of them uses;
nobody else takes part, so a group never waits for other ranks.  Ranges are never given back: captured graphs may know
them.  The content is zero when a range is handed out for the first time.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from iris_core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from iris_core.heap.heap import SymmetricHeap
    from iris_core.world import World

ALIGNMENT = 256
"""Alignment in bytes of every range; no two ranges share a cache line."""


class SystemArea:
    """One rank's view of the area: which ranges its groups use.

    Args:
        heap: open, with a system area.
    """

    def __init__(self, heap: SymmetricHeap) -> None:
        self._heap = heap
        self._lock = threading.Lock()
        self._used: list[tuple[int, int]] = []

    def clear(self) -> None:
        """Fill the area with zeros; once, before peers know of it.  Host memory is zero, and stays sparse."""
        whole = self._heap.system_tensor(0, self.nbytes)
        if whole.device.type != "cpu":
            whole.zero_()

    @property
    def nbytes(self) -> int:
        """Size of the area in bytes."""
        return self._heap.system_nbytes

    def reserve_at_opening(self, nbytes: int) -> int:
        """Reserve a range for the whole world, without asking anybody.

        Collective: every rank calls it with the same size while the context is opened, before any group has a range.
        """
        begin = self._used[-1][1] if self._used else 0
        self._used.append((begin, begin + _rounded(nbytes)))
        return begin

    def reserve(self, world: World, nbytes: int, what: str) -> int:
        """Find a range for a group of ranks.

        Collective: every member calls it with the same arguments, and nobody else.

        Args:
            world: the members.
            nbytes: size of the range.
            what: what it is for, for the message.

        Returns:
            Where it begins, in bytes from the beginning of the area; the same on every member.  Its content is zero on
            all of them, and no member has to fill it: no range is handed out twice, and all were cleared at opening.

        Raises:
            UnsupportedError: there is no room; raised on every member, and nothing has changed.
            CollectiveTimeoutError, PeerLostError: a member did not take part.
        """
        while (begin := self._try(world, _rounded(nbytes), what)) is None:
            pass
        return begin

    def _try(self, world: World, size: int, what: str) -> int | None:
        """See `reserve`; None if another thread of a member has given the range to another group meanwhile."""
        used = sorted({tuple(each) for row in world.all_gather_object(list(self._used)) for each in row})
        begin = 0
        for first, end in used:
            if begin + size <= first:
                break
            begin = max(begin, end)
        if begin + size > self.nbytes:
            raise UnsupportedError(
                f"{what} needs {size} bytes of the heap's system area, but of its {self.nbytes} bytes "
                f"only {max(self.nbytes - begin, 0)} are left at its end to this group of {world.world_size} ranks; "
                "use the same groups again, or open the context with a larger IRIS_SYSTEM_SIZE"
            )
        own = (begin, begin + size)
        with self._lock:
            kept = all(end <= begin or own[1] <= first for first, end in self._used)
            if kept:
                self._used.append(own)
        if all(each for (each,) in world.all_gather_ints([kept])):
            return begin
        if kept:
            with self._lock:
                self._used.remove(own)
        return None

    def used_nbytes(self, world: World) -> int:
        """Return how much of the area the ranges of these ranks reach over, in bytes from its beginning.

        Collective: every rank of `world` calls it, and nobody else.
        """
        return max((end for row in world.all_gather_object(list(self._used)) for _, end in row), default=0)

    def tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """Return this rank's bytes of a range (uint8)."""
        return self._heap.system_tensor(offset_bytes, nbytes)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
