"""Putting a tensor's memory on the heap without a copy, where the allocator can (`SupportsImportTensor`).

Tensors often share an allocation, which is mapped once: when every rank finds a tensor's memory at the same offset of
the heap already, the import adds one more holder to that block and takes no room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from iris_core.errors import UnsupportedError
from iris_core.heap.blocks import Record
from iris_core.heap.symmetry import CANNOT_IMPORT, Op, agree
from iris_core.world.failures import raise_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from iris_core.heap.backing import PeerMap
    from iris_core.heap.blocks import BlockTable
    from iris_core.heap.offsets import SubAllocator
    from iris_core.heap.residency import Residency
    from iris_core.heap.symmetry import History, Label
    from iris_core.protocols import Allocator, SupportsImportTensor
    from iris_core.world import World


class Extent(NamedTuple):
    """What one rank's tensor asks of the heap.

    Attributes:
        nbytes: how much of the heap its memory needs.
        delta: where the tensor begins in that.
        there: at which offset it lies already, because its memory was imported before; -1 if it was not.
    """

    nbytes: int
    delta: int
    there: int


class _Place(NamedTuple):
    """Where a tensor is to go, equal on all ranks.

    Attributes:
        nbytes: size of the block.
        shared: offset of the block that has it already; -1 if a new one is needed.
    """

    nbytes: int
    shared: int


class TensorImporter:
    """Imports tensors, each on every rank, at the same offset everywhere or not at all.

    Args:
        allocator: has `Capability.IMPORT_TENSOR`.
        world: the ranks.
        history: this rank's history.
        table: the blocks.
        peers: to be told of the new memory.
        residency: to be told that the range is in use.
        sub: the free list.
    """

    def __init__(
        self,
        allocator: Allocator,
        world: World,
        history: History,
        table: BlockTable,
        peers: PeerMap,
        residency: Residency,
        sub: SubAllocator,
    ) -> None:
        self._granularity = allocator.granularity
        self._base = allocator.base_ptr
        self._allocator = cast("SupportsImportTensor", allocator)
        self._world = world
        self._history = history
        self._table = table
        self._peers = peers
        self._residency = residency
        self._sub = sub
        self._holders: dict[int, int] = {}  # offset of a block -> live and pending imports in it

    def extent(self, external: torch.Tensor) -> Extent:
        """Say what a tensor asks of the heap.  Local.

        Raises:
            UnsupportedError: its memory cannot be imported.
        """
        size, delta = self._allocator.import_extent(external)
        there = self._allocator.imported_at(external)
        return Extent(size, delta, -1 if there is None else there)

    def run(
        self, external: torch.Tensor, label: Label, extent: Extent, reserve: Callable[[int, int, Label], int]
    ) -> tuple[Record, torch.Tensor]:
        """Import a tensor; the caller adds the record to history and table.

        Collective: every rank calls it, after all could tell their extents.  If it fails on one rank, it raises on all
        and nothing has changed.

        Args:
            external: what is imported.
            label: the call.
            extent: what this rank's tensor asks of the heap.
            reserve: finds an offset for (nbytes, alignment, label).
        """
        place = self._agree_on_place(extent)
        size, is_new = place.nbytes, place.shared < 0
        offset = reserve(size, self._granularity, label) if is_new else place.shared
        number, on_release = self._table.next_number()
        out = external
        error: Exception | None = None
        try:
            if is_new:
                self._residency.make_room(offset, size)  # free for all, but still backed by the heap's own memory
            out = self._allocator.import_tensor(offset, external, on_release)
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        try:
            reports = agree(
                self._world,
                self._history,
                Op.IMPORT,
                nbytes=size,
                ok=error is None,
                dirty=self._peers.dirty,
                label=label,
            )
            raise_failure(self._world, error, [report.ok for report in reports], CANNOT_IMPORT)
            self._peers.exchange_if_dirty(reports)
        except BaseException as e:
            if is_new:
                self._sub.free(offset)  # first of all: the free lists must stay equal on all ranks
                try:
                    if error is None:
                        self._residency.decommit([(offset, offset + size)])
                except Exception as undo:  # noqa: BLE001 - the first error is the one to raise
                    e.add_note(f"while taking it off the heap again: {undo}")
            raise
        if is_new:
            self._residency.note(offset, size)
        self._holders[offset] = self._holders.get(offset, 0) + 1
        storage = out.untyped_storage()
        start = storage.data_ptr() - self._base
        return Record(number, offset, size, start, storage._cdata, label, external.untyped_storage()), out

    def num_holders(self, offset: int) -> int:
        """How many tensors, live or waiting to be freed, have the block at an offset; 1 unless it was imported."""
        return self._holders.get(offset, 1)

    def release(self, record: Record) -> int:
        """An import is gone on all ranks.

        Returns:
            The size of its block if that was the last import in it, which the caller gives back; else 0.
        """
        self._holders[record.offset] -= 1
        if self._holders[record.offset]:
            return 0
        del self._holders[record.offset]
        return self._sub.free(record.offset)

    def _agree_on_place(self, extent: Extent) -> _Place:
        """Where the import goes, and how much of the heap it takes: as much as on the rank that needs most."""
        everyone = self._world.all_gather_ints(extent)
        places = {place for _, _, place in everyone}
        if len(places) == 1 and (place := places.pop()) >= 0:
            block = max(offset for offset in self._holders if offset <= place)
            return _Place(self._sub.size_of(block), block)
        if len({begin for _, begin, _ in everyone}) > 1:
            raise UnsupportedError(
                "as_symmetric: the ranks' tensors begin at different places of their memory allocations, so they "
                "cannot lie at the same offset of the heap; pass tensors that were allocated alike, or copy into "
                "ctx.empty_like(tensor)"
            )
        return _Place(max(size for size, _, _ in everyone), -1)
