"""Accessible memory of kernels: blocks of symmetric heaps, regions named by the user, tensor arguments.

`Regions` is an immutable sorted table; it is rebuilt only when a heap's `version` or the registrations change.  A
`BoundsChecker` belongs to one launch: the table plus the launch's tensor arguments.
"""

import ctypes
import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iris_core.protocols import MemoryMap
from iris_triton.interpreter.errors import OutOfBoundsError

Array = NDArray[Any]

OFF_HEAP = 1 << 62  # added to pointers that are translated and do not lie on the heap; no address is as high
FAR, RANK_BIT = 1 << 61, 48  # added to pointers to ranks of other nodes, with the rank in the bits from RANK_BIT

# No lock: whatever allocates here may run the garbage collector, and with it `unregister_memory` of contexts that were
# dropped.  Entering, removing and copying are single steps for other threads, and for the collector.
_tokens = itertools.count(1)
_heaps: dict[int, MemoryMap] = {}
_extra: dict[int, tuple[int, int, str]] = {}


def register_memory(memory: MemoryMap) -> int:
    """Make a symmetric heap known: its live blocks, on every rank, become accessible to kernels.

    Returns:
        A token for `unregister_memory`; the heap is kept until then.
    """
    token = next(_tokens)
    _heaps[token] = memory
    return token


def allow_region(address: int, nbytes: int, label: str = "") -> int:
    """Make memory accessible that kernels reach through addresses stored in other memory; `label` is for messages.

    Returns:
        A token for `unregister_memory`.  The caller unregisters the region before it frees the memory.

    Raises:
        ValueError: the region is empty or lies outside the address space.
    """
    if nbytes <= 0 or address <= 0 or address + nbytes > 2**64:
        raise ValueError(f"no region of {nbytes} bytes at {address:#x}: give a positive address and size in bytes")
    token = next(_tokens)
    _extra[token] = (address, nbytes, label)
    return token


def unregister_memory(token: int) -> None:
    """Forget a heap or region; unknown tokens are ignored, so that closing twice is harmless."""
    _heaps.pop(token, None)
    _extra.pop(token, None)


