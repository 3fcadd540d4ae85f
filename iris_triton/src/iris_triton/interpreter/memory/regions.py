"""Where kernels may read and write: blocks of symmetric heaps, regions named by the user, tensor arguments.

`Regions` is an immutable sorted table; it is rebuilt only when a heap's `version` or the registrations change.  A
`BoundsChecker` belongs to one launch: the table plus the launch's tensor arguments.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from iris_triton import _compat
from iris_triton.interpreter.errors import OutOfBoundsError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.protocols import MemoryMap

Array = NDArray[Any]

OFF_HEAP = 1 << 62
"""Added to pointers that are translated and do not lie on the heap; no address is as high."""

_lock = threading.Lock()
_tokens = itertools.count(1)
_heaps: dict[int, MemoryMap] = {}
_extra: dict[int, tuple[int, int, str]] = {}
_cache: tuple[tuple[Any, ...], Regions] | None = None


def register_memory(memory: MemoryMap) -> int:
    """Make a symmetric heap known: its live blocks, on every rank, become accessible to kernels.

    Args:
        memory: the heap; kept until `unregister_memory`.

    Returns:
        A token for `unregister_memory`.
    """
    token = next(_tokens)
    with _lock:
        _heaps[token] = memory
    return token


def allow_region(address: int, nbytes: int, label: str = "") -> int:
    """Make memory accessible that kernels reach through addresses stored in other memory.

    Args:
        address: first byte.
        nbytes: size in bytes.
        label: name for messages.

    Returns:
        A token for `unregister_memory`.  The caller unregisters the region before it frees the memory.

    Raises:
        ValueError: the region is empty or lies outside the address space.
    """
    if nbytes <= 0 or address <= 0 or address + nbytes > 2**64:
        raise ValueError(f"no region of {nbytes} bytes at {address:#x}: give a positive address and size in bytes")
    token = next(_tokens)
    with _lock:
        _extra[token] = (address, nbytes, label)
    return token


def unregister_memory(token: int) -> None:
    """Forget a heap or region; unknown tokens are ignored, so that closing twice is harmless."""
    with _lock:
        _heaps.pop(token, None)
        _extra.pop(token, None)


def registered_heaps() -> list[MemoryMap]:
    """Return the heaps that are registered now."""
    with _lock:
        return list(_heaps.values())


def running_ranks() -> list[tuple[int, int]]:
    """Return the rank and the number of ranks of this process; several only if contexts differ, none without one."""
    return sorted({(heap.rank, len(heap.heap_bases)) for heap in registered_heaps()})


class Region:
    """One accessible range, seen as arrays of any element type.

    The arrays do not keep the memory alive: a region is used only while its range is known to be live.
    """

    __slots__ = ("_views", "end", "heap_rank", "label", "offset_bytes", "start")

    def __init__(
        self, start: int, nbytes: int, label: str = "", heap_rank: int | None = None, offset_bytes: int = 0
    ) -> None:
        self.start, self.end, self.label = start, start + nbytes, label
        self.heap_rank, self.offset_bytes = heap_rank, offset_bytes  # heap_rank: None outside symmetric heaps
        self._views: dict[np.dtype[Any], Array] = {}

    def view(self, dtype: np.dtype[Any]) -> Array:
        """The range as elements of `dtype`, beginning at its first byte; a rest that is too short is left out."""
        found = self._views.get(dtype)
        if found is None:
            count = (self.end - self.start) // dtype.itemsize
            raw = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(self.start)
            found = self._views[dtype] = np.frombuffer(memoryview(raw), dtype)
        return found

    def indices(self, addresses: Array, itemsize: int) -> Array | None:
        """Element indices of addresses; None if one of them is not a whole number of elements from the start."""
        offsets = (addresses - np.uint64(self.start)).view(np.int64)
        if itemsize == 1:
            return offsets
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (itemsize - 1):
            return None
        return offsets >> (itemsize.bit_length() - 1)

    def distance(self, address: int) -> int:
        return max(self.start - address, address - self.end + 1, 0)

    def describe(self) -> str:
        name, nbytes = f"block {self.label!r}" if self.label else "block", self.end - self.start
        if self.heap_rank is None:
            return f"{name if self.label else 'memory'} of {nbytes} bytes at {self.start:#x}"
        return f"{name} of {nbytes} bytes at offset {self.offset_bytes} of the heap of rank {self.heap_rank}"


class Regions:
    """Sorted table of the live blocks on every rank's heap, and the regions that the user named."""

    def __init__(self, heaps: Sequence[MemoryMap], extra: Sequence[tuple[int, int, str]]) -> None:
        self.heaps = {base: (base + heap.nbytes, n) for n, heap in enumerate(heaps) for base in heap.heap_bases}
        """End and number of the heap that begins at an address, for all ranks' heaps."""
        self.extra = [Region(*each) for each in extra]
        starts, ends = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
        places: list[tuple[int, Any]] = []
        for heap in heaps:
            blocks = [block for block in heap.live_blocks() if block.nbytes > 0]
            offsets = np.array([block.offset_bytes for block in blocks], np.uint64)
            start = np.add.outer(np.array(heap.heap_bases, np.uint64), offsets)
            starts.append(start.reshape(-1))
            ends.append((start + np.array([block.nbytes for block in blocks], np.uint64)).reshape(-1))
            places += [(rank, block) for rank in range(len(heap.heap_bases)) for block in blocks]
        start = np.concatenate(starts)
        order = np.argsort(start, kind="stable")
        self.starts: Array = start[order]
        self.ends: Array = np.concatenate(ends)[order]
        self._places = [places[i] for i in order.tolist()]
        self.start_list: list[int] = self.starts.tolist()
        self.end_list: list[int] = self.ends.tolist()
        self._regions: dict[int, Region] = {}

    def region(self, position: int) -> Region:
        """Return the block at a position of the table."""
        found = self._regions.get(position)
        if found is None:
            rank, block = self._places[position]
            found = Region(self.start_list[position], block.nbytes, block.label, rank, block.offset_bytes)
            self._regions[position] = found
        return found


