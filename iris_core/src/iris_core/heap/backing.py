"""Physical memory of the heap: which ranges are committed, and where the peers' heaps are in this process.

Commits and decommits follow from offsets alone, so they are the same on every rank.  Memory is given back only after
it has been free from one agreement of all ranks to the next: a program that allocates and frees the same block in every
iteration keeps its pages.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import torch

from iris_core.errors import HeapError, PeerAccessError, RankMismatchError, UnsupportedError
from iris_core.heap.offsets import RangeSet
from iris_core.protocols import Allocator, MulticastRange, SupportsDecommit, SupportsGrowth, SupportsNetwork
from iris_core.types import Capability, Network, Segment
from iris_core.world import World
from iris_core.world.exchange import close_all
from iris_core.world.failures import on_all_ranks


class Backing:
    """The memory of this rank's heap, and the peers' heaps as this process sees them."""

    def __init__(self, allocator: Allocator, world: World) -> None:
        self._allocator, self._world = allocator, world
        self._granule, self._nbytes = allocator.granularity, allocator.nbytes
        self._base = allocator.base_ptr
        self.grows = Capability.GROWTH in allocator.info.provides
        self.decommits = Capability.DECOMMIT in allocator.info.provides
        self.bases: tuple[int, ...] = ()  # of every rank's heap; see `SymmetricHeap.heap_bases`
        self._void: mmap.mmap | None = None
        self.max_alignment = 0
        self._generation = -1  # of the allocator at the last exchange
        self._committed = RangeSet()
        self._idle = RangeSet()  # free since the last agreement, still committed
        self._num_frees = 0  # then

    # -- memory of this rank ------------------------------------------------------------------------------------------
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
        if self.grows or self.decommits:
            outer = self._outer(offset, nbytes)
            if not self._committed.covers(*outer):
                self._committed.add(*outer)

    def may_release(self, num_frees: int) -> bool:
        """Whether memory may be idle, or come to be: not where nothing was freed since the previous call."""
        changed, self._num_frees = num_frees != self._num_frees, num_frees
        return self.decommits and (changed or bool(self._idle))

    def release_idle(self, free: Iterable[tuple[int, int]]) -> bool:
        """Give back the whole granules that have been free since the previous call, and note those free now.

        Returns whether anything was given back; `free` are ranges [start, end).  If the allocator raises, what is
        remembered here is the same as on ranks where it does not.
        """
        idle = RangeSet(
            [each for start, end in free for each in self._committed.intersection(*self._inner(start, end))]
        )
        ranges = [each for start, end in self._idle for each in idle.intersection(*self._inner(start, end))]
        for start, end in ranges:
            idle.remove(start, end)
        self._idle = idle
        self.decommit(ranges)
        return bool(ranges)

    def decommit(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Give ranges [start, end) of whole granules back at once; if one fails, the others all the same."""
        with contextlib.ExitStack() as each:
            for start, end in reversed([*ranges]):
                self._committed.remove(start, end)
                self._idle.remove(start, end)
                each.callback(cast("SupportsDecommit", self._allocator).decommit, start, end - start)

    def make_room(self, offset: int, nbytes: int) -> None:
        """Give back what is committed in a range of whole granules that is free."""
        self.decommit(self._committed.intersection(offset, offset + nbytes))

    def take_back(self, offset: int, nbytes: int) -> None:
        """Undo what the allocator committed for a range that was not noted, because growth failed on some rank."""
        if not self.decommits:
            return
        gaps = RangeSet([self._outer(offset, nbytes)])
        for start, end in self._committed:
            gaps.remove(start, end)
        self.decommit(gaps)

    @property
    def committed_bytes(self) -> int:
        """Bytes backed by memory as far as the allocator knows."""
        return cast("SupportsDecommit", self._allocator).committed_bytes if self.decommits else self._nbytes

    def _outer(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the granules that a range touches."""
        g = self._granule
        return offset // g * g, min((offset + nbytes + g - 1) // g * g, self._nbytes)

    def _inner(self, start: int, end: int) -> tuple[int, int]:
        """Return the granules that lie wholly in a range; the heap's last one may be shorter."""
        g = self._granule
        return (start + g - 1) // g * g, end if end == self._nbytes else end // g * g

    # -- the peers' heaps ---------------------------------------------------------------------------------------------
    @property
    def dirty(self) -> bool:
        """Whether the own allocator has something that the peers do not know."""
        return self._allocator.generation != self._generation

    def open(self) -> tuple[Network | None, int]:
        """Map all peers; return `SymmetricHeap.network` and `multicast_base`.  Collective: see `exchange`."""
        network: Network | None = None
        if Capability.NETWORK in self._allocator.info.provides:
            allocator = cast("SupportsNetwork", self._allocator)
            mine = on_all_ranks(self._world, "could not prepare the network", allocator.invite, PeerAccessError)
            connect = partial(allocator.connect, self._world.all_gather_ints(mine), self._world.nodes)
            network = on_all_ranks(self._world, "could not connect to the other ranks", connect, PeerAccessError)
        self.exchange()
        aligned = min(self.bases[rank] & -self.bases[rank] for rank in self._world.local_members)
        offers = Capability.MULTICAST in self._allocator.info.provides
        maker: MulticastRange | None = cast("Any", self._allocator).multicast if offers else None
        rows = self._world.all_gather_ints([aligned, self._allocator.granularity, self._nbytes, int(maker is not None)])
        differ = "commit memory in pieces of different sizes (bytes)", "have heaps of different sizes (bytes)"
        for index, what in enumerate((*differ, "do not all ask for multicast (1: does)"), 1):
            if len({row[index] for row in rows}) > 1:
                listed = ", ".join(f"rank {rank} {row[index]}" for rank, row in enumerate(rows))
                raise RankMismatchError(f"the ranks {what}: {listed}")
        self.max_alignment = min(alignment for alignment, *_ in rows)
        return network, 0 if maker is None else self._open_multicast(maker)

    def _open_multicast(self, maker: MulticastRange) -> int:
        world, what = self._world, "could not make addresses that reach all heaps"
        if len(world.local_members) < world.world_size:
            raise UnsupportedError("multicast reaches the ranks of one node, and these are on several")
        offered = on_all_ranks(world, what, maker.offer, UnsupportedError)
        first = world.exchange_segments(offered)[0]
        on_all_ranks(world, what, partial(maker.join, first), UnsupportedError)
        return on_all_ranks(world, what, maker.map, UnsupportedError)

    def close(self) -> None:
        """Give back what stands for heaps that cannot be mapped."""
        if self._void is not None:
            self._void.close()

    def exchange(self, world: World | None = None, members: Sequence[int] | None = None) -> None:
        """Export to and import from the peers of this node or a group.  Collective: if one rank fails, all raise."""
        world, ranks = world or self._world, range(self._world.world_size) if members is None else members
        growth = cast("SupportsGrowth", self._allocator) if self.grows else None
        generation = self._allocator.generation
        has_more = True
        while has_more:
            export, mapping = "could not export its heap", "could not map the heap of a peer"
            segments = on_all_ranks(world, export, self._allocator.export, PeerAccessError, ranks)
            more_here = growth is not None and growth.has_more
            everyone = world.exchange_segments(segments)
            bases = on_all_ranks(world, mapping, partial(self._import_all, ranks, everyone), PeerAccessError, ranks)
            self.bases = self.bases or bases
            if growth is not None:
                growth.exchanged()
            has_more = growth is not None and any(more for (more,) in world.all_gather_ints([more_here]))
        self._generation = generation

    def _import_all(self, ranks: Sequence[int], everyone: Sequence[Sequence[Segment]]) -> tuple[int, ...]:
        """Map every peer; after an error the descriptors of the others are closed, for no import takes them over."""
        bases: list[int] = []
        try:
            for peer, segments in zip(ranks, everyone, strict=True):
                if peer == self._world.rank:
                    bases.append(self._base)
                    continue
                if peer not in self._world.local_members:
                    bases.append(self.address_of_nothing())
                    continue
                mapping = self._allocator.import_peer(peer, segments)
                if mapping.nbytes != self._nbytes:
                    raise HeapError(f"rank {peer}'s heap has {mapping.nbytes} bytes, this rank's {self._nbytes}")
                if self.bases and mapping.base_ptr != self.bases[peer]:
                    raise HeapError(f"the allocator moved rank {peer}'s heap, although kernels know its address")
                bases.append(mapping.base_ptr)
        except Exception:
            for peer, segments in list(zip(ranks, everyone, strict=True))[len(bases) + 1 :]:
                if peer != self._world.rank:
                    close_all(each.fd for each in segments if each.fd is not None)
            raise
        return tuple(bases)

    def address_of_nothing(self) -> int:
        """Return where a range of the heap's size begins in which every access fails."""
        if self._void is None:
            self._void = mmap.mmap(-1, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0)
        return int(np.frombuffer(self._void, np.uint8).ctypes.data)

    # -- addresses ----------------------------------------------------------------------------------------------------
    def offset_within(self, tensor: torch.Tensor) -> int | None:
        """Offset of a tensor that lies wholly in the own heap, first to last element; None if it does not."""
        if tensor.layout is not torch.strided:
            return None
        itemsize = tensor.element_size()
        # an empty tensor's own data_ptr() is 0, its storage's is not
        offset = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * itemsize - self._base
        extent = itemsize * (tensor.numel() if tensor.is_contiguous() else span(tensor.shape, tensor.stride()))
        return int(offset) if offset >= 0 and offset + max(extent, 1) <= self._nbytes else None


def tensor_at(
    address: int, dtype: torch.dtype, device: torch.device | str, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a tensor of memory that this process can address, at a first element; the owner must outlive the tensor.

    A peer's memory is not the device's own, so the driver is not asked for its device, as torch's public ways would.
    """
    made = torch.empty(0, dtype=dtype, device=device)
    nbytes = span(shape, stride) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, made.device, nbytes)
    return made.set_(storage, 0, shape, stride)


def span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor, both included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
