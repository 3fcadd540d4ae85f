"""Putting a tensor's memory on the heap without a copy, where the allocator can (`SupportsImportTensor`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from iris_core.agreement import Op, agree, raise_failure
from iris_core.blocks import Record
from iris_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from iris_core.agreement import History, Label
    from iris_core.blocks import BlockTable
    from iris_core.bootstrap import World
    from iris_core.peers import PeerMap
    from iris_core.protocols import Allocator, SupportsImportTensor
    from iris_core.residency import Residency
    from iris_core.suballocator import SubAllocator

_FAILED = "cannot import the tensor that was passed to as_symmetric"


class TensorImporter:
    """Imports one tensor on every rank, at the same offset everywhere or not at all.

    Args:
        allocator: has `Capability.IMPORT_TENSOR`.
        world: the ranks.
        history: this rank's history.
        table: the blocks.
        peers: to be told of the new memory.
        residency: to be told that the range is in use.
        sub: the free list.
        reserve: finds an offset for (nbytes, alignment, label).
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
        reserve: Callable[[int, int, Label], int],
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
        self._reserve = reserve

    def run(self, external: torch.Tensor, label: Label) -> tuple[Record, torch.Tensor]:
        """Import a tensor; the caller adds the record to history and table.

        Collective: every rank calls it.  If it fails on one rank, it raises on all and nothing has changed.
        """
        size = self._agree_on_size(external, label)
        offset = self._reserve(size, self._granularity, label)
        number, on_release = self._table.next_number()
        out = external
        error: Exception | None = None
        try:
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
            raise_failure(error, reports, _FAILED)
            if any(report.dirty for report in reports):
                self._peers.exchange()
        except BaseException:
            if error is None:
                self._residency.decommit(offset, size)
            self._sub.free(offset)
            raise
        self._residency.note(offset, size)
        storage = out.untyped_storage()
        return Record(number, offset, size, storage.data_ptr() - self._base, storage._cdata, label, imported=True), out

    def _agree_on_size(self, external: torch.Tensor, label: Label) -> int:
        """How much of the heap the import takes: as much as the rank with the largest memory allocation needs."""
        error: Exception | None = None
        size = delta = 0
        try:
            size, delta = self._allocator.import_extent(external)
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        reports = agree(self._world, self._history, Op.IMPORT, label=label, ok=error is None)
        raise_failure(error, reports, _FAILED)
        extents = self._world.all_gather_ints([size, delta])
        if len({begin for _, begin in extents}) > 1:
            raise UnsupportedError(
                "as_symmetric: the ranks' tensors begin at different places of their memory allocations, so they "
                "cannot lie at the same offset of the heap; pass tensors that were allocated alike, or copy into "
                "ctx.empty_like(tensor)"
            )
        return max(size for size, _ in extents)
