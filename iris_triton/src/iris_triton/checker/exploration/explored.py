"""Accesses of kernels while schedules are explored: between programs and memory there is `WeakMemory`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from iris_core.world import World
from iris_triton import _compat
from iris_triton.checker.changes import MAX_WORDS, SYS
from iris_triton.checker.exploration.seeded import SeededScheduler
from iris_triton.checker.exploration.turns import Turns
from iris_triton.checker.exploration.weak_memory import Thread, WeakMemory
from iris_triton.checker.replacements import Accesses
from iris_triton.checker.shared import Tables
from iris_triton.checker.strands import Host, LaunchStrands
from iris_triton.checker.watcher import NEUTRAL, Watcher, acquires, fence_scope, reach_of, releases
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.scheduler import Scheduler
from iris_triton.interpreter.state import current


class Explorer(Accesses):
    """Accesses of the executor and exchanges of hosts; between them and a `Watcher`, if races are looked for, too."""

    def __init__(self, turns: Turns, memory: Any, tables: Tables, world: World, watcher: Watcher | None) -> None:
        super().__init__(watcher)
        self.turns, self._tables, self._world = turns, tables, world
        self.memory: WeakMemory = memory  # None in `orders`
        self._host = Host(tables, world)

    def scheduler(self, launch: Any, run: Callable[..., None], timeout_s: float) -> Scheduler:
        self.turns.ensure()
        if launch.watch is None:  # no `Watcher` keeps which device function each program is in
            launch.watch = SimpleNamespace(strands=defaultdict(lambda: SimpleNamespace(operation=None)))
        return self._scheduler(launch, run, timeout_s)

    def _scheduler(self, launch: Any, run: Callable[..., None], timeout_s: float) -> Scheduler:
        if self._world.world_size == 1:
            self.memory.forget()
        threads = LaunchStrands(self._tables, self._world.rank, self._host, launch.grid)
        return SeededScheduler(self.memory, threads, launch, run, timeout_s)

    def before_exchange(self, world: World) -> Any:
        watched = None if self._watcher is None else self._watcher.before_exchange(world)
        if world.shares_connections(self._world):
            self.turns.ensure()
        begun = self._host.before_exchange(world)
        if begun is None:
            return None
        is_last = self.turns.begin_exchange(*begun)
        if is_last and self.memory is not None and world.world_size == self._world.world_size:
            self.memory.forget()
        return watched, begun

    def after_exchange(self, begun: Any) -> None:
        if begun is None:
            return
        watched, own = begun
        self.turns.ensure()
        self._host.after_exchange(own)
        if self._watcher is not None:
            self._watcher.after_exchange(watched)

    def _begin(self, *, often: bool) -> Thread:
        program = current.program
        scheduler = cast("SeededScheduler", program.scheduler)
        scheduler.point(program, often=often)
        return scheduler.thread(program)

    def _read(self, thread: Thread, addresses: Any, mask: Any, data: Any, view: Any, indices: Any, poll: bool) -> Any:
        active = np.ones(addresses.shape, np.bool_) if mask is None else np.ascontiguousarray(mask)
        data = _compat.native.load(addresses, active, data, data.dtype)
        lanes = np.flatnonzero(active)
        if lanes.size:
            flat, seen = addresses.reshape(-1)[lanes], data.reshape(-1)[lanes]
            if poll and lanes.size <= MAX_WORDS:
                self._load_words(thread, flat, seen, SYS, acquires=False)
            else:
                self.memory.load(thread, flat, seen)
            data.reshape(-1)[lanes] = seen
        return data

    def _load_words(self, thread: Thread, addresses: Any, seen: Any, scope: int, *, acquires: bool) -> None:
        is_late = False
        for lane in range(seen.size):
            at = slice(lane, lane + 1)
            self.memory.load_word(thread, addresses[at], seen[at], scope, acquires=acquires)
            is_late |= thread.is_late
        thread.is_late = is_late

    def _write(
        self, thread: Thread, addresses: Any, mask: Any, data: Any, view: Any, indices: Any, at_once: bool
    ) -> None:
        lanes = slice(None) if mask is None else np.flatnonzero(mask)
        flat = addresses.reshape(-1)[lanes]
        if flat.size:
            self.memory.store(thread, flat, np.ascontiguousarray(data.reshape(-1)[lanes]))
            if at_once:
                self.memory.drain(thread)

    def _change(
        self, thread: Thread, op: Any, addresses: Any, values: Any, mask: Any, sem: Any, element: Any, scope: Any,
        is_set: bool
    ) -> Callable[[], Any]:  # fmt: skip
        """Those that change nothing are loads, and those of `set_flag` are stores."""
        reach, flat, lanes = reach_of(scope), addresses.reshape(-1), np.flatnonzero(mask)
        is_load = op.name in NEUTRAL and not values.any() and lanes.size <= MAX_WORDS

        def run() -> Any:
            if is_load and not releases(sem):
                old = accesses.native_rmw(op, addresses, values, element, mask)
                seen = old.reshape(-1)[lanes]
                self._load_words(thread, flat[lanes], seen, reach, acquires=acquires(sem))
                old.reshape(-1)[lanes] = seen
                return old
            if is_set and lanes.size and self._watcher is None:
                given = values.reshape(-1)[lanes]
                self.memory.store(thread, flat[lanes], given, scope=reach, releases=releases(sem))
                return np.zeros_like(values)
            return self.memory.atomic(
                thread, addresses, lanes, values.itemsize,
                lambda: accesses.native_rmw(op, addresses, values, element, mask, sem), reach,
                acquires=acquires(sem), releases=releases(sem), changed=lambda _: mask.reshape(-1), reads=not is_set,
            )  # fmt: skip

        return run

    def _swap(
        self, thread: Thread, addresses: Any, expected: Any, desired: Any, sem: Any, scope: Any
    ) -> Callable[[], Any]:
        def run() -> Any:
            return self.memory.atomic(
                thread, addresses, np.arange(addresses.size), expected.itemsize,
                lambda: _compat.native.atomic_cas(addresses, expected, desired, _compat.NATIVE_SEMS[sem]),
                reach_of(scope), acquires=acquires(sem), releases=releases(sem),
                changed=lambda found: (found.view(expected.dtype) == expected).reshape(-1),
            )  # fmt: skip

        return run

    def fence(self, assembly: str) -> None:
        thread = self._begin(often=True)
        scope = fence_scope(assembly)
        if scope is not None:
            self.memory.fence(thread, scope, assembly.split(".")[1])
        super().fence(assembly)
