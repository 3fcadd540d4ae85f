"""Addresses as granules: whose heap they lie on, which granules they touch, and which bytes of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from iris_triton.checker.histories import ALL
from iris_triton.checker.shared import GRANULE

_PRIVATE = 1 << 48  # keys of memory that is on no heap begin here, for each rank


class Place(NamedTuple):
    """Granules of one rank's heap, a slice or an array of indices, and the bytes of each: one mask or an array."""

    rank: int
    granules: Any
    masks: Any


class Heaps:
    """Where the heaps of all ranks lie in this process."""

    def __init__(self, bases: Sequence[int], nbytes: int) -> None:
        self.bases, self.nbytes = tuple(bases), nbytes
        self._order = np.argsort(np.array(bases, np.uint64))
        self._sorted = np.array(bases, np.uint64)[self._order]
        self.low, self.high = min(bases), max(bases) + nbytes

    def find(self, addresses: Any, mask: Any, itemsize: int) -> list[Place]:
        """Return the places of the active elements at some addresses; those that are on no heap are left out."""
        flat = addresses.reshape(-1)
        if mask is not None:
            flat = flat[np.broadcast_to(mask, addresses.shape).reshape(-1)]
        if not flat.size:
            return []
        low, high = int(flat.min()), int(flat.max())
        if high < self.low or low >= self.high:
            return []
        ranks, offsets = self.locate(flat)
        return [place_of(int(rank), offsets[ranks == rank], itemsize) for rank in np.unique(ranks) if rank >= 0]

    def locate(self, addresses: Any) -> tuple[Any, Any]:
        """Return the ranks on whose heaps some addresses lie, -1 for none, and the offsets there."""
        at = np.maximum(np.searchsorted(self._sorted, addresses, side="right") - 1, 0)
        offsets = addresses - self._sorted[at]  # very large below the first heap
        return np.where(offsets < np.uint64(self.nbytes), self._order[at], -1), offsets.view(np.int64)

    def keys(self, addresses: Any, rank: int) -> Any:
        """Return numbers of bytes that are the same in all processes, of addresses as `rank` sees them."""
        flat = addresses.reshape(-1)
        owners, offsets = self.locate(flat)
        return np.where(owners < 0, flat.view(np.int64) + _PRIVATE * (rank + 1), owners * self.nbytes + offsets)

    def rank_of(self, address: int, nbytes: int = 1) -> tuple[int, int] | None:
        """Return the rank on whose heap a range lies, and its offset; None if on none."""
        for rank, base in enumerate(self.bases):
            if base <= address and address + nbytes <= base + self.nbytes:
                return rank, address - base
        return None


def place_of(rank: int, offsets: Any, itemsize: int) -> Place:
    """Return the place of elements at some offsets (int64, any shape, at least one) in a rank's heap."""
    flat = offsets.reshape(-1)
    first, count = int(flat[0]), flat.size
    if count == 1 or (int(flat[-1]) - first == (count - 1) * itemsize and (np.diff(flat) == itemsize).all()):
        return range_of(rank, first, count * itemsize)
    if itemsize % GRANULE == 0 and not int(np.bitwise_or.reduce(flat)) % GRANULE:
        granules = flat >> 2
        if itemsize > GRANULE:
            granules = (granules[:, None] + np.arange(itemsize // GRANULE)).reshape(-1)
        return Place(rank, granules, ALL)
    whole = (flat[:, None] + np.arange(itemsize)).reshape(-1) if itemsize > 1 else flat
    low = int(whole.min()) >> 2
    size = (int(whole.max()) >> 2) - low + 1
    if size <= 64 * count + 1024:
        touched = np.zeros((size, GRANULE), np.bool_)
        touched.reshape(-1)[whole - GRANULE * low] = True
        granules = np.flatnonzero(touched.any(axis=1))
        masks = touched[granules] @ np.array([1, 2, 4, 8], np.uint8)
        granules += low
    else:
        granules, inverse = np.unique(whole >> 2, return_inverse=True)
        masks = np.zeros(granules.size, np.uint8)
        np.bitwise_or.at(masks, inverse, (1 << (whole & 3)).astype(np.uint8))
    if (masks == ALL).all():
        return Place(rank, granules, ALL)
    return Place(rank, granules, masks)


def extent_of(granules: Any, mask: int = ALL) -> tuple[int, int]:
    """Return the offsets of the first and the last byte of the granules of a place, of those that a mask says."""
    is_run = isinstance(granules, slice)
    low, high = (granules.start, granules.stop - 1) if is_run else (int(granules.min()), int(granules.max()))
    return low * GRANULE + (mask & -mask).bit_length() - 1, high * GRANULE + mask.bit_length() - 1


def range_of(rank: int, first: int, nbytes: int) -> Place:
    """Return the place of a range of bytes (at least one)."""
    low, high = first >> 2, (first + nbytes - 1 >> 2) + 1
    granules = slice(low, high)
    head, tail = first & 3, -(first + nbytes) & 3
    if not head and not tail:
        return Place(rank, granules, ALL)
    masks = np.full(high - low, ALL, np.uint8)
    masks[0] &= ALL << head & ALL
    masks[-1] &= ALL >> tail
    return Place(rank, granules, int(masks[0]) if high - low == 1 else masks)
