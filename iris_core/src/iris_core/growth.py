"""Growing the heap on all ranks or on none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_core.agreement import Op, agree, format_label, name_ranks
from iris_core.errors import HeapError, HeapExhaustedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.agreement import History, Label, Report
    from iris_core.bootstrap import World
    from iris_core.peers import PeerMap
    from iris_core.protocols import Allocator
    from iris_core.residency import Residency


class Growth:
    """Commits memory that peers have to map.

    Args:
        allocator: has `Capability.GROWTH`.
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
            self._raise_failure(error, reports, label)
            if any(report.dirty for report in reports):
                self._peers.exchange()
        except BaseException as e:
            try:
                self._residency.take_back(offset, nbytes)
            except Exception as undo:  # noqa: BLE001 - the first error is the one to raise
                e.add_note(f"while giving back what this rank had got: {undo}")
            raise
        self._residency.note(offset, nbytes)

    def _raise_failure(self, error: Exception | None, reports: Sequence[Report], label: Label) -> None:
        """Raise the cause where it happened, and the same with the same text on every other rank."""
        failed = [rank for rank, report in enumerate(reports) if not report.ok]
        if not failed:
            return
        sizes = (0, 0, 0)
        if isinstance(error, HeapExhaustedError):
            sizes = (error.requested_bytes, error.free_bytes, error.largest_free_bytes)
        everyone = self._world.all_gather_object((isinstance(error, HeapExhaustedError), str(error), sizes))
        if error is not None:
            raise error
        exhausted, cause, (requested, free, largest) = everyone[failed[0]]
        text = f"{name_ranks(failed)} could not get memory for {format_label(label)}: {cause}"
        if exhausted:
            raise HeapExhaustedError(text, requested_bytes=requested, free_bytes=free, largest_free_bytes=largest)
        raise HeapError(text)
