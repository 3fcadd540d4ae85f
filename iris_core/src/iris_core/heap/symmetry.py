"""Agreements of all ranks: that their heaps are the same, and which blocks none of them needs any more.

Every rank keeps a history of its symmetric calls and a digest chained over it.  At a step that all ranks take together
they compare digests in one small exchange.  If all agree, the free lists are equal everywhere.  If not, they exchange
the recent part of their histories and every rank raises the same SymmetryError.

A peer that has not reached its own free may still write to a block, so the ranks agree on what is free at every barrier
of the whole world, and when no free block is large enough.  In a world of one rank a freed block is free at once, a
dropped one at the next allocation.
"""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from iris_core.errors import DeviceError, HeapError, HeapExhaustedError, IrisError, SymmetryError
from iris_core.heap import regions
from iris_core.heap.blocks import HISTORY_LENGTH, Call, HeapState, Label, Op, Record, format_label
from iris_core.heap.streams import Stream
from iris_core.world.failures import list_ranks, on_all_ranks

NOT_FINISHED = "could not finish the work of its device"
"""Text of messages after the ranks that could not wait for their device."""


class Step(NamedTuple):
    """The part of one rank in a step that all take together; the first five are equal where the heaps are."""

    op: int
    calls: int  # length and digest of its history
    digest: int
    nbytes: int = 0  # asked for, by steps that allocate
    alignment: int = 0
    ok: int = 1  # 0 if its local part of the step failed
    dirty: int = 0  # 1 if its allocator has something new for the peers
    floor: int = 0  # where the lowest region of a group begins on it
    num_dropped: int = 0  # blocks that it has dropped since the last step
    num_idle: int = 0  # freed blocks, the oldest first, that its streams no longer use
    signature: int = 0  # what else must be equal, for steps that compare it themselves


def agree(state: HeapState, op: Op, label: Label = (), **said: int) -> list[Step]:
    """Take a step together and compare histories; `label` is what asks for it, `said` are fields of `Step`.

    Collective: every rank calls it.  One exchange when all agree.

    Raises:
        SymmetryError: the histories or the steps differ; raised on every rank, naming the first differing call.
    """
    calls, digest = state.blocks.calls, state.blocks.digest
    mine = Step(op, calls, digest, dirty=state.backing.dirty, floor=state.floor, **said)
    steps = [Step(*row) for row in state.world.all_gather_ints(mine)]
    if all(step[:5] == mine[:5] for step in steps):
        return steps
    # what this rank is about to do stands for its next call, so that "barrier here, zeros() there" reads like any other
    recent = [*state.blocks.recent_calls(), Call(calls + 1, op, mine.nbytes, mine.alignment, -1, label, digest)]
    everyone = state.world.all_gather_object([call._replace(label=(format_label(call.label),)) for call in recent])
    raise SymmetryError(explain_difference([[Call(*call) for call in row] for row in everyone]))


def together(
    state: HeapState,
    op: Op,
    what: str,
    local: Callable[[], Mapping[str, Any] | None],
    otherwise: type[IrisError] = HeapError,
    **arguments: Any,
) -> list[Step]:
    """Do a local step, which may return further arguments of `agree`, with all ranks; see there and `on_all_ranks`."""
    steps: list[Step] = []

    def run() -> None:
        arguments.update(local() or {})

    def exchange(error: Exception | None) -> list[int]:
        steps.extend(agree(state, op, ok=error is None, **arguments))
        return [step.ok for step in steps]

    on_all_ranks(state.world, what, run, otherwise, exchange=exchange)
    return steps


def map_if_new(state: HeapState, steps: Sequence[Step]) -> None:
    """Map the peers' memory if any rank has said in a step that it has something new.  Collective."""
    if any(step.dirty for step in steps):
        state.backing.exchange()


