"""Orders of synchronisation, one for each run: at each atomic and poll it is said which program goes on.

    order:1.0.2      at the first three decisions the second, the first and the third program that can go on go on; then
                     always the first one
    order:1~T:K+,K   ... but no thread T that is asleep; one that touches word K wakes it, if either changes it ("+")

A decision is made when the programs of all ranks are at one.  In between a program runs alone, and memory is that of
the executor: what plain accesses could see otherwise is for "races" to say.  A wait can go on when its flags hold.  Two
looks in a row may see the same; then a program that polls by hand goes on when the word has changed.

The journal, which all ranks share, says who could go on, who did, and what words it has read and changed: what
`iris_core.cli.all_orders` chooses the next order by (Flanagan and Godefroid, POPL 2005; Abdulla, Aronis, Jonsson and
Sagonas, POPL 2014).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from iris_core.errors import IrisError
from iris_core.world import World
from iris_triton import _compat
from iris_triton.checker.changes import HOLDS
from iris_triton.checker.exploration.explored import Explorer
from iris_triton.checker.exploration.seeded import between
from iris_triton.checker.exploration.turns import BOUNDED, MOVES, RUNNING, STATE, WAITED, Turns, mixed
from iris_triton.checker.places import Heaps
from iris_triton.checker.replacements import Accesses
from iris_triton.checker.shared import Tables
from iris_triton.checker.watcher import NEUTRAL, Watcher
from iris_triton.interpreter import scheduler
from iris_triton.interpreter.scheduler import Cancelled, Program, Scheduler
from iris_triton.interpreter.state import ProgramInfo, current

NAME = "order:"
CAN, CHOSEN, ACCESS, NEEDS, KNOWS, ASLEEP = range(6)
"""Rows of the journal: (CAN, thread) for each that can go on, (CHOSEN, thread, its index); of that thread (ACCESS,
thread, word, whether it changes it, value before) and (NEEDS, thread, word, comparison, value); (KNOWS, thread, another
one whose past it knows); (ASLEEP,) where only threads that are asleep can go on."""

ROWS, POSITION = 10, 11  # words of the control row, beside those of `turns`
MAX_ROWS, MAX_PROGRAMS = 1 << 18, 256
_CMPS = tuple(HOLDS)


class OrderedScheduler(Scheduler):
    """The executor's scheduler, whose programs go on when `Orders` lets them."""

    def __init__(self, orders: Orders, launch: Any, run: Callable[..., None], timeout_s: float) -> None:
        super().__init__(launch, between(lambda each: orders.begin(each, launch.grid), run, orders.end), timeout_s)
        self._orders = orders

    def wait(self, program: Program, addresses: Any, data: Any) -> None:
        """Decide who goes on where `program` saw no change; polls were let on, loops of plain loads need a change."""
        if program.idle_loads > scheduler._IDLE_LOADS:
            everywhere = np.ones(addresses.shape, np.bool_)
            look = lambda: _compat.native.load(addresses, everywhere, np.zeros_like(data), data.dtype)
            self._orders.decide(program, addresses, look, lambda values: bool((values != data).any()))

    def ready_partition(self) -> Program | None:
        """Return a waiting part of a program whose condition holds, which is no decision."""
        return next((each for each in self._waiting if each.ready is not None and each.ready()), None)


