"""Finding room, and making freed memory free again: which blocks nobody needs any more, agreed on by all ranks.

A peer that has not reached its own free may still write to a block, so the ranks agree at every barrier of the whole
world, and when an allocation finds no room.  In a world of one rank there is nobody to ask: a freed block is free at
once, a dropped one at the next allocation.  Either way nobody gets a block that a stream may still use
(`iris_core.heap.streams`).

The blocks and their states are in the table (`iris_core.heap.blocks`), which never communicates; what the ranks say to
each other about them is said here.
"""

from __future__ import annotations

import contextlib
import gc
from itertools import takewhile
from typing import TYPE_CHECKING

from iris_core.errors import DeviceError, HeapExhaustedError
from iris_core.heap.symmetry import Op, agree, format_label
from iris_core.world.failures import raise_failure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.heap.backing import PeerMap
    from iris_core.heap.blocks import BlockTable, Record
    from iris_core.heap.external import TensorImporter
    from iris_core.heap.offsets import SubAllocator
    from iris_core.heap.regions import GroupMemory
    from iris_core.heap.residency import Residency
    from iris_core.heap.streams import Stream, StreamOrder
    from iris_core.heap.symmetry import History, Label
    from iris_core.world import World

NOT_FINISHED = "could not finish the work of its device"
"""What ranks cannot do where one cannot wait for its device, for messages."""


