"""The checker of kernels on CPU ranks: races between programs and ranks, uninitialised reads, freed memory.

    IRIS_CHECK=races,uninitialised,bounds python program.py     # or: iris check program.py

It orders accesses by what releases and acquires really hand over (happens-before), not by the order in which they
happened to come: a run finds mistakes that it was lucky not to suffer from.  docs/checking.md says what a run proves.

The order in which programs run comes from a scheduler alone, the executor's or that of `exploration`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from iris_core.heap.heap import SymmetricHeap
from iris_core.world import World
from iris_triton.checker.reports import (
    BeyondTensorError,
    CheckError,
    DataRaceError,
    FreedMemoryError,
    Report,
    UninitialisedReadError,
    benign_race,
)

__all__ = [
    "BeyondTensorError", "CheckError", "DataRaceError", "FreedMemoryError", "Report", "UninitialisedReadError",
    "benign_race", "start",
]  # fmt: skip


def start(
    checks: Sequence[str], path: str | None, timeline: bool, heap: SymmetricHeap, world: World, seed: int | str = 0
) -> Callable[[], None]:
    """Check kernels that run on this rank's CPU; returns what ends it.

    Collective: every rank of the context calls it; see `iris_core.protocols.SupportsChecking`.  One context of a
    process is watched at a time; another one that is opened meanwhile is not, and a warning says so.
    """
    if not checks:
        return lambda: None

    from iris_core.logs import rank_logger
    from iris_core.world import group
    from iris_triton.checker import exploration, replacements, torch_operations
    from iris_triton.checker.watcher import Watcher
    from iris_triton.interpreter.memory import accesses

    if group.watcher is not None:
        rank_logger(world.rank, world.world_size).warning(
            "the checker watches one context at a time: this one is not watched, for another one is open"
        )
        return lambda: None
    watcher: Any = None
    explores = "schedules" in checks
    with contextlib.ExitStack() as undo:
        if {*checks} - {"schedules"}:
            watcher = Watcher(checks, heap, world, path, timeline, seed if explores else None)
            undo.callback(watcher.close)
        observer = undo.enter_context(exploration.exploring(seed, heap, world, watcher, path)) if explores else watcher
        watched = observer if explores else replacements.Accesses(watcher)
        undo.enter_context(replacements.replaced(watched.replacements()))
        undo.enter_context(replacements.as_operations())
        follows = watcher is not None and watcher.follows_accesses
        if explores or follows:
            undo.enter_context(torch_operations.watched(watcher if follows else None, observer, world))
        if watcher is not None:
            heap.watch(watcher)
            undo.callback(heap.watch, None)
        undo.enter_context(replacements.replaced([(accesses, "watcher", watcher), (group, "watcher", observer)]))
        return undo.pop_all().close
