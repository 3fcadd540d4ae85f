"""Strands and their clocks: who runs one after the other, and what each knows of the others.

A *strand* is a program of a launch, or the host of a rank together with its current stream.  Its clock holds, for each
slot, the last epoch that happens before what the strand does next (Lamport 1978; Mattern 1989).  A second clock holds
what has at least *finished reading*: a relaxed signal of a later kernel orders the reads of an earlier one before what
its receiver writes, and nothing else.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from iris_core.world import World
from iris_triton.checker.shared import HANDED, PROGRAMS, SLOTS, Tables
from iris_triton.interpreter.state import ProgramInfo

HOST = 0xFFFFFFFF  # stands for the host where a program is named


class Strand:
    """One strand; `program` is its linear index, or HOST."""

    __slots__ = (
        "clock", "epoch", "fence", "heard", "next", "operation", "past", "program", "reads", "relaxed", "released",
        "slot", "thread", "unheeded", "users",
    )  # fmt: skip

    def __init__(self, slot: int, clock: Any, reads: Any, program: int) -> None:
        self.slot, self.clock, self.reads, self.program = slot, clock, reads, program
        self.epoch = 0
        self.users = 0  # partitions of a program that are running
        self.thread: Any = None  # what it has in its buffer where schedules are explored
        self.operation: Any = None  # the device function that is running: ("set",), ("load",), ("wait", ...)
        self.past: Any = None  # its clock before the atomic that is running has acquired anything
        self.next: dict[Any, int] = {}  # what becomes of histories by accesses in this epoch
        self.released = self.relaxed = 0  # rows that hold its clocks as they are now; 0: not written yet
        self.heard: Any = None  # what relaxed reads have seen: an acquiring fence joins it
        self.fence: Any = None  # (row, scope) of the last releasing fence: relaxed stores after it release that
        self.unheeded: dict[Any, Any] = {}  # changes of words that were seen and ordered nothing, and why

    def tick(self, tables: Tables) -> None:
        """Begin a new epoch, which no program of the slot has had before.  The caller holds the lock."""
        tables.epochs[self.slot] += 1
        self.epoch = self.clock[self.slot] = int(tables.epochs[self.slot])
        self.next.clear()
        self.released = 0

    def learn(self, clock: Any | None, reads: Any) -> None:
        """Let what one clock holds, and the reads of another, happen before what this strand does next."""
        if clock is not None:
            np.maximum(self.clock, clock, out=self.clock)
        np.maximum(self.reads, reads, out=self.reads)
        self.next.clear()  # accesses that were in conflict may not be so any more
        self.released = self.relaxed = 0

    def release(self, tables: Tables) -> int:
        """Return a row with all that this strand has done and knows.  The caller holds the lock."""
        self.released = self.released or tables.keep(self.clock)
        return self.released

    def relax(self, tables: Tables) -> int:
        """Return a row with the reads alone that are finished: of earlier kernels, not this strand's own."""
        self.relaxed = self.relaxed or tables.keep(self.reads)
        return self.relaxed

    def finished_reads(self, tables: Tables) -> int:
        """Return a row with the reads that are finished where this strand releases: most often that of `release`."""
        if (self.reads <= self.clock).all():
            return self.release(tables)
        return tables.keep(np.maximum(self.clock, self.reads))


def joined(tables: Tables, rows: Any) -> int:
    """Return a row of clocks that holds what several hold; 0 for none.  The caller holds the lock."""
    different = sorted({row for row in rows if row})
    if len(different) < 2:
        return different[0] if different else 0
    return tables.keep(tables.clocks[different].max(axis=0))


class Host(Strand):
    """The strand of a rank's host; exchanges order it with those of the other ranks of a context."""

    __slots__ = ("_tables", "_world", "turns")

    def __init__(self, tables: Tables, world: World) -> None:
        clock, reads = np.zeros((2, tables.num_slots), np.int32)
        super().__init__(world.rank * PROGRAMS, clock, reads, HOST)
        self._tables, self._world = tables, world
        self.turns: dict[tuple[int, ...], int] = {}  # exchanges so far, by their ranks
        with tables:
            self.tick(tables)

    def before_exchange(self, world: World) -> tuple[tuple[int, ...], int] | None:
        """Begin an exchange of ranks: what they did before happens before what the others do afterwards."""
        if not world.shares_connections(self._world):
            return None
        turn = self.turns[world.ranks] = self.turns.get(world.ranks, 0) + 1
        with self._tables as tables:
            tables.published[turn % 2, self._world.rank] = self.clock, np.maximum(self.clock, self.reads)
            self.tick(tables)
        return world.ranks, turn

    def after_exchange(self, begun: tuple[tuple[int, ...], int] | None) -> None:
        """End an exchange, when all ranks have come, with what `before_exchange` has returned."""
        if begun is not None:
            ranks, turn = begun
            with self._tables as tables:
                self.learn(*tables.published[turn % 2, list(ranks)].max(axis=0))

    def hand_over(self, name: int) -> None:
        """Let what this rank did happen before what those do next that `take_over` the same name from it."""
        with self._tables as tables:
            row = tables.take(HANDED)
            tables.handed[row] = name, self._world.rank, self.release(tables), self.finished_reads(tables)
            self.tick(tables)

    def take_over(self, name: int, ranks: tuple[int, ...]) -> None:
        """Take over what some ranks have handed over so far under a name."""
        with self._tables as tables:
            handed = tables.handed[: tables.counters[HANDED]]
            for _, rank, *rows in handed[handed[:, 0] == name]:
                if rank in ranks:
                    self.learn(*tables.clocks[rows])


class LaunchStrands:
    """The strands of one launch: they begin with what the host knows, and the host knows what they did at the end."""

    def __init__(self, tables: Tables, rank: int, host: Strand, grid: tuple[int, int, int]) -> None:
        self._tables, self._rank, self._host, self._grid = tables, rank, host, grid
        self._start = host.clock.copy(), np.maximum(host.clock, host.reads)
        self._end = self._start[0].copy(), self._start[1].copy()
        self.strands: dict[tuple[int, int, int], Strand] = {}

    def begin(self, pid: tuple[int, int, int]) -> None:
        """Begin a program, or a partition of one."""
        strand = self.strands.get(pid)
        if strand is None:
            program = ProgramInfo(pid, self._grid).linear_id
            slot = self._rank * PROGRAMS + 1 + program % SLOTS
            strand = self.strands[pid] = Strand(slot, self._start[0].copy(), self._start[1].copy(), program)
            with self._tables as tables:
                strand.tick(tables)
        strand.users += 1

    def end(self, pid: tuple[int, int, int]) -> None:
        """End it, also after an error."""
        strand = self.strands[pid]
        strand.users -= 1
        if not strand.users:
            self._fold(self.strands.pop(pid))

    def _fold(self, strand: Strand) -> None:
        np.maximum(self._end[0], strand.clock, out=self._end[0])
        np.maximum(self._end[1], np.maximum(strand.clock, strand.reads), out=self._end[1])

    def close(self) -> None:
        for strand in self.strands.values():
            self._fold(strand)
        with self._tables as tables:
            self._host.learn(*self._end)
            self._host.tick(tables)