def current_regions() -> Regions:
    """Return the table of everything that is registered now; cheap if nothing has changed."""
    global _cache
    with _lock:
        key = (tuple((token, heap.version) for token, heap in _heaps.items()), tuple(_extra))
        if _cache is None or _cache[0] != key:
            _cache = (key, Regions(list(_heaps.values()), list(_extra.values())))
        return _cache[1]


class BoundsChecker:
    """Decides for one launch whether an access is allowed."""

    def __init__(self, regions: Regions, arguments: Sequence[tuple[int, int, str]]) -> None:
        """Take the table and the storages of the tensor arguments: (first byte, size in bytes, argument's name)."""
        self._regions, self.heaps = regions, regions.heaps
        # A heap's tensors are checked against its blocks: a storage may be rounded up, a block is exact.
        self._arguments = regions.extra + [
            Region(start, nbytes, name)
            for start, nbytes, name in arguments
            if nbytes and not any(low <= start and start + nbytes <= high for low, (high, _) in self.heaps.items())
        ]
        self._recent: list[Region] = []

    def find(self, low: int, high: int) -> Region | None:
        """Return the accessible range that contains all bytes of [low, high), or None."""
        for region in self._arguments:
            if region.start <= low and high <= region.end:
                return region
        for region in self._recent:
            if region.start <= low and high <= region.end:
                return region
        regions = self._regions
        position = bisect_right(regions.start_list, low) - 1
        if position >= 0 and high <= regions.end_list[position]:
            region = regions.region(position)
            self._recent = [region, *self._recent[:7]]  # kernels touch few ranges over and over
            return region
        return None

    def outside(self, addresses: Array, nbytes: int) -> Array:
        """Return a mask of the addresses at which an element of `nbytes` bytes is not accessible."""
        bad = np.ones(addresses.shape, bool)
        last = addresses + np.uint64(nbytes)
        wrapped = last < addresses  # an element cannot span the end of the address space
        if len(self._regions.starts):
            position = np.searchsorted(self._regions.starts, addresses, side="right") - 1
            bad = (position < 0) | (last > self._regions.ends[np.maximum(position, 0)])
        for region in self._arguments:
            bad &= (addresses < np.uint64(region.start)) | (last > np.uint64(region.end))
        result: Array = bad | wrapped
        return result

    def nearest(self, address: int) -> Region | None:
        """Return the accessible range that is closest to an address, or None if there is none at all."""
        position = bisect_right(self._regions.start_list, address) - 1
        beside = range(max(position, 0), min(position + 2, len(self._regions.start_list)))
        candidates = [*self._arguments, *map(self._regions.region, beside)]
        return min(candidates, key=lambda region: region.distance(address), default=None)

    def describe(self, address: int) -> str:
        """Say in which range an address lies; just the address if in none."""
        near = self.nearest(address)
        if near is None or near.distance(address):
            return f"{address:#x}"
        return f"{address:#x} (byte {address - near.start} of {near.describe()})"

    def error(
        self, kernel: str, program: tuple[int, int, int], access: str, addresses: Array, lanes: Array, nbytes: int
    ) -> OutOfBoundsError:
        """Describe the first inaccessible element among `addresses`; `lanes` are their places within the block."""
        bad = self.outside(addresses, nbytes)
        first = int(np.argmax(bad))
        address, lane = int(addresses[first]), int(lanes[first])
        others = int(bad.sum()) - 1
        translated = address >= OFF_HEAP
        address -= OFF_HEAP * translated
        near = self.nearest(address)
        advice = (
            "Mask the access, or, if the address was loaded from memory and is right, pass the tensor as an "
            "argument or call iris_triton.interpreter.allow_region."
        )
        if translated:
            problem = f"not on the heap of the rank that it was translated from: it is {self.describe(address)}"
            advice = (
                "Pass a tensor on the symmetric heap (ctx.zeros, ctx.as_symmetric, ...), also where the own rank is "
                "accessed."
            )
        elif near is None:
            problem = "out of bounds: no memory is accessible to this launch"
        elif address >= near.end:
            problem = f"out of bounds: it begins {address - near.end} bytes past the end of {near.describe()}"
        elif address < near.start:
            problem = f"out of bounds: it begins {near.start - address} bytes before {near.describe()}"
        else:
            problem = f"out of bounds: it ends {address + nbytes - near.end} bytes past the end of {near.describe()}"
        message = (
            f"kernel {kernel!r}, program {program}, lane {lane}: {access} of {nbytes} bytes at {address:#x} is "
            f"{problem}{f'; {others} more lanes are out of bounds as well' if others else ''}. {advice}"
        )
        return OutOfBoundsError(
            message, kernel=kernel, program=program, lane=lane, access=access, address=address, nbytes=nbytes
        )


