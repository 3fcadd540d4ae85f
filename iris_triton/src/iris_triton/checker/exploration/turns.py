"""Ranks take turns: one rank process runs at a time, and a seed says which one goes on.

Everything that a seed decides is drawn from one row of numbers that all ranks share, so the same seed makes the same
choices as long as the program does the same.  A rank hands its turn on where its kernels do something that others can
see, and where it waits in an exchange of the hosts; it is the one that arrives last that lets all of them go on.  Time,
as kernels see it, passes with the steps that they make.

A rank that waits for something else (another library's communication, a sleep) while it has the turn, and uses no
processor, loses it after a while, with a warning: what follows may differ from run to run.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from iris_core.logs import rank_logger
from iris_core.types import Segment
from iris_core.world import World
from iris_triton.checker.shared import Tables

TURN, DRAWN, STEPS, MOVES, CLOCK_NS, STAGNANT_NS, LOWEST, FIRST, NEXT, ARENA = range(10)
"""Words of the control row: whose turn it is (-1: no rank's), numbers drawn, steps of programs, changes that others may
wait for, time and how much of it has passed since the last change, priorities given, entries of the log, its bytes."""

STATE, EXCHANGE, NUMBER, WAITED, PROVEN, BEST, BOUNDED, PROCESS = range(8)
"""Words of a rank's row; WAITED and PROVEN are 1 + MOVES at which all its programs had polled in vain, once or often
enough to be sure; BEST is the highest priority of its programs."""

RUNNING, EXCHANGING, LEFT, AWAY = range(4)

NO_RANK = -1
_STEP_NS = 1000
_LOOK_S = 0.2
_STALL_S = 2.0  # of the rank that has the turn, in which it does nothing and uses no processor
_MASK = (1 << 64) - 1


def mixed(*numbers: int) -> int:
    """Return 64 bits that depend on some numbers (the finaliser of SplitMix64: Steele, Lea and Flood, OOPSLA 2014)."""
    x = 0
    for number in numbers:
        x = (x ^ (number & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        x ^= x >> 31
    return x


class Turns:
    """The rank that has the turn.  Collective: every rank makes one.

    Args:
        control, ranks: rows that all of them share, of integers of 64 bits.
        lock: a context manager that one rank can hold.
        check_peers: raises where another rank's process has ended.
    """

    def __init__(
        self, world: World, control: Any, ranks: Any, lock: Tables, seed: int, check_peers: Callable[[], None]
    ) -> None:
        self.seed, self.rank, self.control, self.ranks = seed, world.rank, control, ranks
        self._lock, self._check_peers = lock, check_peers
        self._logger = rank_logger(world.rank, world.world_size)
        self._bells: list[int] = []
        ranks[self.rank, PROCESS] = os.getpid()
        if world.world_size > 1:
            mine = Segment(0, 0, b"", os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            fds = [row[0].fd for row in world.exchange_segments([mine])]
            self._bells = [fd for fd in fds if fd is not None]

    # -- what the seed decides -----------------------------------------------------------------------------------------
    def draw(self, below: int) -> int:
        """Return a number from 0 to `below` - 1: the next one of the seed's row."""
        self.control[DRAWN] += 1
        return mixed(self.seed, int(self.control[DRAWN])) % below

    def moved(self) -> None:
        """Something has changed that others may wait for."""
        self.control[MOVES] += 1
        self.control[STAGNANT_NS] = 0

    def step(self) -> int:
        """Count a step of a program; returns its number."""
        self.control[CLOCK_NS] += _STEP_NS
        self.control[STEPS] += 1
        return int(self.control[STEPS])

    def clock(self) -> int:
        return int(self.control[CLOCK_NS])

    def pass_time(self, ns: int) -> int:
        """Let time pass in which nothing happens, at least that much; returns how much has since the last change."""
        ns = max(ns, int(self.control[STAGNANT_NS]))
        self.control[CLOCK_NS] += ns
        self.control[STAGNANT_NS] += ns
        self.control[MOVES] += 1  # who looks at the clock has something to see
        return int(self.control[STAGNANT_NS])

    # -- ranks ---------------------------------------------------------------------------------------------------------
    def others(self, column: int = WAITED) -> list[int]:
        """Other ranks that can go on and, as far as is known, have something to do; PROVEN: that may have."""
        now = int(self.control[MOVES]) + 1
        return [
            rank
            for rank, row in enumerate(self.ranks)
            if rank != self.rank and row[STATE] == RUNNING and row[column] != now
        ]

    def ensure(self) -> None:
        """Wait for this rank's turn, if it has lost it."""
        if self.control[TURN] != self.rank:
            self._wait()

    def give(self, rank: int) -> None:
        """Let another rank go on, and wait until the turn comes back."""
        self._pass(rank)
        self._wait()

    def _pass(self, rank: int) -> None:
        self.control[TURN] = rank
        if rank not in (NO_RANK, self.rank):
            os.eventfd_write(self._bells[rank], 1)

    def _pass_to_any(self) -> None:
        running = [rank for rank, row in enumerate(self.ranks) if row[STATE] == RUNNING]
        self._pass(running[self.draw(len(running))] if running else NO_RANK)

    def _wait(self) -> None:
        own, before, since = self.ranks[self.rank], None, time.monotonic()
        while True:
            with self._lock:
                if own[STATE] == AWAY:
                    own[STATE] = RUNNING
                if self.control[TURN] == NO_RANK:
                    self.control[TURN] = self.rank
                if self.control[TURN] == self.rank:
                    own[STATE] = RUNNING
                    return
            if self._bells and select.select([self._bells[self.rank]], [], [], _LOOK_S)[0]:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bells[self.rank])
                continue
            self._check_peers()
            now = self._progress()
            if now != before:
                before, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL_S:
                self._take_over(now)

    def _progress(self) -> list[Any]:
        """Counters that change while the rank that has the turn does anything."""
        spent: Any = None
        if self.control[TURN] != NO_RANK:
            with contextlib.suppress(OSError), open(f"/proc/{self.ranks[self.control[TURN], PROCESS]}/stat") as file:
                spent = file.read().rpartition(")")[2].split()[11:13]
        return [*self.control[: MOVES + 1].tolist(), spent]

    def _take_over(self, seen: list[Any]) -> None:
        with self._lock:
            holder = int(self.control[TURN])
            if self._progress() != seen or holder in (NO_RANK, self.rank):
                return
            self.ranks[holder, STATE] = AWAY
            self.control[TURN] = self.rank
        self._logger.warning(
            "rank %d has had the turn for %g s without a step: the others go on, and the run may not be the same again",
            holder, _STALL_S,
        )  # fmt: skip

    # -- exchanges of the hosts ----------------------------------------------------------------------------------------
    def begin_exchange(self, members: Sequence[int], number: int) -> bool:
        """Hand the turn on before this rank waits for others; returns whether it is the last one that comes."""
        self.ensure()
        self.moved()
        own, key = self.ranks[self.rank], mixed(*members) >> 1
        own[STATE], own[EXCHANGE], own[NUMBER] = EXCHANGING, key, number
        rows = self.ranks[list(members)]
        is_last = bool((rows[:, [STATE, EXCHANGE, NUMBER]] == (EXCHANGING, key, number)).all())
        if is_last:
            self.ranks[list(members), STATE] = RUNNING
            self.ranks[list(members), WAITED : PROVEN + 1] = 0
        self._pass_to_any()
        return is_last

    def go_away(self) -> None:
        """Let others go on while this rank waits for something else, until it calls `ensure`."""
        self.ensure()
        with self._lock:
            self.ranks[self.rank, STATE] = AWAY
            self._pass_to_any()

    def leave(self) -> None:
        with self._lock:
            self.ranks[self.rank, STATE] = LEFT
            self.control[MOVES] += 1
            if self.control[TURN] == self.rank:
                self._pass_to_any()
        for fd in self._bells:
            os.close(fd)
        self._bells = []
