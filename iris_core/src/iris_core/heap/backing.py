"""Where the peers' heaps are in this process, and telling each other when there is something new to map."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import torch

from iris_core.errors import HeapError, NotOnHeapError, PeerAccessError, RankMismatchError
from iris_core.types import Capability
from iris_core.world.failures import raise_failure

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from iris_core.heap.symmetry import Report
    from iris_core.protocols import Allocator, SupportsGrowth
    from iris_core.types import Segment
    from iris_core.world import World


def tensor_at(
    address: int, dtype: torch.dtype, device: torch.device | str, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return a tensor of memory that this process can address; whose it is must outlive the tensor.

    Args:
        address: of the first element.
        dtype, shape, stride: of the tensor.
        device: the one that works on it.  A peer's memory is not the device's own, so the driver is not asked, as
            torch's public ways of taking an address in do: they would copy what they find on another device.
    """
    made = torch.empty(0, dtype=dtype, device=device)
    nbytes = _span(shape, stride) * dtype.itemsize
    storage = torch._C._construct_storage_from_data_pointer(address, made.device, nbytes)
    return made.set_(storage, 0, shape, stride)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided tensor, both included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


class PeerMap:
    """Every rank's heap as this process sees it.

    Args:
        allocator: exports the own heap and maps the others.
        world: the ranks.
    """

    def __init__(self, allocator: Allocator, world: World) -> None:
        self._allocator = allocator
        self._world = world
        grows = Capability.GROWTH in allocator.info.provides
        self._growth = cast("SupportsGrowth", allocator) if grows else None
        self._generation = -1  # of the allocator at the last exchange
        self.bases: tuple[int, ...] = ()
        """Address of every rank's heap in this process; never changes once it is known."""
        self.max_alignment = 0
        """The largest power of two that divides every base in every process."""

    @property
    def dirty(self) -> bool:
        """Whether the own allocator has something that the peers do not know."""
        return self._allocator.generation != self._generation

    def open(self) -> None:
        """Map all peers.  Collective: see `exchange`.

        Raises:
            RankMismatchError: the ranks' allocators commit memory by different granules.
        """
        self.exchange()
        aligned = min(base & -base for base in self.bases)
        rows = self._world.all_gather_ints([aligned, self._allocator.granularity])
        if len({granule for _, granule in rows}) > 1:
            listed = ", ".join(f"rank {rank} {granule}" for rank, (_, granule) in enumerate(rows))
            raise RankMismatchError(f"the ranks commit memory in pieces of different sizes (bytes): {listed}")
        self.max_alignment = min(alignment for alignment, _ in rows)

    def exchange(self, world: World | None = None, members: Sequence[int] | None = None) -> None:
        """Export to and import from every peer, or the members of a group.

        Collective: every rank calls it, or every member.  If it fails on one rank, it raises on all.

        Args:
            world: the members; all ranks by default.
            members: their ranks.  Nobody else will ever map what is new.

        Raises:
            HeapError: an allocator reported something that cannot be.
            PeerAccessError: some rank could not map a peer's heap; the text is that rank's.
        """
        generation = self._allocator.generation
        ranks = range(self._world.world_size) if members is None else members
        while self._exchange_part(world or self._world, ranks):
            pass
        self._generation = generation

    def exchange_if_dirty(self, reports: Iterable[Report]) -> None:
        """Exchange if any rank has said in a step that it has something new.  Collective: see `exchange`."""
        if any(report.dirty for report in reports):
            self.exchange()

    def _exchange_part(self, world: World, ranks: Sequence[int]) -> bool:
        """Exchange what one export describes; whether some rank has more."""
        growth = self._growth
        error: Exception | None = None
        segments: Sequence[Segment] = ()
        try:
            segments = self._allocator.export()
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        more = growth is not None and growth.has_more
        outcomes = world.all_gather_ints([error is None, more])
        oks = [ok for ok, _ in outcomes]
        raise_failure(world, error, oks, "could not export its heap", PeerAccessError, ranks)
        everyone = world.exchange_segments(segments)
        error, bases = self._import_all(zip(ranks, everyone, strict=True))
        reached = world.all_gather_ints([error is None])
        oks = [ok for (ok,) in reached]
        raise_failure(world, error, oks, "could not map the heap of a peer", PeerAccessError, ranks)
        self.bases = self.bases or tuple(bases)
        if growth is not None:
            growth.exchanged()
        return any(more for _, more in outcomes)

    def translate(self, ptr: int, from_rank: int, to_rank: int) -> int:
        """Return the address of the same place in another rank's heap.

        Raises:
            ValueError: no such rank.
            NotOnHeapError: `ptr` does not lie in `from_rank`'s heap.
        """
        for rank in (from_rank, to_rank):
            if not 0 <= rank < len(self.bases):
                raise ValueError(f"there is no rank {rank} in a world of {len(self.bases)}")
        offset = ptr - self.bases[from_rank]
        if not 0 <= offset < self._allocator.nbytes:
            raise NotOnHeapError(
                f"address {ptr:#x} does not lie in rank {from_rank}'s heap, which begins at "
                f"{self.bases[from_rank]:#x} and has {self._allocator.nbytes} bytes"
            )
        return self.bases[to_rank] + offset

    def offset_within(self, tensor: torch.Tensor) -> int | None:
        """Offset of a tensor that lies wholly in the own heap, first to last element; None if it does not."""
        if tensor.layout is not torch.strided:
            return None
        itemsize = tensor.element_size()
        # an empty tensor's own data_ptr() is 0, its storage's is not
        offset = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * itemsize - self._allocator.base_ptr
        extent = itemsize * (tensor.numel() if tensor.is_contiguous() else _span(tensor.shape, tensor.stride()))
        return int(offset) if offset >= 0 and offset + max(extent, 1) <= self._allocator.nbytes else None

    def _import_all(self, everyone: Iterable[tuple[int, Sequence[Segment]]]) -> tuple[Exception | None, list[int]]:
        """Map every peer; return the first error, for the other ranks have to hear of it before it is raised."""
        error: Exception | None = None
        bases: list[int] = []
        for peer, segments in everyone:
            if peer == self._world.rank:
                bases.append(self._allocator.base_ptr)
            elif error is None:
                try:
                    bases.append(self._import(peer, segments))
                except Exception as e:  # noqa: BLE001 - returned
                    error = e
            else:  # import_peer will not take these descriptors over
                for fd in (segment.fd for segment in segments if segment.fd is not None):
                    os.close(fd)
        return error, bases

    def _import(self, peer: int, segments: Sequence[Segment]) -> int:
        mapping = self._allocator.import_peer(peer, segments)
        if mapping.nbytes != self._allocator.nbytes:
            raise HeapError(f"rank {peer}'s heap has {mapping.nbytes} bytes, this rank's {self._allocator.nbytes}")
        if self.bases and mapping.base_ptr != self.bases[peer]:
            raise HeapError(f"the allocator moved rank {peer}'s heap, although kernels know its address")
        return mapping.base_ptr