# -- accesses ---------------------------------------------------------------------------------------------------------
def load(
    region: Region | None, addresses: Array, mask: Array | None, fill: Array | None, dtype: np.dtype[Any]
) -> Array:
    """Read elements; lanes that are masked off get `fill`, or 0 without one.

    Triton's native load and store go through memory element by element.  Where all active lanes lie in one `region`, a
    numpy array over it does it several times faster.  Elements that are not aligned to their size, and ranges that are
    unknown because checks are off, take the native way.
    """
    shape = addresses.shape
    indices = None
    if region is not None:
        indices = region.indices(addresses if mask is None else addresses[mask], dtype.itemsize)
        if indices is not None and mask is None:
            return region.view(dtype).take(indices)
    result: Array = np.zeros(shape, dtype) if fill is None else np.broadcast_to(fill, shape).astype(dtype)
    if region is not None and indices is not None:
        result[mask] = region.view(dtype).take(indices)
        return result
    loaded: Array = _compat.native.load(addresses, np.ones(shape, np.bool_) if mask is None else mask, result, dtype)
    return loaded


def store(region: Region | None, addresses: Array, mask: Array | None, data: Array) -> None:
    """Write elements of active lanes; arguments as for `load`, `data` has the addresses' shape."""
    if region is not None:
        indices = region.indices(addresses if mask is None else addresses[mask], data.dtype.itemsize)
        if indices is not None:
            region.view(data.dtype)[indices] = data if mask is None else data[mask]
            return
    _compat.native.store(addresses, data, np.ones(addresses.shape, np.bool_) if mask is None else mask)
