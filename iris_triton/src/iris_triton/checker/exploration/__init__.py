"""Schedules and weak memory under a seed: a CPU rank shows what a GPU may do, and the same seed shows it again.

    IRIS_CHECK=schedules IRIS_CHECK_SEED=17 python program.py     # or: iris check --replay 17 program.py

    turns        ranks take turns, the seed's decisions
    weak_memory  buffers of stores, older values of loads, what is handed over
    seeded       the scheduler of a launch: a random walk, or priorities (PCT)
    explored     the executor's accesses, with these between

While it is on, the executor's scheduler and clock are replaced, and its accesses are those of `explored`.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from iris_triton.checker.exploration.explored import Explorer
from iris_triton.checker.exploration.turns import Turns
from iris_triton.checker.exploration.weak_memory import ARENA_NBYTES, ENTRIES, WeakMemory, columns
from iris_triton.checker.places import Heaps
from iris_triton.checker.replacements import replaced
from iris_triton.checker.shared import Tables, share
from iris_triton.interpreter import entries, launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iris_core.heap.heap import SymmetricHeap
    from iris_core.world import World

_PLACES = 4  # GPUs that a litmus test in one process can have


@contextlib.contextmanager
def exploring(seed: int, heap: SymmetricHeap, world: World, watcher: Any = None) -> Iterator[Explorer]:
    """Run kernels in the order, and with the memory, that a seed wants, within a `with` block.

    Collective.  `watcher`, if there is one, learns of accesses as without this.
    """
    places = max(world.world_size, _PLACES)
    fd, arrays = share(world, "iris-turns", (
        ("control", np.int64, (16,)),
        ("ranks", np.int64, (world.world_size, 8)),
        ("fences", np.int64, (1 + places,)),
        ("log", np.int64, (ENTRIES, columns(places))),
        ("arena", np.uint8, (ARENA_NBYTES,)),
    ))  # fmt: skip
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        tables = Tables(world, heap.nbytes)
        undo.callback(tables.close)
        turns = Turns(world, arrays["control"], arrays["ranks"], tables, seed, heap.check_peers)
        undo.callback(turns.leave)
        memory = WeakMemory(turns, tables, Heaps(heap.heap_bases, heap.nbytes), arrays)
        explorer = Explorer(turns, memory, tables, world, watcher)
        with replaced([(launch, "Scheduler", explorer.scheduler), (entries, "clock", turns.clock)]):
            yield explorer