def explain_difference(tails: Sequence[Sequence[Call]]) -> str:
    """Say in which call the ranks' histories differ first; of each rank's, the last one is what it is doing now."""
    advice = (
        "All ranks must make the same allocations and frees in the same order: look for one inside `if rank == ...`, "
        "or for sizes that differ by rank."
    )
    first = max(tail[0].number for tail in tails)
    last = max(tail[-1].number for tail in tails)
    by_number = [{call.number: call for call in tail} for tail in tails]
    befores = {calls[first].before for calls in by_number if first in calls}
    if len(befores) > 1 or any(first not in calls for calls in by_number):
        return (
            f"the ranks' heaps have diverged: their histories differ already before call {first}, and only the last "
            f"{HISTORY_LENGTH} calls are kept. Call barrier() more often to find the place. {advice}"
        )
    for number in range(first, last + 1):
        made = {calls[number][1:5]: calls[number].describe() for calls in by_number if number in calls}
        if len(made) > 1 or any(number not in calls for calls in by_number):
            texts = (made[calls[number][1:5]] if number in calls else "no such call" for calls in by_number)
            return f"the ranks' heaps have diverged at call {number}:\n{list_ranks(texts)}\n{advice}"
    raise AssertionError("explain_difference was called with equal histories")


# -- freeing ----------------------------------------------------------------------------------------------------------
def find_room(state: HeapState, nbytes: int, alignment: int, label: Label) -> int:
    """Find an offset after no free block was large enough: reclaim with all ranks what none of them needs any more.

    The free lists are equal on all ranks, so all get here in the same call.  HeapExhaustedError if there is still none.
    """
    offsets, end = state.offsets, state.floor
    if offsets.rounded(nbytes) <= offsets.nbytes:
        for collect in (False, True):  # collecting garbage takes long, so only when the rest was not enough
            if collect:
                gc.collect()  # tensors in reference cycles
            wait = bool(state.blocks.waiting())
            asked: dict[str, Any] = {"nbytes": nbytes, "alignment": alignment, "label": label}
            floors, gave_back, error = _reclaim(state, Op.ALLOCATE, wait=wait, **asked)
            _settle(state, gave_back, error)
            with contextlib.suppress(HeapExhaustedError):
                return offsets.allocate(nbytes, alignment)
            if regions.raise_limit(state, nbytes, alignment, floors):  # only now: groups never get that memory back
                return offsets.allocate(nbytes, alignment)
            end = regions.end_of_all(state, floors)
    requested = offsets.rounded(nbytes)
    free, largest = offsets.free_below(end)
    waiting = sum(offsets.size_of(state.blocks.live[number].offset) for number in state.blocks.votes)
    by_call: Counter[str] = Counter()
    for each in state.blocks.live.values():
        by_call[format_label(each.label[:1])] += each.nbytes
    listed = ", ".join(f"{name} ({held} bytes)" for name, held in by_call.most_common(3))
    most = f" Most is held by {listed}." if listed else ""
    most += f" {waiting} bytes have been dropped by some ranks but not by all." if waiting else ""
    if taken := offsets.nbytes - end:
        most += f" Groups of ranks have taken the {taken} bytes at its end."
    raise HeapExhaustedError(
        f"Heap out of memory: {format_label(label)} needs {requested} bytes (alignment {alignment}), but of the heap's "
        f"{offsets.nbytes} bytes {free} are free, {largest} of them in one piece.{most} Free tensors with free() or "
        "scope(), or open the context with a larger heap_size.",
        requested_bytes=requested, free_bytes=free, largest_free_bytes=largest,
    )  # fmt: skip


def retire(state: HeapState, record: Record) -> None:
    """Free a live block: at once in a world of one, else when all ranks agree."""
    state.order.check_not_capturing("free")
    state.order.end(record)
    state.blocks.retire(record)
    if state.watcher is not None:
        state.watcher.freed(record.storage)
    if state.world.world_size == 1:
        outcome = _recycle(state, state.blocks.pending[:1])
        del state.blocks.pending[:1]
        _settle(state, *outcome)


