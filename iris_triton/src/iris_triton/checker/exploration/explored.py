"""Accesses of kernels while schedules are explored: they stand for those of the executor, which are unchanged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np

from iris_triton import _compat
from iris_triton.checker.changes import SYS
from iris_triton.checker.exploration.seeded import SeededScheduler
from iris_triton.checker.exploration.weak_memory import MAX_WORDS, LaunchThreads, Thread
from iris_triton.checker.strands import host_strand, learn_published, publish
from iris_triton.checker.watcher import NEUTRAL, SCOPES, Watcher, acquires, fence_scope, releases
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.state import current

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.world import World
    from iris_triton.checker.exploration.turns import Turns
    from iris_triton.checker.exploration.weak_memory import WeakMemory
    from iris_triton.checker.shared import Tables
    from iris_triton.interpreter.scheduler import Scheduler


class _Operations:
    """Which device function each program of a launch is in, where no `Watcher` keeps that."""

    class Said:
        operation: Any = None

    def __init__(self) -> None:
        self.strands: dict[Any, _Operations.Said] = {}

    def begin(self, pid: Any) -> None:
        self.strands.setdefault(pid, self.Said())

    def end(self, pid: Any) -> None: ...

    def close(self) -> None: ...


class Explorer:
    """Events of the executor and of exchanges of hosts, and what accesses return.

    It stands between them and a `Watcher`, if races are looked for, too.
    """

    def __init__(self, turns: Turns, memory: WeakMemory, tables: Tables, world: World, watcher: Watcher | None) -> None:
        self.turns, self.memory, self._tables, self._world = turns, memory, tables, world
        self._checker = watcher
        self._watcher = watcher if watcher is not None and watcher.follows_accesses else None
        self._host = host_strand(tables, world.rank)
        self._numbers: dict[tuple[int, ...], int] = {}
        self.gpu_of: Sequence[int] = ()
        """The GPU of each program of a launch, where they stand for ranks (litmus tests)."""

    def begin_again(self, seed: int, gpu_of: Sequence[int] = ()) -> None:
        """Go on with another seed, where no kernel runs, in a world of one rank."""
        self.turns.restart(seed)
        self.memory.choose_rates()
        self.gpu_of = gpu_of

    # -- launches and exchanges ----------------------------------------------------------------------------------------
    def views(self) -> Any:
        """As `Watcher.views`."""
        return None if self._checker is None else self._checker.views()

    def dialect(self, dialect: Any) -> Any:
        """As `Watcher.dialect`."""
        return dialect if self._checker is None else self._checker.dialect(dialect)

    def launch(self, state: Any, arguments: dict[str, Any]) -> Any:
        """Called before a launch."""
        return _Operations() if self._watcher is None else self._watcher.launch(state, arguments)

    def scheduler(self, launch: Any, run: Callable[..., None], timeout_s: float) -> Scheduler:
        """Return the scheduler of a launch."""
        self.turns.ensure()
        if self._world.world_size == 1:
            self.memory.forget()
        threads = LaunchThreads(self._tables, self._world.rank, self._host, launch.grid, gpu_of=self.gpu_of)
        return SeededScheduler(self.memory, threads, launch, run, timeout_s)

    def before_exchange(self, world: World) -> Any:
        """Called before ranks exchange anything."""
        begun = None if self._watcher is None else self._watcher.before_exchange(world)
        if not world.shares_connections(self._world):
            return None
        number = self._numbers[world.ranks] = self._numbers.get(world.ranks, 0) + 1
        self.turns.ensure()
        publish(self._tables, self._host, self._world.rank, number)
        if self.turns.begin_exchange(world.ranks, number) and world.world_size == self._world.world_size:
            self.memory.forget()
        return begun, world.ranks, number

    def after_exchange(self, begun: Any) -> None:
        """Called with what `before_exchange` has returned, when all ranks have come."""
        if begun is None:
            return
        watched, ranks, number = begun
        self.turns.end_exchange()
        learn_published(self._tables, self._host, ranks, number)
        if self._watcher is not None:
            self._watcher.after_exchange(watched)

    # -- accesses ------------------------------------------------------------------------------------------------------
    def _thread(self, *, often: bool) -> Thread:
        program = current.program
        scheduler = cast("SeededScheduler", program.scheduler)
        scheduler.point(program, often=often)
        return scheduler.thread(program)

    def load(
        self, addresses: Any, mask: Any, fill: Any, dtype: np.dtype[Any], access: str = "load", poll: bool = False
    ) -> Any:
        """As `accesses.load`."""
        thread = self._thread(often=poll)
        shape, watcher = addresses.shape, self._watcher
        addresses = accesses.untag(addresses, mask, dtype.itemsize, access)
        mask, _, indices, region = accesses._locate(addresses, mask, dtype, access)
        if watcher is not None and not poll:
            watcher.load(access, region, indices, addresses, mask, dtype.itemsize)
        if watcher is not None and fill is None:
            fill = watcher.undefined(dtype)
        data = np.zeros(shape, dtype) if fill is None else np.broadcast_to(fill, shape).astype(dtype)
        active = np.ones(shape, np.bool_) if mask is None else np.ascontiguousarray(mask)
        data = _compat.native.load(addresses, active, data, dtype)
        lanes = np.flatnonzero(active)
        if lanes.size:
            flat, seen = addresses.reshape(-1)[lanes], data.reshape(-1)[lanes]
            if poll and lanes.size <= MAX_WORDS:
                self._load_words(thread, flat, seen, SYS, acquires=False)
            else:
                self.memory.load(thread, flat, seen)
            data.reshape(-1)[lanes] = seen
        if watcher is not None and poll:
            watcher.poll(addresses, mask, data)
        (current.program.observe if poll else current.program.loaded)(addresses, data)
        return data

    def _load_words(self, thread: Thread, addresses: Any, seen: Any, scope: int, *, acquires: bool) -> None:
        is_late = False
        for lane in range(seen.size):
            at = slice(lane, lane + 1)
            self.memory.load_word(thread, addresses[at], seen[at], scope, acquires=acquires)
            is_late |= thread.is_late
        thread.is_late = is_late

    def store(self, addresses: Any, mask: Any, data: Any) -> None:
        """As `accesses.store`."""
        thread = self._thread(often=False)
        data = np.broadcast_to(data, addresses.shape)
        addresses = accesses.untag(addresses, mask, data.itemsize, "store")
        if self._checker is not None:
            self._checker.using(data, mask, "store")
        data = accesses.plain(data)
        mask, _, indices, region = accesses._locate(addresses, mask, data.dtype, "store")
        watcher = self._watcher
        stored = None if watcher is None else watcher.store(region, indices, addresses, mask, data.itemsize)
        lanes = slice(None) if mask is None else np.flatnonzero(mask)
        flat = addresses.reshape(-1)[lanes]
        if flat.size:
            self.memory.store(thread, flat, np.ascontiguousarray(data.reshape(-1)[lanes]))
            if stored is not None:  # the checker looks at what these words hold now
                self.memory.drain(thread)
        if stored is not None:
            stored()
        current.program.progress()

    def rmw(self, op: Any, addresses: Any, values: Any, mask: Any, sem: Any, element: Any, scope: Any = None) -> Any:
        """As `accesses.rmw`.  Those that change nothing are loads, and those of `set_flag` are stores."""
        thread = self._thread(often=True)
        values, mask = (accesses._spread(each, addresses.shape) for each in (values, mask))
        name = f"atomic_{op.name.lower()}"
        addresses = accesses.untag(addresses, mask, values.itemsize, name)
        if self._checker is not None:
            self._checker.using(values, mask, name)
        accesses.check(addresses, mask, values.itemsize, name)
        watcher, reach = self._watcher, SCOPES.get(getattr(scope, "name", "SYSTEM"), SYS)
        lanes = np.flatnonzero(mask)
        flat = addresses.reshape(-1)
        is_load = op.name in NEUTRAL and not values.any() and lanes.size <= MAX_WORDS
        said = Watcher.strand()
        is_set = op.name == "XCHG" and said is not None and said.operation == ("set",)

        def run() -> Any:
            if is_load and not releases(sem):
                old = accesses.native_rmw(op, addresses, values, element, mask)
                seen = old.reshape(-1)[lanes]
                self._load_words(thread, flat[lanes], seen, reach, acquires=acquires(sem))
                old.reshape(-1)[lanes] = seen
                return old
            if is_set and lanes.size and watcher is None:
                given = values.reshape(-1)[lanes]
                self.memory.store(thread, flat[lanes], given, scope=reach, releases=releases(sem))
                return np.zeros_like(values)
            return self.memory.atomic(
                thread, addresses, lanes, values.itemsize,
                lambda: accesses.native_rmw(op, addresses, values, element, mask, sem), reach,
                acquires=acquires(sem), releases=releases(sem), changed=lambda _: mask.reshape(-1), reads=not is_set,
            )  # fmt: skip

        old = run() if watcher is None else watcher.rmw(run, op, addresses, values, mask, sem, scope)
        if is_set:
            current.program.progress()
        elif lanes.size:
            current.program.observe(addresses, old)
        return old

    def cas(self, addresses: Any, expected: Any, desired: Any, sem: Any, scope: Any = None) -> Any:
        """As `accesses.cas`."""
        thread = self._thread(often=True)
        kept = expected.dtype
        bits = np.dtype(f"i{kept.itemsize}")
        expected, desired = (accesses._spread(each, addresses.shape).view(bits) for each in (expected, desired))
        addresses = accesses.untag(addresses, None, kept.itemsize, "atomic_cas")
        accesses.check(addresses, None, kept.itemsize, "atomic_cas")

        def run() -> Any:
            return self.memory.atomic(
                thread, addresses, np.arange(addresses.size), kept.itemsize,
                lambda: _compat.native.atomic_cas(addresses, expected, desired, _compat.NATIVE_SEMS[sem]),
                SCOPES.get(getattr(scope, "name", "SYSTEM"), SYS), acquires=acquires(sem), releases=releases(sem),
                changed=lambda found: (found.view(bits) == expected).reshape(-1),
            )  # fmt: skip

        watcher = self._watcher
        found = run() if watcher is None else watcher.cas(run, addresses, expected, desired, sem, scope)
        old = found.view(kept)
        current.program.observe(addresses, old)
        return old

    def fence(self, assembly: str) -> None:
        """Called at a fence."""
        thread = self._thread(often=True)
        scope = fence_scope(assembly)
        if scope is not None:
            self.memory.fence(thread, scope, assembly.split(".")[1])
        if self._watcher is not None:
            self._watcher.fence(assembly)
