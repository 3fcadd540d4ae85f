"""Synchronisation words: the changes of each, what they hand over, and what a read of them may rely on.

A word is any address that an atomic of integers changes.  Words of heaps have their last change in a table that all
ranks share, others in a dict of this process.  What a change hands over depends on its scope: at system scope all ranks
may get it, at GPU scope the programs of its own rank only.  A read-modify-write hands on what was there, a store does
not.

A wait relies on the *earliest* change that satisfies it and that it could still have read, not on the one that it
happened to see: another run might read that one.  Additions may come in any order that nothing forbids: it relies on
what all sets of them that reach the value have in common.
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
MAX_WORDS = 4096  # lanes of an atomic that are looked at as words; more are data
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
    """A read that has seen a change of a strand that is not ordered before: the change, and whether it waited less."""

    by: Reader
    last: int
    is_early: bool


class Words:
    """The synchronisation words of one context, as one rank sees them."""

    def __init__(self, tables: Tables, rank: int) -> None:
        self._tables, self._rank = tables, rank
        self._others: dict[int, int] = {}  # words that are on no heap
        self._past: dict[Word, list[int]] = {}  # changes of words that waits have read, the first one first
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
        return self._overtaken(strand, word, new) if kind == ADD and value > old and before else None

    def _rows(self, word: Word) -> tuple[Any, Change]:
        """Return the numbers of all changes of a word, the first one first, and a change of arrays in that order."""
        past, new, number = self._past.setdefault(word, []), list[int](), self.last(word)
        while number and not (past and number == past[-1]):
            new.append(number)
            number = int(self._tables.changes[number, 0])
        if not number:  # the first one is new, too: the word's block may have been freed
            past.clear()
        past += reversed(new)
        numbers = np.array(past)
        rows = self._tables.changes[numbers].T
        return numbers, Change._make([*rows[:RANKS], rows[RANKS:]])

    def _overtaken(self, strand: Strand, word: Word, new: Change) -> tuple[Side, Side] | None:
        """Return a wait for additions, and one that it relied on and that a new addition can stand in for."""
        numbers, past = self._rows(word)
        first, end = _additions(past), len(numbers) - 1
        is_free = past.epoch > strand.clock[past.slot]  # what the new one may have come before
        if not is_free[first:end].any():
            return None
        for last in (first + np.flatnonzero(past.wait[first:end]))[::-1].tolist():
            at = int(past.wait[last])
            while at:
                at, slot, epoch, site, program, cmp, expected = self._tables.waits[at].tolist()
                if epoch > strand.clock[slot]:
                    run, need = slice(first, last + 1), _need(Wait(_NAMES[cmp], expected), past.old[first])
                    is_needed = self._needed(past, run, need)
                    lost = is_needed & ~self._needed(past, run, need, np.where(is_free[run], new.value - new.old, 0))
                    if lost.any():
                        return Side(site, program, slot), side_of(self._get(numbers[run][lost][-1]))
        return None

    def _needed(self, past: Change, run: slice, need: int, more: Any = 0) -> Any:
        """Whether each of some additions is needed: the others that need not come after it, and more, fall short."""
        slots, owners = np.unique(past.slot[run], return_inverse=True)
        knows = self._tables.clocks[past.own[run]][:, slots]
        at = np.arange(len(owners)), owners
        knows[at] = np.maximum(knows[at], past.epoch[run])
        order, sums = _summed(knows, owners, (past.value - past.old)[run])
        found = np.empty(len(owners), np.bool_)
        for column in range(slots.size):
            mine = owners == column
            without = np.searchsorted(knows[order[:, column], column], past.epoch[run][mine])
            found[mine] = np.append(0, sums[:, column])[without] + np.broadcast_to(more, mine.shape)[mine] < need
        return found

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
        relied_on = last
        if wait is not None and wait.holds(seen):
            relied_on = self._wait(by, word, wait)
        if relied_on:
            self._hand_over(by, self._get(relied_on))
        slot, epoch = self._tables.changes[last, 1:3].tolist()
        if relied_on != last or epoch > by.strand.clock[slot]:
            unheeded, key = by.strand.unheeded, (slot, by.site)
            unheeded.pop(key, None)
            if len(unheeded) >= _UNHEEDED:
                del unheeded[next(iter(unheeded))]
            unheeded[key] = Unheeded(by, last, relied_on != last)

    def _wait(self, by: Reader, word: Word, wait: Wait) -> int:
        """Let a strand whose wait has ended know what additions have handed over; returns the change before them."""
        numbers, past = self._rows(word)
        is_known, first = past.epoch <= by.strand.clock[past.slot], len(numbers)
        if wait.cmp in ("ge", "gt", "eq", "reached"):
            first = _additions(past)
        if first < len(numbers):
            run, need = slice(first, None), _need(wait, past.old[first])
            if by.acquires and len(numbers) - first > 1 and self._needed(past, run, need).sum() > 1:
                self._remember(by, int(numbers[-1]), wait)
            need -= (past.value - past.old)[run][is_known[run]].sum()
            if need > 0:
                self._hand_over_sums(by, past, first + np.flatnonzero(~is_known[run]), need)
            if is_known[run].any() or not wait.holds(past.old[first]):
                return int(numbers[first - 1]) if first else 0
        return _earliest(numbers[:first], past, is_known[:first], wait)

    def _hand_over_sums(self, by: Reader, past: Change, free: Any, need: int) -> None:
        """Hand over what additions that may come in any order must have handed over when they reach a sum."""
        added, parts = past.value - past.old, list[Any]()
        for slot in np.unique(past.slot[free]):
            mine = free[past.slot[free] == slot]
            parts.append(mine[: np.searchsorted(added[mine].cumsum(), need) + 1])  # these alone reach it
        chosen, clocks = np.concatenate(parts), self._tables.clocks
        is_ours = past.slot[chosen] // PROGRAMS == self._rank
        reaches = (by.scope == SYS) & (past.scope[chosen] == SYS) | is_ours & (by.scope >= GPU)
        for rows, has_order in ((past.reads[chosen], False), (np.where(reaches, past.own[chosen], 0), True)):
            held = clocks[rows]
            order, sums = _summed(held, past.slot[chosen], added[chosen])
            clock = np.take_along_axis(held, order, 0)[(sums >= need).argmax(0), np.arange(held.shape[1])]
            if has_order:
                self._learn(by, clock)
            else:
                by.strand.learn(None, clock)

    def _hand_over(self, by: Reader, change: Change) -> None:
        if change.reads:
            by.strand.learn(None, self._tables.clocks[change.reads])
        rows = [change.ranks[self._rank]] if by.scope >= GPU else []
        if by.scope == SYS:
            rows.append(change.system)
        for number in filter(None, rows):
            self._learn(by, self._tables.clocks[number])

    @staticmethod
    def _learn(by: Reader, clock: Any) -> None:
        strand = by.strand
        if by.acquires:
            strand.learn(clock, clock)
        elif strand.heard is None:
            strand.heard = clock.copy()
        else:
            np.maximum(strand.heard, clock, out=strand.heard)

    def why(self, seen: Unheeded, slot: int, epoch: int) -> tuple[Side, str] | None:
        """Return who of a slot has made a change after an epoch that a read could have acquired, and why it did not."""
        number = seen.last
        while number:
            change = self._get(number)
            if change.slot == slot and change.epoch >= epoch:
                return side_of(change), self._reason(seen.by, change, seen.is_early)
            number = change.before if seen.is_early or change.kind in (RMW, ADD) else 0
        return None

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


def _additions(past: Change) -> int:
    """Return where the additions begin that a word's changes end with."""
    others = np.flatnonzero((past.kind != ADD) | (past.value <= past.old))
    return int(others[-1]) + 1 if others.size else 0


def _need(wait: Wait, value: int) -> int:
    """Return what is to be added to a value for a wait to end."""
    return int(wait.expected + (wait.cmp == "gt") - value)


def _summed(held: Any, owners: Any, added: Any) -> tuple[Any, Any]:
    """Return, by column, additions in the order of what they hold, and their sums; `held` is changed.

    What one holds is at least what those before it in its own program hold: they come with it.
    """
    for owner in np.unique(owners):
        held[owners == owner] = np.maximum.accumulate(held[owners == owner], axis=0)
    order = held.argsort(axis=0, kind="stable")
    return order, added[order].cumsum(axis=0)


def _earliest(numbers: Any, past: Change, is_known: Any, wait: Wait) -> int:
    """Return the first change that would have ended a wait and that a strand could still read; 0: none had to be.

    Where a change happens before the strand, what was there before that cannot be read any more.
    """
    if not numbers.size:
        return 0
    known = np.flatnonzero(is_known)
    if not known.size and wait.holds(past.old[0]):
        return 0
    begin = known[-1] if known.size else 0
    holding = np.flatnonzero(HOLDS[wait.cmp](past.value[begin : numbers.size], wait.expected))
    return int(numbers[begin + holding[0] if holding.size else -1])