class Reclaimer:
    """Hands out room and takes it back, equally on all ranks.

    Args:
        world: the ranks.
        history: this rank's history.
        table: the blocks.
        sub: the free list.
        peers: to be told of new memory.
        residency: to be told that memory is idle.
        order: which streams still use a freed block.
        importer: to be told that an import is gone.
        groups: what groups of ranks have at the end of the heap.
    """

    def __init__(
        self,
        world: World,
        history: History,
        table: BlockTable,
        sub: SubAllocator,
        *,
        peers: PeerMap,
        residency: Residency,
        order: StreamOrder,
        importer: TensorImporter,
        groups: GroupMemory,
    ) -> None:
        self._world = world
        self._history = history
        self._table = table
        self._sub = sub
        self._peers = peers
        self._residency = residency
        self._order = order
        self._importer = importer
        self._groups = groups

    def reserve(self, nbytes: int, alignment: int, label: Label) -> int:
        """Find an offset; ask the other ranks for memory that nobody needs any more before giving up.

        The free lists are equal on all ranks, so all find no room at the same call and all come to the agreement.

        Raises:
            HeapExhaustedError: there is none.
            SymmetryError: the ranks' histories differ.
            DeviceError: the work of a rank's device has failed.
            HeapError: a rank could not give memory back.
        """
        sub, groups = self._sub, self._groups
        with contextlib.suppress(HeapExhaustedError):
            return sub.allocate(nbytes, alignment)
        end = groups.floor
        if sub.rounded(nbytes) <= sub.nbytes:
            for collect in (False, True):  # collecting garbage takes long, so only when the rest was not enough
                if collect:
                    gc.collect()  # tensors in reference cycles
                wait = bool(self._table.waiting())
                floors, gave_back, error = self._step(Op.ALLOCATE, nbytes, alignment, label, wait=wait)
                self._settle(gave_back, error)
                with contextlib.suppress(HeapExhaustedError):
                    return sub.allocate(nbytes, alignment)
                if groups.raise_limit(nbytes, alignment, floors):  # only now, as groups never get that memory back
                    return sub.allocate(nbytes, alignment)
                end = groups.end_of_all(floors)
        raise self._exhausted(nbytes, alignment, label, end)

    def retire(self, record: Record) -> None:
        """Free a live block: at once in a world of one, else when all ranks agree."""
        self._order.check_not_capturing("free")
        self._order.end(record)
        self._table.retire(record)
        if self._world.world_size == 1:
            self._settle(*self._recycle(self._table.take_pending(1)))

    def reclaim_dropped(self) -> None:
        """In a world of one, free what was dropped."""
        records = [self._table.discard(number) for number in self._table.dropped()]
        for record in records:
            self._order.end(record)
        self._settle(*self._recycle(records))

    def at_barrier(self, stream: Stream | None, *, wait: bool) -> None:
        """Compare histories, free what nobody needs, and give idle memory back; see `SymmetricHeap.barrier_agreement`.

        Collective: every rank calls it.
        """
        _, gave_back, error = self._step(Op.BARRIER, wait=wait, stream=stream)
        try:
            if self._residency.can_decommit:
                gave_back |= self._residency.release_idle(self._order.unfenced(self._sub.free_blocks()))
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error, gave_back = error or e, True
        self._settle(gave_back, error)

    def wait_for_device(self) -> None:
        """Wait until kernels of this rank no longer use the heap: no stream uses what was freed so far."""
        self._order.synchronize()
        self._order.device_is_idle(self._table.pending)

    def _exhausted(self, nbytes: int, alignment: int, label: Label, end: int) -> HeapExhaustedError:
        """The error of a block that has no room below `end`."""
        sub = self._sub
        requested = sub.rounded(nbytes)
        free, largest = sub.free_below(end)
        waiting = sum(sub.size_of(self._table.live[number].offset) for number in self._table.votes)
        held = f" {waiting} bytes have been dropped by some ranks but not by all." if waiting else ""
        if taken := sub.nbytes - end:
            held += f" Groups of ranks have taken the {taken} bytes at its end."
        return HeapExhaustedError(
            f"Heap out of memory: {format_label(label)} needs {requested} bytes (alignment {alignment}), but "
            f"of the heap's {sub.nbytes} bytes {free} are free, {largest} of them in one "
            f"piece.{held} Free tensors with free() or scope(), or open the context with a larger heap_size.",
            requested_bytes=requested,
            free_bytes=free,
            largest_free_bytes=largest,
        )

    def _step(
        self,
        op: Op,
        nbytes: int = 0,
        alignment: int = 0,
        label: Label = (),
        *,
        wait: bool,
        stream: Stream | None = None,
    ) -> tuple[list[int], bool, Exception | None]:
        """Take a step with all ranks: compare, free what nobody needs, map what is new.

        Returns:
            Where the memory of groups begins on each rank, and what `_recycle` returns.

        Which blocks become free must be equal on all ranks, but streams are each rank's own.  So every rank says how
        many of the freed blocks, the oldest first, it no longer uses, and the smallest number counts; a dropped block
        is spoken of only when it is no longer used.
        """
        table, world, order = self._table, self._world, self._order
        error: Exception | None = None
        dropped: list[int] = []
        num_idle = 0
        try:
            if wait:
                order.synchronize(stream)
            dropped = table.dropped()
            if wait and stream is None:
                order.device_is_idle([*table.pending, *(table.live[number] for number in dropped)])
            else:
                dropped = [number for number in dropped if order.is_idle(table.live[number])]
            num_idle = sum(1 for _ in takewhile(order.is_idle, table.pending))
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        reports = agree(
            world,
            self._history,
            op,
            nbytes=nbytes,
            alignment=alignment,
            label=label,
            ok=error is None,
            dirty=self._peers.dirty,
            num_dropped=len(dropped),
            num_idle=num_idle,
            floor=self._groups.floor,
        )
        outcomes = [report.ok for report in reports]
        raise_failure(world, error, outcomes, NOT_FINISHED, DeviceError)
        freed = table.take_pending(min(report.num_idle for report in reports))
        longest = max(report.num_dropped for report in reports)
        if longest:
            everyone = world.all_gather_ints(dropped + [0] * (longest - len(dropped)))
            table.announce(dropped)
            freed += [table.discard(number) for number in table.count_votes(everyone, world.world_size)]
        outcome = self._recycle(freed)
        self._peers.exchange_if_dirty(reports)
        return [report.floor for report in reports], *outcome

    def _recycle(self, records: Sequence[Record]) -> tuple[bool, Exception | None]:
        """Make blocks free that no rank refers to any more.

        Returns:
            Whether memory of others may go, equal on all ranks, and why this rank could not let go of it: an error is
            raised when the steps that all ranks take together are done (`_settle`).
        """
        imports = []
        imported = any(record.source is not None for record in records)
        error: Exception | None = None
        try:
            if imported:
                self.wait_for_device()  # for what is mapped there, and for whoever gets the source's memory
        except Exception as e:  # noqa: BLE001 - returned; the device has failed, so nothing runs there any more
            error = e
        for record in records:
            if record.source is None:
                self._order.fence(record.offset, record.offset + self._sub.free(record.offset), record)
            elif size := self._importer.release(record):
                imports.append((record.offset, record.offset + size))
        try:
            self._residency.decommit(imports)  # somebody else's memory is mapped there
        except Exception as e:  # noqa: BLE001 - returned
            error = error or e
        return imported, error

    def _settle(self, gave_back: bool, error: Exception | None) -> None:
        """Where memory was given back, agree that all ranks have done so: only then it is free, and asked for again.

        Args:
            gave_back: whether there may have been any; equal on all ranks.
            error: why this rank could not.
        """
        if not gave_back:
            return
        reports = agree(self._world, self._history, Op.REFRESH, ok=error is None, dirty=self._peers.dirty)
        raise_failure(self._world, error, [report.ok for report in reports], "could not give memory back")
        self._peers.exchange_if_dirty(reports)