class Orders(Explorer):
    """Runs kernels in one order, by its name.  Collective: every rank makes one, with arrays "journal" and "able"."""

    def __init__(
        self, order: str, turns: Turns, tables: Tables, heaps: Heaps, world: World, watcher: Any, arrays: dict[str, Any]
    ) -> None:
        super().__init__(turns, None, tables, world, watcher)
        self._heaps, self._journal, self._able = heaps, arrays["journal"], arrays["able"]
        self._start(order)

    def _start(self, order: str) -> None:
        choices, _, asleep = order.removeprefix(NAME).partition("~")
        self._prefix = [int(each) for each in choices.split(".") if each]
        self._asleep: dict[int, dict[int, bool]] = {}
        for thread, _, words in (each.partition(":") for each in asleep.split(";") if each):
            pairs = [(int(word.rstrip("+")), word.endswith("+")) for word in words.split(",") if word]
            self._asleep[int(thread)] = dict(pairs)
        self._read_rows = self._decided = self._launches = 0
        self._pending: dict[Program, Callable[[], int]] = {}
        self._names: dict[Program, int] = {}
        self._vain: dict[Program, int] = {}

    # -- the journal ---------------------------------------------------------------------------------------------------
    def _add(self, *row: int) -> None:
        at = int(self.turns.control[ROWS])
        if at >= MAX_ROWS:
            raise IrisError(f"the program synchronises more than {MAX_ROWS} times: all orders are for smaller ones")
        self._journal[at] = 0
        self._journal[at, : len(row)] = row
        self.turns.control[ROWS] = at + 1

    def rows(self) -> Any:
        return self._journal[: int(self.turns.control[ROWS])].tolist()

    def as_json(self) -> str:
        """Return the journal as one line of JSON."""
        return json.dumps({"kind": "order", "ranks": self._world.world_size, "rows": self.rows()})

    def _host_name(self) -> int:
        return (self.turns.rank + 1) << 44

    def begin(self, program: Program, grid: tuple[int, int, int]) -> None:
        self.turns.ensure()
        name = self._host_name() + (self._launches << 24) + (ProgramInfo(program.pid, grid).linear_id << 4)
        while name in self._names.values():
            name += 1
        self._names[program] = name
        self.turns.moved()
        self._add(KNOWS, name, self._host_name())

    def end(self, program: Program) -> None:
        self.turns.ensure()
        self.turns.moved()
        self._vain.pop(program, None)
        self._add(KNOWS, self._host_name(), self._names[program])

    # -- launches and exchanges ----------------------------------------------------------------------------------------
    def _scheduler(self, launch: Any, run: Callable[..., None], timeout_s: float) -> Scheduler:
        self._launches += 1
        self._names.clear()
        self._pending.clear()
        return OrderedScheduler(self, launch, run, timeout_s)

    def before_exchange(self, world: World) -> Any:
        if world.shares_connections(self._world):
            self.turns.ensure()
            self._add(KNOWS, self._exchange(world.ranks, 1), self._host_name())
        return super().before_exchange(world)

    def after_exchange(self, begun: Any) -> None:
        super().after_exchange(begun)
        if begun is not None:
            self._add(KNOWS, self._host_name(), self._exchange(begun[1][0], 0))

    def _exchange(self, ranks: tuple[int, ...], ahead: int) -> int:
        return -1 - (mixed(*ranks, self._host.turns.get(ranks, 0) + ahead) >> 2)

    # -- decisions -----------------------------------------------------------------------------------------------------
    def decide(
        self, program: Program, addresses: Any, look: Callable[[], Any], can: Callable[[Any], int | bool]
    ) -> None:
        """Return when it is this program's turn.

        `look` returns what the next operation of the program would see, and `can` says of it whether the operation can
        go on: 1; 0: not; -1: only where nothing else can.
        """
        turns: Turns = self.turns
        own: OrderedScheduler = program.scheduler  # type: ignore[assignment]
        self._pending[program] = lambda: int(can(look()))
        try:
            while True:
                turns.ensure()
                if own.error is not None:
                    raise Cancelled
                if own.can_start():
                    own.start_next(program)
                    continue
                heir = own.ready_partition()
                if heir is not None:
                    own.hand_over(program, heir)
                    continue
                self._say(own)
                unsettled = turns.others(WAITED)
                if unsettled:
                    turns.give(unsettled[0])
                    continue
                able = self._all_able()
                if not able:
                    if self._time_passes(program, addresses, look):
                        return
                    continue
                index = self._index(able)
                if able[index] == self._names[program]:
                    for each in able:
                        self._add(CAN, each)
                    self._add(CHOSEN, able[index], index)
                    turns.control[POSITION] += 1
                    turns.step()
                    return
                rank = (able[index] >> 44) - 1
                if rank != turns.rank:
                    turns.give(rank)
                else:
                    own.hand_over(program, next(p for p, name in self._names.items() if name == able[index]))
        finally:
            self._pending.pop(program, None)

    def _say(self, own: OrderedScheduler) -> None:
        turns = self.turns
        states = [(self._names[each], can()) for each, can in self._pending.items() if each.scheduler is own]
        if len(states) > MAX_PROGRAMS:
            raise IrisError(f"all orders are for launches of at most {MAX_PROGRAMS} programs, not {len(states)}")
        found = sorted(name * state for name, state in states if state)
        self._able[turns.rank, : len(found) + 1] = len(found), *found
        turns.ranks[turns.rank, WAITED] = turns.control[MOVES] + 1
        turns.ranks[turns.rank, BOUNDED] = own.is_bounded

    def _all_able(self) -> list[int]:
        running = self._able[self.turns.ranks[:, STATE] == RUNNING].tolist()
        found = [each for count, *row in running for each in row[:count]]
        return sorted([each for each in found if each > 0] or [-each for each in found])

    def _index(self, able: list[int]) -> int:
        at = int(self.turns.control[POSITION])
        if at < len(self._prefix):
            if self._prefix[at] >= len(able):
                raise IrisError(f"this is no order of this program: at decision {at} only {len(able)} can go on")
            return self._prefix[at]
        self._wake()
        awake = [index for index, each in enumerate(able) if each not in self._asleep]
        if not awake:
            self._add(ASLEEP)
        return awake[0] if awake else 0

    def _wake(self) -> None:
        """Wake those whose next operation depends on what was done since the end of the prefix."""
        end = int(self.turns.control[ROWS])
        for kind, thread, word, changes, _ in self._journal[self._read_rows : end].tolist():
            self._decided += kind == CHOSEN
            if kind == ASLEEP:
                self._asleep.clear()
            if kind == CHOSEN and self._decided >= len(self._prefix):
                self._asleep.pop(thread, None)
            elif kind == ACCESS and self._decided >= len(self._prefix):
                for each, words in list(self._asleep.items()):
                    if word in words and (changes or words[word]):
                        del self._asleep[each]
        self._read_rows = end

    def _time_passes(self, program: Program, addresses: Any, look: Callable[[], Any]) -> bool:
        """Nothing can go on: returns whether this program does, for it looks at a clock; else nothing ever happens."""
        turns, own = self.turns, program.scheduler
        bounded = np.flatnonzero(turns.ranks[:, BOUNDED]).tolist()
        if bounded and not own.is_bounded:
            turns.give(bounded[0])
            return False
        if not bounded or turns.pass_time(50_000_000) > 1e9 * own._timeout_s:
            raise own._deadlock(program, addresses, look(), "for words that no program of any rank changes")
        return True

    # -- accesses ------------------------------------------------------------------------------------------------------
    def _begin(self, *, often: bool) -> Any: ...

    def fence(self, assembly: str) -> None:
        Accesses.fence(self, assembly)

    def _note(self, addresses: Any, changed: Any, old: Any) -> None:
        """Note the words of the operation of this program, and whether each was changed."""
        name, flat = self._names[current.program], addresses.reshape(-1)
        keys, before = self._heaps.keys(flat, self.turns.rank), old.reshape(-1).view(f"i{old.itemsize}")
        for key, is_changed, value in zip(keys.tolist(), changed.reshape(-1).tolist(), before.tolist(), strict=True):
            self._add(ACCESS, name, key, int(is_changed), value)
        if changed.any():
            self.turns.moved()

    def _look(self, addresses: Any, look: Callable[[], Any], alters: Callable[[Any], bool] = lambda _: False) -> None:
        """Decide before an operation that goes on where it sees what it waits for, or something new, or `alters`."""
        program, strand = current.program, Watcher.strand()
        operation: Any = None if strand is None else strand.operation
        is_wait = operation is not None and operation[0] in ("wait", "any")
        place = scheduler._words(addresses)

        def is_same(values: Any) -> bool:
            return bool(program.seen.get(place) == values.tobytes())

        def can(values: Any) -> int:
            if alters(values):
                return 1
            if is_wait:
                holds = HOLDS[operation[1]](values.reshape(-1), operation[2])
                return int(holds.any() if operation[0] == "any" else holds.all())
            times = self._vain.get(program, 0) if is_same(values) else 0
            return 1 if times < 1 else -1 if times < scheduler._PROVING_POLLS else 0

        self.decide(program, addresses, look, can)
        values = look()
        self._vain[program] = self._vain.get(program, 0) + 1 if is_same(values) else 0
        if is_wait and (operation[0] == "wait" or values.size == 1):
            expected = np.broadcast_to(operation[2], values.size).tolist()
            for key, value in zip(self._heaps.keys(addresses, self.turns.rank).tolist(), expected, strict=True):
                self._add(NEEDS, self._names[program], key, _CMPS.index(operation[1]), int(value))

    def _read(self, thread: Any, addresses: Any, mask: Any, data: Any, view: Any, indices: Any, poll: bool) -> Any:
        look = functools.partial(Accesses._read, self, thread, addresses, mask, data, view, indices, poll)
        if poll:
            self._look(addresses, look)
            self._note(addresses, np.zeros(addresses.shape, np.bool_), np.zeros(addresses.shape, np.int64))
        return look()

    def _write(self, thread: Any, addresses: Any, mask: Any, data: Any, view: Any, indices: Any, at_once: bool) -> None:
        Accesses._write(self, thread, addresses, mask, data, view, indices, at_once)
        self.turns.moved()

    def _change(
        self, thread: Any, op: Any, addresses: Any, values: Any, mask: Any, sem: Any, element: Any, scope: Any,
        is_set: bool
    ) -> Callable[[], Any]:  # fmt: skip
        run = Accesses._change(self, thread, op, addresses, values, mask, sem, element, scope, is_set)
        is_load = op.name in NEUTRAL and not values.any()
        if is_load:
            self._look(addresses, run)
        else:
            self.decide(current.program, addresses, lambda: values, lambda _: True)

        def noted() -> Any:
            old = run()
            if mask.any():
                self._note(addresses[mask], np.full(int(mask.sum()), not is_load), old[mask])
            return old

        return noted

    def _swap(
        self, thread: Any, addresses: Any, expected: Any, desired: Any, sem: Any, scope: Any
    ) -> Callable[[], Any]:
        run = Accesses._swap(self, thread, addresses, expected, desired, sem, scope)
        differ, everywhere = expected != desired, np.ones(addresses.shape, np.bool_)
        look = lambda: _compat.native.load(addresses, everywhere, np.zeros_like(expected), expected.dtype)
        self._look(addresses, look, lambda values: bool(((values == expected) & differ).any()))

        def noted() -> Any:
            old = run()
            self._note(addresses, (old.view(expected.dtype) == expected) & differ, old)
            return old

        return noted
