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

import functools
import operator
from typing import Any, NamedTuple

import numpy as np

from iris_triton.checker.shared import CHANGES, PROGRAMS, RANKS, WAIT, WAITS, Change, Side, Tables
from iris_triton.checker.strands import Strand, joined

PLAIN, SET, RMW, ADD = range(4)  # kinds of changes: a plain store, an atomic one, any read-modify-write, an addition
CTA, GPU, SYS = range(3)  # scopes, the smallest first
MAX_WORDS = 256  # lanes of an atomic that are looked at as words; more are data
_LOOKED_AT = 32  # changes of a word that a wait goes back
_UNHEEDED = 16

Word = tuple[int, int] | int  # (rank, granule) on a heap, else an address
HOLDS = {name: getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")} | {"reached": operator.ge}
"""Comparisons by their names, of values seen with those expected."""

_NAMES = tuple(HOLDS)


class Wait(NamedTuple):
    """A condition that a read waits for."""

    cmp: str
    expected: int

    def holds(self, seen: int) -> bool:
        return bool(HOLDS[self.cmp](seen, self.expected))


class Reader(NamedTuple):
    """How a word is read: by a strand, with or without acquiring, at a scope, in a line."""

    strand: Strand
    acquires: bool
    scope: int
    site: int


class Unheeded(NamedTuple):
    """A change that was seen and whose strand is not ordered before the reader: its epoch, the reader's line, why."""

    side: Side
    epoch: int
    reader: int
    why: str


class Words:
    """The synchronisation words of one context, as one rank sees them."""

    def __init__(self, tables: Tables, rank: int) -> None:
        self._tables, self._rank = tables, rank
        self._others: dict[int, int] = {}  # words that are on no heap
        self._join = functools.lru_cache(1 << 14)(lambda *rows: joined(tables, rows))

    def last(self, word: Word) -> int:
        """Return the last change of a word, 0 for none."""
        return int(self._tables.words[word]) if isinstance(word, tuple) else self._others.get(word, 0)

    def _get(self, number: int) -> Change:
        row = self._tables.changes[number].tolist()
        return Change._make([*row[:RANKS], row[RANKS:]])

    def change(
        self, strand: Strand, word: Word, kind: int, value: int, old: int, *, releases: bool, scope: int, site: int
    ) -> tuple[Side, Side] | None:
        """Note that a strand has changed a word; if it released, the caller ticks it.  The caller holds the lock.

        Returns a wait that has ended by luck, as this change shows, and the addition that it relied on: this one could
        have come before that.
        """
        tables, before = self._tables, self.last(word)
        reads, own, reach = 0, 0, scope
        if kind != PLAIN:
            reads = strand.finished_reads(tables) if releases else strand.relax(tables)
            if releases:
                own = strand.release(tables)
            elif strand.fence is not None:
                own, fenced = strand.fence
                reach = min(scope, fenced)
        system = own if reach == SYS else 0
        ranks = [0] * (tables.changes.shape[1] - RANKS)
        ranks[self._rank] = own if reach >= GPU else 0
        if kind in (RMW, ADD) and before:
            past = self._get(before)
            pairs = zip((past.reads, past.system, *past.ranks), (reads, system, *ranks), strict=True)
            reads, system, *ranks = (self._join(*sorted(pair)) for pair in pairs)
        me = strand.slot, strand.epoch, site, strand.program
        new = Change(before, *me, kind, value, old, scope, own, reads, system, 0, ranks)
        number = tables.take(CHANGES)
        tables.changes[number] = *new[:RANKS], *ranks
        if isinstance(word, tuple):
            tables.words[word] = number
        else:
            self._others[word] = number
        return self._overtaken(strand, new) if kind == ADD and value > old else None

    def _overtaken(self, strand: Strand, new: Change) -> tuple[Side, Side] | None:
        """Return a wait for additions, and one that it relied on and that a new addition can stand in for."""
        number = new.before
        for _ in range(_LOOKED_AT):
            past = self._get(number)
            at = past.wait
            while at:
                at_before, slot, epoch, site, program, cmp, expected = self._tables.waits[at].tolist()
                if epoch > strand.clock[slot]:
                    wait = Wait(_NAMES[cmp], expected)
                    still = self._additions(number, wait, (new, strand.clock))[0]
                    lost = next((each for each in self._additions(number, wait)[0] if each not in still), None)
                    if lost is not None:
                        return Side(site, program, slot), side_of(self._get(lost))
                at = at_before
            number = past.before
            if not number or past.kind != ADD:
                break
        return None

    def _remember(self, by: Reader, last: int, wait: Wait) -> None:
        """Keep a wait that relies on several additions, for those that come later."""
        before, strand = self._get(last).wait, by.strand
        row = before, strand.slot, strand.epoch, by.site, strand.program, _NAMES.index(wait.cmp), wait.expected
        if not before or tuple(self._tables.waits[before].tolist())[1:] != row[1:]:
            number = self._tables.take(WAITS)
            self._tables.waits[number] = row
            self._tables.changes[last, WAIT] = number

    def read(self, by: Reader, word: Word, seen: int, wait: Wait | None) -> None:
        """Let a strand that has read a word know what was handed over to it.  The caller holds the lock."""
        last = self.last(word)
        if not last:
            return
        relied_on, own = last, list[int]()  # of the latter, it may rely on what they release themselves, and no more
        if wait is not None and wait.holds(seen):
            own, base = self._additions(last, wait)
            relied_on = base if own else self._earliest(by.strand, last, wait)
            if len(own) > 1 and by.acquires:
                self._remember(by, last, wait)
        if relied_on:
            self._hand_over(by, self._get(relied_on))
        for number in own:
            self._hand_over(by, self._get(number), alone=True)
        change, unheeded = self._get(last), by.strand.unheeded
        if change.epoch > by.strand.clock[change.slot]:
            if len(unheeded) >= _UNHEEDED:
                del unheeded[next(iter(unheeded))]
            why = self._reason(by, change, last != relied_on and last not in own)
            unheeded[change.slot, by.site] = Unheeded(side_of(change), change.epoch, by.site, why)

    def _hand_over(self, by: Reader, change: Change, *, alone: bool = False) -> None:
        clocks, strand = self._tables.clocks, by.strand
        if change.reads:
            strand.learn(None, clocks[change.reads])
        if alone:
            is_ours = change.slot // PROGRAMS == self._rank
            reaches = by.scope == SYS and change.scope == SYS
            rows = [change.own] if reaches or (is_ours and by.scope >= GPU) else []
        else:
            rows = [change.ranks[self._rank]] if by.scope >= GPU else []
            if by.scope == SYS:
                rows.append(change.system)
        for number in filter(None, rows):
            if by.acquires:
                strand.learn(clocks[number], clocks[number])
            elif strand.heard is None:
                strand.heard = clocks[number].copy()
            else:
                np.maximum(strand.heard, clocks[number], out=strand.heard)

    def _earliest(self, strand: Strand, last: int, wait: Wait) -> int:
        """Return the first change that would have ended a wait and that the strand could still read; 0: none had to be.

        Where a change happens before the strand, what was there before that cannot be read any more.
        """
        best, number = last, last
        for _ in range(_LOOKED_AT):
            change = self._get(number)
            if wait.holds(change.value):
                best = number
            if change.epoch <= strand.clock[change.slot]:
                break
            number = change.before
            if not number:
                return 0 if wait.holds(change.old) else best
        return best

    def _additions(self, last: int, wait: Wait, also: tuple[Change, Any] | None = None) -> tuple[list[int], int]:
        """Additions that must have come before the wait could end, and the change before all of them.

        One is needed if the others, without those that come after it, do not reach the value.  Nothing where the last
        change is no addition, or the word had the value before.  `also` is a later addition that counts among the
        others, and what it comes after.
        """
        if wait.cmp not in ("ge", "gt", "eq", "reached"):
            return [], 0
        added: dict[int, Change] = {}
        number = last
        while number and len(added) < _LOOKED_AT:
            change = self._get(number)
            if change.kind != ADD or change.value <= change.old:
                break
            added[number] = change
            number, base = change.before, change.old
        if not added or wait.holds(base):
            return [], 0
        at_least = Wait("ge" if wait.cmp == "eq" else wait.cmp, wait.expected)
        needed = []
        for number_of, one in added.items():
            others = [each for each in added.values() if each is not one and not self._comes_after(each, one)]
            if also is not None and one.epoch > also[1][one.slot]:
                others.append(also[0])
            if not at_least.holds(base + sum(each.value - each.old for each in others)):
                needed.append(number_of)
        return needed, number

    def _comes_after(self, late: Change, early: Change) -> bool:
        """Whether one addition happens after another: of the same program, or by what it knew when it released."""
        if late.slot == early.slot:
            return bool(late.epoch > early.epoch)
        return bool(late.own) and int(self._tables.clocks[late.own, early.slot]) >= early.epoch

    def _reason(self, by: Reader, change: Change, is_early: bool) -> str:
        """Why a change that was seen orders nothing: a key of `reports.REASONS`."""
        needed = GPU if change.slot // PROGRAMS == self._rank else SYS
        if change.kind == PLAIN:
            return "plain"
        if not change.own:
            return "relaxed"
        if change.scope < needed:
            return "scope"
        if not by.acquires:
            return "not acquired"
        if by.scope < needed:
            return "scope of the wait"
        return "early" if is_early else "other"


def side_of(change: Change) -> Side:
    """Return who has made a change."""
    return Side(change.site, change.program, change.slot)