def reclaim_dropped(state: HeapState) -> None:
    """In a world of one, free what was dropped."""
    records = [state.blocks.discard(record) for record in state.blocks.dropped()]
    for record in records:
        state.order.end(record)
    _settle(state, *_recycle(state, records))


def agree_at_barrier(state: HeapState, stream: Stream | None, *, wait: bool) -> None:
    """Compare histories, free what no rank needs, and give idle memory back; see `SymmetricHeap.barrier_agreement`."""
    _, gave_back, error = _reclaim(state, Op.BARRIER, wait=wait, stream=stream)
    try:
        if state.backing.may_release(state.offsets.num_frees) or state.order.fences:
            gave_back |= state.backing.release_idle(state.order.unfenced(state.offsets.free_ranges))
    except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
        error, gave_back = error or e, True
    _settle(state, gave_back, error)


def wait_for_device(state: HeapState) -> None:
    """Wait until kernels of this rank no longer use the heap: no stream uses what was freed so far."""
    state.order.streams.synchronize()
    state.order.device_is_idle(state.blocks.pending)


def _reclaim(
    state: HeapState, op: Op, *, wait: bool, stream: Stream | None = None, **asked: Any
) -> tuple[list[int], bool, Exception | None]:
    """Take a step with all ranks: compare, free what no rank needs (docs/architecture.md says which), map what is new.

    Returns where the memory of groups begins on each rank, and what `_recycle` returns.
    """
    blocks, order, world = state.blocks, state.order, state.world
    dropped: list[Record] = []

    def finish() -> dict[str, int]:
        if wait:
            order.streams.synchronize(stream)
        if blocks.released or blocks.unannounced:
            dropped.extend(blocks.dropped())
        if wait and stream is None:
            order.device_is_idle([*blocks.pending, *dropped])
        else:
            dropped[:] = filter(order.is_idle, dropped)
        return {"num_dropped": len(dropped), "num_idle": sum(1 for _ in takewhile(order.is_idle, blocks.pending))}

    steps = together(state, op, NOT_FINISHED, finish, DeviceError, **asked)
    count = min(step.num_idle for step in steps)
    freed, blocks.pending[:count] = blocks.pending[:count], []
    if any(step.num_dropped for step in steps):
        everyone = world.all_gather_object([record.number for record in dropped])
        freed += blocks.announce(dropped, everyone, world.world_size)
    gave_back, error = _recycle(state, freed) if freed else (False, None)
    map_if_new(state, steps)
    return [step.floor for step in steps], gave_back, error


def _recycle(state: HeapState, records: Sequence[Record]) -> tuple[bool, Exception | None]:
    """Make blocks free that no rank refers to any more.

    Returns whether memory of others may go, equal on all ranks, and why this rank could not let go of it: an error is
    raised when the steps that all ranks take together are done (`_settle`).
    """
    imports = []
    imported = any(record.source is not None for record in records)
    error: Exception | None = None
    try:
        if imported:
            wait_for_device(state)  # for what is mapped there, and for the next owner of the source's memory
    except Exception as e:  # noqa: BLE001 - returned; the device has failed, so nothing runs there any more
        error = e
    for record in records:
        if record.source is None:
            state.order.fence(record.offset, record.offset + state.offsets.free(record.offset), record)
            continue
        state.holders[record.offset] -= 1
        if not state.holders[record.offset]:
            del state.holders[record.offset]
            imports.append((record.offset, record.offset + state.offsets.free(record.offset)))
    try:
        state.backing.decommit(imports)  # imported memory is mapped there
    except Exception as e:  # noqa: BLE001 - returned
        error = error or e
    return imported, error


def _settle(state: HeapState, gave_back: bool, error: Exception | None) -> None:
    """Where memory may have been given back, agree that all ranks could: only then it is free, and asked for again."""

    def check() -> None:
        if error is not None:
            raise error

    if gave_back:
        map_if_new(state, together(state, Op.REFRESH, "could not give memory back", check))
