"""Schedules and weak memory under a seed: a CPU rank shows what a GPU may do, and the same seed shows it again.

    IRIS_CHECK=schedules IRIS_CHECK_SEED=17 python program.py     # or: iris check --replay 17 program.py

While it is on, the executor's scheduler and clock are replaced, and its accesses are those of `explored`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from iris_core.heap.heap import SymmetricHeap
from iris_core.world import World
from iris_triton.checker.exploration import orders
from iris_triton.checker.exploration.explored import Explorer
from iris_triton.checker.exploration.turns import Turns
from iris_triton.checker.exploration.weak_memory import ARENA_NBYTES, ENTRIES, WeakMemory, columns
from iris_triton.checker.places import Heaps
from iris_triton.checker.replacements import replaced
from iris_triton.checker.shared import Tables, share
from iris_triton.interpreter import entries, launch

_PLACES = 4  # GPUs that a litmus test in one process can have


@contextlib.contextmanager
def exploring(
    seed: int | str, heap: SymmetricHeap, world: World, watcher: Any = None, path: str | None = None
) -> Iterator[Explorer]:
    """Run kernels in the order, and with the memory, that a seed wants, or in an order by its name (`orders`).

    Collective.  `watcher`, if there is one, learns of accesses as without this.  The journal of an order is appended to
    the file `path`.
    """
    places, is_order = max(world.world_size, _PLACES), isinstance(seed, str)
    fd, arrays = share(world, "iris-turns", (
        ("control", np.int64, (16,)),
        ("ranks", np.int64, (world.world_size, 8)),
        *((
            ("journal", np.int64, (orders.MAX_ROWS, 5)),
            ("able", np.int64, (world.world_size, 1 + orders.MAX_PROGRAMS)),
        ) if is_order else (
            ("fences", np.int64, (1 + places,)),
            ("log", np.int64, (ENTRIES, columns(places))),
            ("arena", np.uint8, (ARENA_NBYTES,)),
        )),
    ))  # fmt: skip
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, fd)
        tables, heaps = Tables(world, heap.nbytes), Heaps(heap.heap_bases, heap.nbytes)
        undo.callback(tables.close)
        turns = Turns(
            world, arrays["control"], arrays["ranks"], tables, 0 if isinstance(seed, str) else seed, heap.check_peers
        )
        undo.callback(turns.leave)
        explorer: Explorer
        if isinstance(seed, str):
            explorer = orders.Orders(seed, turns, tables, heaps, world, watcher, arrays)
        else:
            explorer = Explorer(turns, WeakMemory(turns, tables, heaps, arrays), tables, world, watcher)
        with replaced([(launch, "Scheduler", explorer.scheduler), (entries, "clock", turns.clock)]):
            yield explorer
        if path is not None and isinstance(explorer, orders.Orders):
            with tables, open(path, "a") as file:
                file.write(explorer.as_json() + "\n")
