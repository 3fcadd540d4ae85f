"""Which parts of the heap are backed by memory, and giving back what has been idle.

Commits and decommits follow from offsets alone, so they are the same on every rank.  Memory is given back only after
it has been free from one agreement of all ranks to the next: a program that allocates and frees the same block in every
iteration keeps its pages.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, cast

from iris_core.types import Capability

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from iris_core.protocols import Allocator, SupportsDecommit


class RangeSet:
    """A set of integers kept as disjoint, sorted, half-open ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def covers(self, start: int, end: int) -> bool:
        """Whether every integer of [start, end) is in the set."""
        i = bisect_right(self._starts, start) - 1
        return start >= end or (i >= 0 and self._ends[i] >= end)

    def add(self, start: int, end: int) -> None:
        """Put [start, end) into the set."""
        if start >= end:
            return
        i, j = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if i < j:
            start, end = min(start, self._starts[i]), max(end, self._ends[j - 1])
        self._starts[i:j], self._ends[i:j] = [start], [end]

    def remove(self, start: int, end: int) -> None:
        """Take [start, end) out of the set."""
        i, j = bisect_right(self._ends, start), bisect_left(self._starts, end)
        if start >= end or i >= j:
            return
        first, last = self._starts[i], self._ends[j - 1]
        keep = [(a, b) for a, b in ((first, start), (end, last)) if a < b]
        self._starts[i:j], self._ends[i:j] = [a for a, _ in keep], [b for _, b in keep]

    def intersection(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of the set within [start, end); none where `start` is not below `end`."""
        if start >= end:
            return []
        i, j = bisect_right(self._ends, start), bisect_left(self._starts, end)
        pairs = zip(self._starts[i:j], self._ends[i:j], strict=True)
        return [(max(a, start), min(b, end)) for a, b in pairs]

    def clear(self) -> None:
        """Empty the set."""
        self._starts.clear()
        self._ends.clear()


class Residency:
    """Commits ranges of an allocator and gives idle granules back, where it can.

    Args:
        allocator: what backs the heap.
    """

    def __init__(self, allocator: Allocator) -> None:
        provides = allocator.info.provides
        self._allocator = allocator
        self._granule = allocator.granularity
        self._decommit = cast("SupportsDecommit", allocator) if Capability.DECOMMIT in provides else None
        self.grows = Capability.GROWTH in provides
        """Whether commits make memory that peers have to map."""
        self._committed = RangeSet()
        self._idle = RangeSet()  # free since the last agreement, still committed

    @property
    def can_decommit(self) -> bool:
        """Whether memory can be given back."""
        return self._decommit is not None

    def needs_growth(self, offset: int, nbytes: int) -> bool:
        """Whether a commit of this range makes new memory that peers have to map; equal on all ranks."""
        return self.grows and not self._committed.covers(*self._outer(offset, nbytes))

    def commit(self, offset: int, nbytes: int) -> None:
        """Back a range with memory.  If it raises, nothing has changed here."""
        self._allocator.commit(offset, nbytes)
        self.note(offset, nbytes)

    def note(self, offset: int, nbytes: int) -> None:
        """Remember that a range is backed by memory and in use."""
        if self._idle:
            self._idle.remove(offset, offset + nbytes)
        if self.grows or self._decommit is not None:
            outer = self._outer(offset, nbytes)
            if not self._committed.covers(*outer):
                self._committed.add(*outer)

    def release_idle(self, free: Iterable[tuple[int, int]]) -> bool:
        """Give back the whole granules that have been free since the previous call, and note those free now.

        Args:
            free: the free blocks as (offset, size).

        Returns:
            Whether anything was given back.

        Raises:
            Exception: the allocator's first error; what is remembered here is the same as on ranks without one.
        """
        idle, ranges = RangeSet(), []
        for offset, size in free:
            for start, end in self._committed.intersection(*self._inner(offset, size)):
                idle.add(start, end)
        for old_start, old_end in self._idle:
            ranges += idle.intersection(*self._inner(old_start, old_end - old_start))
        for start, end in ranges:
            idle.remove(start, end)
        self._idle = idle
        self.decommit(ranges)
        return bool(ranges)

    def decommit(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Give ranges [start, end) of whole granules back at once; if one fails, the others first."""
        error: Exception | None = None
        for start, end in ranges:
            self._committed.remove(start, end)
            self._idle.remove(start, end)
            try:
                cast("SupportsDecommit", self._allocator).decommit(start, end - start)
            except Exception as e:  # noqa: BLE001 - raised below; every rank has to come to the end
                error = error or e
        if error is not None:
            raise error

    def make_room(self, offset: int, nbytes: int) -> None:
        """Give back what is committed in a range of whole granules that is free."""
        self.decommit(self._committed.intersection(offset, offset + nbytes))

    def take_back(self, offset: int, nbytes: int) -> None:
        """Undo what the allocator committed for a range that was not noted, because growth failed on some rank."""
        if self._decommit is None:
            return
        gaps = RangeSet()
        gaps.add(*self._outer(offset, nbytes))
        for start, end in self._committed:
            gaps.remove(start, end)
        self.decommit(gaps)

    @property
    def committed_bytes(self) -> int:
        """Bytes backed by memory as far as the allocator knows."""
        return self._allocator.nbytes if self._decommit is None else self._decommit.committed_bytes

    def _outer(self, offset: int, nbytes: int) -> tuple[int, int]:
        """The granules that a range touches."""
        g = self._granule
        return offset // g * g, min((offset + nbytes + g - 1) // g * g, self._allocator.nbytes)

    def _inner(self, offset: int, nbytes: int) -> tuple[int, int]:
        """The granules that lie wholly in a range; the heap's last one may be shorter."""
        g, end = self._granule, offset + nbytes
        return (offset + g - 1) // g * g, end if end == self._allocator.nbytes else end // g * g
