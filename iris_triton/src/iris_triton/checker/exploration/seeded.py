"""The scheduler whose choices a seed makes: which program of which rank makes the next step.

Half of the seeds walk at random: at a step another program goes on with a probability of the seed.  The others use
priorities (PCT: Burckhardt, Kothari, Musuvathi and Nagarakatti, ASPLOS 2010): the program of the highest one runs, and
at a few steps, chosen beforehand, the running one goes after all others.  A program that polls in vain lets others go
on, in both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from iris_triton.checker.exploration.turns import AWAY, BEST, BOUNDED, LOWEST, MOVES, PROVEN, STATE, WAITED, mixed
from iris_triton.checker.exploration.weak_memory import Thread, WeakMemory
from iris_triton.checker.strands import LaunchStrands
from iris_triton.interpreter import scheduler
from iris_triton.interpreter.scheduler import Cancelled, Program, Scheduler

_STAGNATION_NS = 50_000_000  # passes at once where all programs wait and some look at the clock; then twice as much
_AWAY_S = 1e-3  # between polls while a rank is somewhere else

NEW = object()  # stands for a program that has not started


def between(
    begin: Callable[[Program], None], run: Callable[..., None], end: Callable[[Program], None]
) -> Callable[..., None]:
    """Return what runs a program, or a part of it, with something before and after it."""

    def explored(program: Program, *part: Any) -> None:
        begin(program)
        try:
            run(program, *part)
        finally:
            end(program)

    return explored


class Policy:
    """The meaning of a seed: a random walk or priorities, how often and where."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.has_priorities = seed % 2 == 1
        self.switched = (1, 4, 12)[mixed(seed, 1) % 3]  # of 16 steps, in how many another program goes on
        depth = mixed(seed, 2) % 4  # preemptions
        length = 8 << mixed(seed, 3) % 8  # steps among which they are
        self.changes = {1 + mixed(seed, 4, each) % length for each in range(depth)} if self.has_priorities else set()

    def priority(self, *names: int) -> int:
        """Return the priority that a program begins with."""
        return 1 + (mixed(self.seed, 5, *names) >> 2)


