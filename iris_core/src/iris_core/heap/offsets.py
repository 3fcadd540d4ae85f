"""Deterministic sub-allocation of one address range, in offsets only.

The symmetric heap rests on one property of this module: the same sequence of calls gives the same offsets, in every
process.  Nothing here depends on time, addresses, hashes of strings or the order of a set.

Best fit: the smallest free block that can hold the request, and of equals the one at the lowest offset.  Adjacent free
blocks are merged at once, so the free list is a function of the live blocks alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator

from iris_core.errors import HeapError, HeapExhaustedError

MIN_ALIGNMENT = 256
"""Least alignment and size of a block in bytes: a cache line of any device, and more than any vector access needs."""


class RangeSet:
    """A set of integers, as the bounds where disjoint half-open ranges begin and end, in turn; at first those given."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._bounds = [bound for each in ranges for bound in each]

    def __bool__(self) -> bool:
        return bool(self._bounds)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return _pairs(list(self._bounds))

    def covers(self, start: int, end: int) -> bool:
        """Whether every integer of [start, end) is in the set."""
        i = bisect_right(self._bounds, start)
        return start >= end or (i % 2 == 1 and self._bounds[i] >= end)

    def add(self, start: int, end: int) -> None:
        if start < end:
            i, j = bisect_left(self._bounds, start), bisect_right(self._bounds, end)
            self._bounds[i:j] = [start] * (1 - i % 2) + [end] * (1 - j % 2)

    def remove(self, start: int, end: int) -> None:
        if start < end:
            i, j = bisect_left(self._bounds, start), bisect_right(self._bounds, end)
            self._bounds[i:j] = [start] * (i % 2) + [end] * (j % 2)

    def intersection(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of the set within [start, end); none where `start` is not below `end`."""
        if start >= end:
            return []
        i, j = bisect_right(self._bounds, start), bisect_left(self._bounds, end)
        return list(_pairs([start] * (i % 2) + self._bounds[i:j] + [end] * (j % 2)))

    def around(self, start: int, end: int) -> tuple[int, int]:
        """Return the range without gaps that [start, end), which is not in the set, would be a part of."""
        i, j = bisect_left(self._bounds, start), bisect_right(self._bounds, end)
        return self._bounds[i - 1] if i % 2 else start, self._bounds[j] if j % 2 else end


def _pairs(bounds: list[int]) -> Iterator[tuple[int, int]]:
    return zip(bounds[::2], bounds[1::2], strict=True)


class SubAllocator:
    """Hands out and takes back parts of the range [0, nbytes), in multiples of MIN_ALIGNMENT.

    Behind each block `gap_nbytes` bytes, rounded up likewise, stay unused.
    """

    def __init__(self, nbytes: int, gap_nbytes: int = 0) -> None:
        self._gap = -(-gap_nbytes // MIN_ALIGNMENT) * MIN_ALIGNMENT
        self.nbytes = nbytes // MIN_ALIGNMENT * MIN_ALIGNMENT
        if self.nbytes <= 0:
            raise ValueError(f"a heap of {nbytes} bytes is too small: the smallest block has {MIN_ALIGNMENT} bytes")
        self.limit = self.nbytes  # where blocks end at most; it may rise, up to `nbytes`
        self.num_frees = 0
        self._live: dict[int, int] = {}  # offset -> size
        self._by_size: list[tuple[int, int]] = [(self.nbytes, 0)]  # free blocks as (size, offset), sorted
        self.free_ranges = RangeSet([(0, self.nbytes)])
        self.allocated_bytes = self.peak_bytes = 0  # in live blocks, now and at most

    def rounded(self, nbytes: int) -> int:
        """Return the size of the block that a request gets: of nothing, the smallest block."""
        return (-(-nbytes // MIN_ALIGNMENT) * MIN_ALIGNMENT or MIN_ALIGNMENT) + self._gap

    def allocate(self, nbytes: int, alignment: int = MIN_ALIGNMENT) -> int:
        """Take a block, return its offset, a multiple of `alignment`; HeapExhaustedError if none is large enough."""
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, not {alignment}")
        size = self.rounded(nbytes)
        by_size, limit = self._by_size, self.limit
        # blocks of the right size come first; with a large alignment some of them may not hold an aligned offset
        for i in range(bisect_left(by_size, (size, 0)), len(by_size)):
            free_size, start = by_size[i]
            offset = start if alignment <= MIN_ALIGNMENT else -(-start // alignment) * alignment
            if offset + size <= start + free_size and offset + size <= limit:
                break
        else:
            free, largest = self.free_below(limit)
            raise HeapExhaustedError(
                f"no free block of {size} bytes (alignment {alignment}): "
                f"{free} bytes are free, {largest} of them in one piece",
                requested_bytes=size, free_bytes=free, largest_free_bytes=largest,
            )  # fmt: skip
        del by_size[i]
        self.free_ranges.remove(offset, offset + size)
        for begin, end in (start, offset), (offset + size, start + free_size):
            if begin < end:
                insort(by_size, (end - begin, begin))
        self._live[offset] = size
        self.allocated_bytes += size
        if self.allocated_bytes > self.peak_bytes:
            self.peak_bytes = self.allocated_bytes
        return offset

    def free(self, offset: int) -> int:
        """Give a block back, and return its size in bytes, as rounded; HeapError if no live block begins there."""
        size = self._live.pop(offset, None)
        if size is None:
            raise HeapError(f"no live block begins at offset {offset}: it was freed before, or is no block's start")
        self.num_frees += 1
        self.allocated_bytes -= size
        end = offset + size
        start, stop = self.free_ranges.around(offset, end)
        for begin, after in (start, offset), (end, stop):  # free blocks before and behind it
            if begin < after:
                del self._by_size[bisect_left(self._by_size, (after - begin, begin))]
        self.free_ranges.add(offset, end)
        insort(self._by_size, (stop - start, start))
        return size

    def size_of(self, offset: int) -> int:
        """Return the size in bytes, as rounded, of the live block that begins at `offset`."""
        return self._live[offset]

    def free_below(self, end: int) -> tuple[int, int]:
        """Return how many bytes are free below an offset, at or above `limit`, and the most in one piece."""
        most = 0
        for size, start in reversed(self._by_size):
            most = max(most, min(size, end - start))
            if start + size <= end:  # the others are smaller
                break
        return end - self.allocated_bytes, most