def registered_heaps() -> list[MemoryMap]:
    """Return the heaps that are registered now."""
    return list(_heaps.copy().values())


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
        """Return the range as elements of `dtype`, beginning at its first byte; too short a rest is left out."""
        found = self._views.get(dtype)
        if found is None:
            count = (self.end - self.start) // dtype.itemsize
            raw = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(self.start)
            found = self._views[dtype] = np.frombuffer(memoryview(raw), dtype)
        return found

    def indices(self, addresses: Array, itemsize: int) -> Array | None:
        """Element indices of addresses; None if one of them is not a whole number of elements from the start."""
        if addresses.size == 1:
            offset = int(addresses.reshape(-1)[0]) - self.start
            return None if offset % itemsize else np.array(offset // itemsize).reshape(addresses.shape)
        offsets = (addresses - np.uint64(self.start)).view(np.int64)
        if itemsize == 1:
            return offsets
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (itemsize - 1):
            return None
        return offsets >> (itemsize.bit_length() - 1)

    def distance(self, address: int) -> int:
        return max(self.start - address, address - self.end + 1, 0)

    def __str__(self) -> str:
        place = f"{self.start:#x}"
        if self.heap_rank is not None:
            place = f"offset {self.offset_bytes} of the heap of rank {self.heap_rank}"
        return f"block{f' {self.label!r}' if self.label else ''} of {self.end - self.start} bytes at {place}"


class Regions:
    """Sorted table of the live blocks on every rank's heap, and the regions that the user named."""

    def __init__(self, heaps: Sequence[MemoryMap], extra: Sequence[tuple[int, int, str]]) -> None:
        self.heaps = {base: (base + heap.nbytes, n) for n, heap in enumerate(heaps) for base in heap.heap_bases}
        """End and number of the heap that begins at an address, for all ranks' heaps."""
        far = ((heap, ranks[0]) for heap in heaps for ranks in heap.nodes if heap.rank not in ranks)
        self.far = {heap.heap_bases[rank]: heap for heap, rank in far}
        """The heap that has an address for all ranks of other nodes, whose memory is not here."""
        self.extra = [Region(*each) for each in extra]
        blocks = ((heap, block) for heap in heaps for block in heap.live_blocks() if block.nbytes > 0)
        self._blocks = sorted(
            (base + block.offset_bytes, block.nbytes, block.label, rank, block.offset_bytes)
            for heap, block in blocks
            for rank, base in enumerate(heap.heap_bases)
            if base not in self.far
        )
        self.start_list = [block[0] for block in self._blocks]
        self.end_list = [block[0] + block[1] for block in self._blocks]
        self.starts, self.ends = np.array(self.start_list, np.uint64), np.array(self.end_list, np.uint64)
        self._regions: dict[int, Region] = {}

    def region(self, position: int) -> Region:
        """Return the block at a position of the table."""
        found = self._regions.get(position)
        if found is None:
            found = self._regions[position] = Region(*self._blocks[position])
        return found


_cache: tuple[tuple[Any, ...], Regions] | None = None


def current_regions() -> Regions:
    """Return the table of everything that is registered now; cheap if nothing has changed."""
    global _cache
    heaps, extra, found = _heaps.copy(), _extra.copy(), _cache
    key = (tuple((token, heap.version) for token, heap in heaps.items()), tuple(extra))
    if found is None or found[0] != key:
        found = _cache = (key, Regions(list(heaps.values()), list(extra.values())))
    return found[1]


class BoundsChecker:
    """Decides for one launch whether an access is allowed."""

    def __init__(self, regions: Regions, arguments: Sequence[tuple[int, int, str]]) -> None:
        """Take the table and the storages of the tensor arguments: (first byte, size in bytes, argument's name)."""
        self._regions, self.heaps, self.far = regions, regions.heaps, regions.far
        # A heap's tensors are checked against its blocks: a storage may be rounded up, a block is exact.
        self._arguments = regions.extra + [
            Region(start, nbytes, name)
            for start, nbytes, name in arguments
            if nbytes and not any(low <= start and start + nbytes <= high for low, (high, _) in self.heaps.items())
        ]
        self._recent: list[Region] = []

    def find(self, low: int, high: int) -> Region | None:
        """Return the accessible range that contains all bytes of [low, high), or None."""
        for regions in (self._arguments, self._recent):
            for region in regions:
                if region.start <= low and high <= region.end:
                    return region
        table = self._regions
        position = bisect_right(table.start_list, low) - 1
        if position >= 0 and high <= table.end_list[position]:
            region = table.region(position)
            self._recent = [region, *self._recent[:7]]  # kernels touch few ranges over and over
            return region
        return None

    def holds(self, addresses: Array, data: Array) -> bool:
        """Return whether one accessible range holds all of the addresses, with these values."""
        region = self.find(int(addresses.min()), int(addresses.max()) + data.itemsize)
        if region is None or (indices := region.indices(addresses, data.itemsize)) is None:
            return False
        return region.view(data.dtype).take(indices).tobytes() == data.tobytes()

    def outside(self, addresses: Array, nbytes: int) -> Array:
        """Return a mask of the addresses at which an element of `nbytes` bytes is not accessible."""
        bad = np.ones(addresses.shape, bool)
        last = addresses + np.uint64(nbytes)
        if len(self._regions.starts):
            position = np.searchsorted(self._regions.starts, addresses, side="right") - 1
            bad = (position < 0) | (last > self._regions.ends[np.maximum(position, 0)])
        for region in self._arguments:
            bad &= (addresses < np.uint64(region.start)) | (last > np.uint64(region.end))
        return bad | (last < addresses)  # an element cannot span the end of the address space

    def _nearest(self, address: int) -> Region | None:
        """Return the accessible range that is closest to an address, or None if there is none at all."""
        position = bisect_right(self._regions.start_list, address) - 1
        beside = range(max(position, 0), min(position + 2, len(self._regions.start_list)))
        candidates = [*self._arguments, *map(self._regions.region, beside)]
        return min(candidates, key=lambda region: region.distance(address), default=None)

    def describe(self, address: int) -> str:
        """Say in which range an address lies; just the address if in none."""
        near = self._nearest(address)
        inside = near is not None and not near.distance(address)
        return f"{address:#x} (byte {address - near.start} of {near})" if near and inside else f"{address:#x}"

    def _far_ranks(self, address: int) -> str:
        """Say on which node the rank is that an address means; empty where it means none of another node."""
        place = address % (1 << RANK_BIT)
        for base, heap in self.far.items():
            if base <= place < base + heap.nbytes:
                node_of = {rank: node for node, ranks in enumerate(heap.nodes) for rank in ranks}
                own = node_of[heap.rank]
                where = "it is memory of a rank on another node"
                if address >= FAR:
                    peer = address - FAR >> RANK_BIT
                    where = f"rank {peer} is on node {node_of[peer]}"
                return f"{where}, which kernels of rank {heap.rank} (node {own}) cannot address"
        return ""

    def error(
        self, kernel: str, program: tuple[int, int, int], access: str, addresses: Array, lanes: Array, nbytes: int
    ) -> OutOfBoundsError:
        """Describe the first inaccessible element among `addresses`; `lanes` are their places within the block."""
        bad = self.outside(addresses, nbytes)
        first = int(np.argmax(bad))
        address, lane, others = int(addresses[first]), int(lanes[first]), int(bad.sum()) - 1
        advice = (
            "Mask the access, free the tensor later if it was freed, or, if the address was loaded from memory and is "
            "right, pass the tensor as an argument or call iris_triton.interpreter.allow_region."
        )
        near = self._nearest(address)
        if address >= OFF_HEAP:
            address -= OFF_HEAP
            problem = f"not on the heap of the rank that it was translated from: it is {self.describe(address)}"
            advice = "Pass a tensor on the symmetric heap (ctx.zeros, ctx.as_symmetric), also for the own rank."
        elif said := self._far_ranks(address):
            address %= 1 << RANK_BIT
            problem = f"refused: {said}"
            advice = "Kernels reach the memory of ctx.node_ranks; between nodes use ctx.ccl"
            if any(heap.network is not None for heap in self.far.values()):
                advice += (
                    ", or in kernels launched with **ctx.launch_options() the device context's put, get, and signal "
                    'and put_signal with op="add" and flags of int64'
                )
            advice += "."
        elif near is None:
            problem = "out of bounds: no memory is accessible to this launch"
        elif address >= near.end:
            problem = f"out of bounds: it begins {address - near.end} bytes past the end of {near}"
        elif address < near.start:
            problem = f"out of bounds: it begins {near.start - address} bytes before {near}"
        else:
            problem = f"out of bounds: it ends {address + nbytes - near.end} bytes past the end of {near}"
        message = (
            f"kernel {kernel!r}, program {program}, lane {lane}: {access} of {nbytes} bytes at {address:#x} is "
            f"{problem}{f'; {others} more lanes are out of bounds as well' if others else ''}. {advice}"
        )
        facts = {"kernel": kernel, "program": program, "lane": lane, "access": access, "address": address}
        return OutOfBoundsError(message, nbytes=nbytes, **facts)