class SeededScheduler(Scheduler):
    """As `Scheduler`, of one launch, with `memory` between the programs and the memory of all ranks."""

    def __init__(
        self, memory: WeakMemory, threads: LaunchStrands, launch: Any, run: Callable[..., None], timeout_s: float
    ) -> None:
        super().__init__(launch, between(self.begin, run, self.end), timeout_s)
        self.memory, self.threads, self._turns = memory, threads, memory.turns
        self.policy = Policy(self._turns.seed)
        order = list(self._pids)
        for last in range(len(order) - 1, 0, -1):
            other = self._turns.draw(last + 1)
            order[last], order[other] = order[other], order[last]
        self._pids = (each for each in order)
        self._number = self._turns.step()
        self._vain: dict[Program, tuple[int, int]] = {}  # MOVES at which a program polled in vain, and how often
        self._priorities: dict[Program, int] = {}  # of those that have made a step; in Gluon these are partitions
        self._initial: dict[tuple[int, int, int], int] = {}
        self._awaited_s = 0.0

    def run(self) -> None:
        """Run all programs, after others where the seed wants that."""
        turns = self._turns
        row = turns.ranks[turns.rank]
        self._let_ranks_go_on()
        try:
            super().run()
        finally:
            turns.ensure()
            row[WAITED : BOUNDED + 1] = 0
            self.threads.close()
        self._let_ranks_go_on()

    def _let_ranks_go_on(self) -> None:
        self._turns.ensure()
        self._turns.moved()
        others = self._turns.others()
        if others and self._turns.draw(2):
            self._turns.give(others[self._turns.draw(len(others))])

    # -- programs ------------------------------------------------------------------------------------------------------
    def thread(self, program: Program) -> Thread:
        thread: Thread = self.threads.strands[program.pid].thread
        return thread

    def begin(self, program: Program) -> None:
        self._turns.ensure()
        self._turns.moved()
        self.threads.begin(program.pid)
        strand = self.threads.strands[program.pid]
        strand.thread = strand.thread or Thread(strand, self._turns.rank)
        self._initial[program.pid] = self.policy.priority(self._turns.rank, self._number, self._unstarted + 1)

    def end(self, program: Program) -> None:
        """End it: its stores are in memory then."""
        self._turns.ensure()
        self.memory.drain(self.thread(program))
        self.threads.end(program.pid)
        has_ended = program.pid not in self.threads.strands
        for each in [each for each in self._priorities if each is program or (has_ended and each.pid == program.pid)]:
            del self._priorities[each]
            self._vain.pop(each, None)
        self._turns.moved()

    def _run_rest(self) -> None:
        while self._unstarted and self.error is None:
            if self._ready() and self._turns.draw(2):
                return  # one of those goes on, and starts the rest
            self._unstarted -= 1
            self._run_one(Program(next(self._pids), self))

    def _take(self, heir: Program | None = None) -> Program | None:
        """Remove a program from the waiting ones, by default one that the seed chooses among those that are ready."""
        if heir is None and self.error is None:
            ready = self._ready()
            fresh = [each for each in ready if not self._has_polled(each)] or ready
            if fresh:
                heir = fresh[self._turns.draw(len(fresh))]
        return super()._take(heir)

    def _ready(self) -> list[Program]:
        return [each for each in self._waiting if each.ready is None or each.ready()]

    # -- steps ---------------------------------------------------------------------------------------------------------
    def point(self, program: Program, *, often: bool) -> None:
        """Let another program go on before an access of this one, perhaps; less often at weak accesses."""
        turns = self._turns
        turns.ensure()
        self.memory.let_some_out(self.threads)
        step = turns.step()
        self._priority(program)
        if self.policy.has_priorities:
            if step in self.policy.changes:
                self._lower(program)
            if often or step in self.policy.changes:
                self._go_on(program, self._candidates())
        elif turns.draw(16) < self.policy.switched and (often or turns.draw(4) == 0):
            self._go_on(program, self._candidates())

    def wait(self, program: Program, addresses: Any, data: Any) -> None:
        """Yield to others, because `program` has seen no change there."""
        if self.error is not None:
            raise Cancelled
        turns, thread = self._turns, self.thread(program)
        turns.ensure()
        self.memory.let_waiting_out(thread)
        if not thread.is_late and not thread.buffer:
            now = int(turns.control[MOVES])
            before, times = self._vain.get(program, (-1, 0))
            self._vain[program] = now, times + 1 if before == now else 1
        self.idle_polls += 1
        self._lower(program)
        self._say_state()
        candidates = self._candidates()
        if not candidates and self._has_polled(program):
            candidates = self._candidates(scheduler._PROVING_POLLS)
            if not candidates and self._has_polled(program, scheduler._PROVING_POLLS):
                self._all_wait(program, addresses, data)
                return
        self._go_on(program, candidates)
        if self.error is not None:
            raise Cancelled

    def _all_wait(self, program: Program, addresses: Any, data: Any) -> None:
        """No program of any rank has anything to do: time passes, or nothing ever happens."""
        turns = self._turns
        if (turns.ranks[:, STATE] == AWAY).any():  # it may do anything
            time.sleep(_AWAY_S)
            self._awaited_s += _AWAY_S
            if self._awaited_s > self._timeout_s:
                raise self._deadlock(program, addresses, data, f"for {self._timeout_s:g} s")
        elif not (self.is_bounded or turns.ranks[:, BOUNDED].any()):
            raise self._deadlock(program, addresses, data, "for words that no program of any rank changes")
        elif turns.pass_time(_STAGNATION_NS) > 1e9 * self._timeout_s:
            raise self._deadlock(program, addresses, data, f"for {self._timeout_s:g} s of the kernels' time")

    def _has_polled(self, program: Program, times: int = 1) -> bool:
        """Whether a program has polled in vain, so often, since anything has changed."""
        at, count = self._vain.get(program, (-1, 0))
        return count >= times and at == self._turns.control[MOVES]

    def _candidates(self, times: int = 1) -> list[Any]:
        """Programs here, NEW and numbers of ranks that can go on and have not polled in vain so often."""
        found: list[Any] = [each for each in self._ready() if not self._has_polled(each, times)]
        if self.can_start():
            found.append(NEW)
        return found + self._turns.others(WAITED if times == 1 else PROVEN)

    def _say_state(self) -> None:
        """Let other ranks know whether this one has anything to do, and its highest priority."""
        turns = self._turns
        row, now = turns.ranks[turns.rank], int(turns.control[MOVES]) + 1
        here = [each for each in self._priorities if each.ready is None or each.ready()]
        can_start = self.can_start()
        row[WAITED] = 0 if can_start or any(not self._has_polled(each) for each in here) else now
        row[PROVEN] = now if row[WAITED] and all(self._has_polled(p, scheduler._PROVING_POLLS) for p in here) else 0
        # of those that would go on: where another one counted, two ranks would hand the turn to each other for ever
        goes_on = [each for each in here if not self._has_polled(each)]
        if not goes_on and not can_start:
            goes_on = [p for p in here if not self._has_polled(p, scheduler._PROVING_POLLS)] or here
        heirs: list[Any] = [*goes_on, NEW] if can_start else goes_on
        row[BEST] = max(map(self._priority, heirs), default=0)
        row[BOUNDED] = self.is_bounded

    def _go_on(self, program: Program, candidates: list[Any]) -> None:
        """Let one of several go on, and come back when it is this program's turn."""
        if not candidates:
            return
        if self.policy.has_priorities:
            best = max(candidates, key=self._priority)
            if self._priority(best) <= self._priority(program):
                return
        else:
            best = candidates[self._turns.draw(len(candidates))]
        if best is NEW:
            self.start_next(program)
        elif isinstance(best, int):
            self._say_state()
            self._turns.give(best)
        else:
            self.hand_over(program, best)

    # -- priorities ----------------------------------------------------------------------------------------------------
    def _priority(self, candidate: Any) -> int:
        if isinstance(candidate, int):
            return int(self._turns.ranks[candidate, BEST]) or self.policy.priority(candidate)
        if candidate is NEW:
            return self.policy.priority(self._turns.rank, self._number, self._unstarted)
        return self._priorities.setdefault(candidate, self._initial[candidate.pid])

    def _lower(self, program: Program) -> None:
        self._turns.control[LOWEST] -= 1
        self._priorities[program] = int(self._turns.control[LOWEST])
