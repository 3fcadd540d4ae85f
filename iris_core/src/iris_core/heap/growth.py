"""Backing the heap with memory, when it opens and when it grows: on all ranks or on none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_core.heap.symmetry import Op, agree, format_label
from iris_core.world.failures import on_all_ranks, raise_failure

if TYPE_CHECKING:
    from iris_core.heap.backing import PeerMap
    from iris_core.heap.residency import Residency
    from iris_core.heap.symmetry import History, Label
    from iris_core.protocols import Allocator
    from iris_core.world import World


class Growth:
    """Commits memory that peers have to map.

    Args:
        allocator: has `Capability.GROWTH` where `run` is called.
        world: the ranks.
        history: this rank's history.
        peers: to be told of the new memory.
        residency: to be told that it is there.
    """

    def __init__(
        self, allocator: Allocator, world: World, history: History, peers: PeerMap, residency: Residency
    ) -> None:
        self._allocator = allocator
        self._world = world
        self._history = history
        self._peers = peers
        self._residency = residency

    def at_opening(self, offset: int, nbytes: int) -> None:
        """Back the system area with memory, before the peers are mapped.

        Collective: every rank calls it.  If it fails on one rank, it raises on all.

        Raises:
            HeapExhaustedError: some rank's device has no room.
            HeapError: some rank could not get memory for another reason.
        """
        on_all_ranks(
            self._world,
            "could not get memory for the heap's system area",
            lambda: self._residency.commit(offset, nbytes),
        )

    def run(self, offset: int, nbytes: int, alignment: int, label: Label) -> None:
        """Back a range with memory.

        Collective: every rank comes here in the same call.  If it fails on one rank, it raises on all, and every rank
        gives back what it got.

        Raises:
            HeapExhaustedError: some rank's device has no room; the heap can be used as before.
            HeapError: some rank could not get memory for another reason.
            PeerAccessError: some rank could not map a peer's memory.
            SymmetryError: the ranks' histories differ.
        """
        error: Exception | None = None
        try:
            self._allocator.commit(offset, nbytes)
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        try:
            reports = agree(
                self._world,
                self._history,
                Op.ALLOCATE,
                nbytes=nbytes,
                alignment=alignment,
                label=label,
                ok=error is None,
                dirty=self._peers.dirty,
            )
            oks = [report.ok for report in reports]
            raise_failure(self._world, error, oks, f"could not get memory for {format_label(label)}")
            self._peers.exchange_if_dirty(reports)
        except BaseException as e:
            try:
                self._residency.take_back(offset, nbytes)
            except Exception as undo:  # noqa: BLE001 - the first error is the one to raise
                e.add_note(f"while giving back what this rank had got: {undo}")
            raise
        self._residency.note(offset, nbytes)
