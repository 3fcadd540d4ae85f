"""Synchronisation words: the changes of each, what they hand over, and what a read of them may rely on.

A word is any address that an atomic of integers changes.  Words of heaps have their last change in a table that all
ranks share, others in a dict of this process.  What a change hands over depends on its scope: at system scope all ranks
may get it, at GPU scope the programs of its own rank only.  A read-modify-write hands on what was there, a store does
not.

A wait relies on the *earliest* change that satisfies it and that it could still have read, not on the one that it
happened to see: another run might read that one.  Of additions, which may come in any order that nothing forbids, it
relies on those without which the others could not reach the value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iris_triton.checker.shared import CHANGES, WAITS, Change
from iris_triton.checker.strands import joined

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_triton.checker.shared import Tables
    from iris_triton.checker.strands import Strand

PLAIN, SET, RMW, ADD = range(4)
"""Kinds of changes: a plain store, an atomic one, any read-modify-write, an addition."""

CTA, GPU, SYS = range(3)
"""Scopes, the smallest first."""

_LOOKED_AT = 32  # changes of a word that a wait goes back
_UNHEEDED = 16

Word = tuple[int, int] | int
"""(rank, granule) on a heap, else an address."""

HOLDS: dict[str, Any] = {
    "eq": lambda seen, expected: seen == expected,
    "ne": lambda seen, expected: seen != expected,
    "gt": lambda seen, expected: seen > expected,
    "ge": lambda seen, expected: seen >= expected,
    "lt": lambda seen, expected: seen < expected,
    "le": lambda seen, expected: seen <= expected,
    "reached": lambda seen, expected: seen >= expected,
}


_NAMES = tuple(HOLDS)


class Wait(NamedTuple):
    """A condition that a read waits for."""

    cmp: str
    expected: int

    def holds(self, seen: int) -> bool:
        return bool(HOLDS[self.cmp](seen, self.expected))


class Reader(NamedTuple):
    """How a word is read: by a strand of a rank, with or without acquiring, at a scope, in a line."""

    strand: Strand
    rank: int
    acquires: bool
    scope: int
    site: int


class Unheeded(NamedTuple):
    """A change that was seen and whose strand is not ordered before the reader: its lines, and why."""

    site: int
    program: int
    slot: int
    epoch: int
    reader: int
    why: str


class Overtaken(NamedTuple):
    """A wait that ended by luck: its line, program and slot, and those of the addition that it relied on."""

    site: int
    program: int
    slot: int
    relied_on: int
    by_program: int
    by_slot: int


class Words:
    """The synchronisation words of one context, as one rank sees them."""

    def __init__(self, tables: Tables, rank: int) -> None:
        self._tables, self._rank = tables, rank
        self._others: dict[int, int] = {}  # words that are on no heap
        self._joins: dict[tuple[int, ...], int] = {}

    def last(self, word: Word) -> int:
        """Return the last change of a word, 0 for none."""
        if isinstance(word, tuple):
            return int(self._tables.words[word])
        return self._others.get(word, 0)

    def _join(self, *rows: int) -> int:
        found = self._joins.get(rows)
        if found is None:
            if len(self._joins) > 1 << 14:
                self._joins.clear()
            found = self._joins[rows] = joined(self._tables, rows)
        return found

    def change(
        self, strand: Strand, word: Word, kind: int, value: int, old: int, *, releases: bool, scope: int, site: int
    ) -> Overtaken | None:
        """Note that a strand has changed a word; if it released, the caller ticks it.  The caller holds the lock.

        Returns a wait that has ended by luck, as this change shows: an addition that could have come before it.
        """
        tables, before, c = self._tables, self.last(word), Change
        row = np.zeros(tables.changes.shape[1], np.int64)
        row[: c.OWN] = (
            before, strand.slot, strand.epoch, site, strand.program, kind, value, old, releases, scope
        )  # fmt: skip
        own, reach = 0, scope
        if kind != PLAIN:
            row[c.READS] = strand.finished_reads(tables) if releases else strand.relax(tables)
            if releases:
                own = strand.release(tables)
            elif strand.fence is not None:
                own, fenced = strand.fence
                reach = min(scope, fenced)
        row[c.OWN] = own
        if own and reach == SYS:
            row[c.SYSTEM] = own
        if own and reach >= GPU:
            row[c.RANKS + self._rank] = own
        if kind in (RMW, ADD) and before:
            past = tables.changes[before]
            for column in (c.READS, c.SYSTEM, *range(c.RANKS, row.size)):
                row[column] = self._join(*sorted((int(past[column]), int(row[column]))))
        number = tables.take(CHANGES)
        tables.changes[number] = row
        if isinstance(word, tuple):
            tables.words[word] = number
        else:
            self._others[word] = number
        return self._overtaken(strand, row) if kind == ADD and value > old else None

    def _overtaken(self, strand: Strand, row: Any) -> Overtaken | None:
        """A wait for additions that relied on one which the new addition of `row` can stand in for."""
        number = int(row[Change.BEFORE])
        for _ in range(_LOOKED_AT):
            past = self._tables.changes[number]
            at = int(past[Change.WAIT])
            while at:
                at_before, slot, epoch, site, program, cmp, expected = self._tables.waits[at].tolist()
                if epoch > strand.clock[slot]:
                    wait = Wait(_NAMES[cmp], expected)
                    still = self._additions(number, wait, (row, strand.clock))[0]
                    lost = next((each for each in self._additions(number, wait)[0] if each not in still), None)
                    if lost is not None:
                        relied_on = self._tables.changes[lost]
                        whose = (int(relied_on[column]) for column in (Change.SITE, Change.PROGRAM, Change.SLOT))
                        return Overtaken(site, program, slot, *whose)
                at = at_before
            number = int(past[Change.BEFORE])
            if not number or past[Change.KIND] != ADD:
                break
        return None

    def _remember(self, by: Reader, last: int, wait: Wait) -> None:
        """Keep a wait that relies on several additions, for those that come later."""
        before = int(self._tables.changes[last, Change.WAIT])
        strand = by.strand
        row = before, strand.slot, strand.epoch, by.site, strand.program, _NAMES.index(wait.cmp), wait.expected
        if not before or tuple(self._tables.waits[before].tolist())[1:] != row[1:]:
            number = self._tables.take(WAITS)
            self._tables.waits[number] = row
            self._tables.changes[last, Change.WAIT] = number

    def read(self, by: Reader, word: Word, seen: int, wait: Wait | None) -> None:
        """Let a strand that has read a word know what was handed over to it.  The caller holds the lock."""
        last = self.last(word)
        if not last:
            return
        relied_on: Sequence[int] = (last,)
        own: Sequence[int] = ()  # of which the strand may rely on what they release themselves, and no more
        if wait is not None and wait.holds(seen):
            own, base = self._additions(last, wait)
            relied_on = (base,) if own else (self._earliest(by.strand, last, wait),)
            if len(own) > 1 and by.acquires:
                self._remember(by, last, wait)
        for number in relied_on:
            if number:
                self._hand_over(by, self._tables.changes[number])
        for number in own:
            self._hand_over(by, self._tables.changes[number], alone=True)
        row = self._tables.changes[last]
        slot, epoch = int(row[Change.SLOT]), int(row[Change.EPOCH])
        if epoch > by.strand.clock[slot]:
            if len(by.strand.unheeded) >= _UNHEEDED:
                del by.strand.unheeded[next(iter(by.strand.unheeded))]
            why = self._reason(by, row, last not in relied_on and last not in own)
            by.strand.unheeded[slot, by.site] = Unheeded(
                int(row[Change.SITE]), int(row[Change.PROGRAM]), slot, epoch, by.site, why
            )

    def _hand_over(self, by: Reader, row: Any, *, alone: bool = False) -> None:
        tables, strand, c = self._tables, by.strand, Change
        if row[c.READS]:
            strand.learn(None, tables.clocks[int(row[c.READS])])
        if alone:
            is_ours = row[c.SLOT] // (tables.num_slots // tables.published.shape[1]) == self._rank
            reaches = by.scope == SYS and row[c.SCOPE] == SYS
            rows = [int(row[c.OWN])] if reaches or (is_ours and by.scope >= GPU) else []
        else:
            rows = [int(row[c.RANKS + self._rank])] if by.scope >= GPU else []
            if by.scope == SYS:
                rows.append(int(row[c.SYSTEM]))
        for number in filter(None, rows):
            if by.acquires:
                strand.learn(tables.clocks[number], tables.clocks[number])
            elif strand.heard is None:
                strand.heard = tables.clocks[number].copy()
            else:
                np.maximum(strand.heard, tables.clocks[number], out=strand.heard)

    def _earliest(self, strand: Strand, last: int, wait: Wait) -> int:
        """The first change that would have ended a wait and that the strand could still have read; 0: none had to be.

        Where a change happens before the strand, what was there before that cannot be read any more.
        """
        best, number = last, last
        for _ in range(_LOOKED_AT):
            row = self._tables.changes[number]
            if wait.holds(int(row[Change.VALUE])):
                best = number
            if int(row[Change.EPOCH]) <= strand.clock[int(row[Change.SLOT])]:
                break
            number = int(row[Change.BEFORE])
            if not number:
                if wait.holds(int(row[Change.OLD])):
                    best = 0
                break
        return best

    def _additions(self, last: int, wait: Wait, also: tuple[Any, Any] | None = None) -> tuple[list[int], int]:
        """Additions that must have come before the wait could end, and the change before all of them.

        One is needed if the others, without those that come after it, do not reach the value.  Nothing where the last
        change is no addition, or the word had the value before.  `also` is a later addition that counts among the
        others, and what it comes after.
        """
        if wait.cmp not in ("ge", "gt", "eq", "reached"):
            return [], 0
        added: list[tuple[int, Any]] = []
        number = last
        while number and len(added) < _LOOKED_AT:
            row = self._tables.changes[number]
            if row[Change.KIND] != ADD or row[Change.VALUE] <= row[Change.OLD]:
                break
            added.append((number, row))
            number = int(row[Change.BEFORE])
        if not added or wait.holds(int(added[-1][1][Change.OLD])):
            return [], 0
        base = int(added[-1][1][Change.OLD])
        at_least = Wait("ge" if wait.cmp == "eq" else wait.cmp, wait.expected)
        needed = []
        for number_of, one in added:
            others = sum(
                int(other[Change.VALUE] - other[Change.OLD])
                for _, other in added
                if other is not one and not self._comes_after(other, one)
            )
            if also is not None and int(one[Change.EPOCH]) > also[1][int(one[Change.SLOT])]:
                others += int(also[0][Change.VALUE] - also[0][Change.OLD])
            if not at_least.holds(base + others):
                needed.append(number_of)
        return needed, number

    def _comes_after(self, late: Any, early: Any) -> bool:
        """Whether one addition happens after another: of the same program, or by what it knew when it released."""
        slot, epoch = int(early[Change.SLOT]), int(early[Change.EPOCH])
        if late[Change.SLOT] == slot:
            return int(late[Change.EPOCH]) > epoch
        own = int(late[Change.OWN])
        return bool(own) and int(self._tables.clocks[own, slot]) >= epoch

    def _reason(self, by: Reader, row: Any, is_early: bool) -> str:
        """Why a change that was seen orders nothing: a key of `reports.REASONS`."""
        c = Change
        same = row[c.SLOT] // (self._tables.num_slots // self._tables.published.shape[1]) == self._rank
        needed = GPU if same else SYS
        if row[c.KIND] == PLAIN:
            return "plain"
        if not row[c.OWN]:
            return "relaxed"
        if row[c.SCOPE] < needed:
            return "scope"
        if not by.acquires:
            return "not acquired"
        if by.scope < needed:
            return "scope of the wait"
        return "early" if is_early else "other"
