"""The past of a granule of the heap: the accesses that later ones may be in conflict with.

A cell holds the number of a *history*: the last writes of its bytes, and the reads since.  That is what FastTrack keeps
per variable (Flanagan and Freund 2009), but histories are rows of a table that never change, and granules with the same
past share one.  An access to a block finds the few different histories in its cells, computes for each what becomes of
it, once per strand and epoch, and writes the numbers back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from iris_triton.checker.shared import HISTORIES, PROGRAMS, Side, Tables
from iris_triton.checker.strands import Strand

READ, WRITE, ATOMIC_READ, ATOMIC_WRITE = 0, 1, 2, 3  # bit 0: it writes; bit 1: it is atomic, with a `form` beside
INTEGER, FLOAT = 1, 2  # what an atomic adds or exchanges; 0 for others, which look at bits
ALL = 0xF  # all bytes of a granule
UNKNOWN, UNWRITTEN = 0, 1  # without accesses: memory that is taken for written, a block that is not written yet
_KEPT = 1 << 16  # decoded histories of this process
_SPARE_ROWS = 8  # rows of a history beyond twice its members, before it is written anew

Member = tuple[int, int, int]  # epoch, site, program; its key is the kind with the bytes (kind << 4 | bytes), and slot


class History(NamedTuple):
    """The accesses to a granule: writes and reads by (kind and bytes, slot), the bytes written, and rows it takes."""

    writes: dict[tuple[int, int], Member]
    reads: dict[tuple[int, int], Member]
    written: int
    depth: int


class Conflict(NamedTuple):
    """An earlier access that nothing orders before the present one."""

    kind: int
    epoch: int
    side: Side


WIDE = 64  # of an atomic: its scope is the system; else it is atomic to others of its own rank only


def form(itemsize: int, number: int, *, is_wide: bool) -> int:
    """Return the bits that are added to the kind of an atomic: its width, INTEGER, FLOAT or 0, and WIDE."""
    return (itemsize.bit_length() - 1) << 2 | number << 4 | WIDE * is_wide


def agree(one: int, other: int, *, are_near: bool) -> bool:
    """Return whether two accesses, by their kinds and whether they are of one rank, are atomic to each other."""
    numbers = one >> 4 & 3, other >> 4 & 3
    is_one_type = not (one ^ other) & 12 and (0 in numbers or numbers[0] == numbers[1])
    return bool(one & other & 2) and is_one_type and (are_near or bool(one & other & WIDE))


class Histories:
    """The histories of one context."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._known: dict[int, History] = {}
        self._clear()

    def _clear(self) -> None:
        self._known = {UNKNOWN: History({}, {}, ALL, 0), UNWRITTEN: History({}, {}, 0, 0)}

    def get(self, number: int) -> History:
        found = self._known.get(number)
        if found is not None:
            return found
        rows, at = [], number
        while at not in self._known:
            rows.append(self._tables.histories[at].item())
            at = rows[-1][0]
        found = self._known[at]
        writes, reads = dict(found.writes), dict(found.reads)
        for _, kind, slot, epoch, site, program, _ in reversed(rows):
            (writes if kind >> 4 & 1 else reads)[kind, slot] = epoch, site, program
        if len(self._known) >= _KEPT:
            self._clear()
        found = self._known[number] = History(writes, reads, rows[0][6], found.depth + len(rows))
        return found

    def conflicts(self, number: int, kind: int, mask: int, strand: Strand) -> list[Conflict]:
        """Return the members of a history that an access is in conflict with and not ordered after."""
        history, clock, found = self.get(number), strand.clock, []
        here = strand.slot // PROGRAMS
        before = clock if strand.past is None else strand.past  # the word itself orders no atomics of two kinds
        members = history.writes | history.reads if kind & 1 else history.writes
        for (what, slot), (epoch, site, program) in members.items():
            other = what >> 4
            if other & 1:
                known = (before if other & kind & 2 else clock)[slot]
            else:
                known = max(clock[slot], strand.reads[slot])
            if what & mask and epoch > known and not agree(kind, other, are_near=slot // PROGRAMS == here):
                found.append(Conflict(other, epoch, Side(site, program, slot)))
        return found

    def after(self, number: int, kind: int, mask: int, strand: Strand, site: int) -> int:
        """Return the number of a history after an access.  The caller holds the lock."""
        history, key = self.get(number), (kind << 4 | mask, strand.slot)
        me = strand.epoch, site, strand.program
        if not kind & 1:
            before = history.reads.get(key)
            if before is not None and before[0] == strand.epoch:
                return number  # a second read in the same epoch says nothing new
            return self._add(number, history, key, me, history.written)
        written = history.written | mask
        if kind & 3 == ATOMIC_WRITE:
            if history.writes.get(key) == me and written == history.written:
                return number
            return self._add(number, history, key, me, written)
        gone = ~mask & ALL
        writes = {k: m for k, m in history.writes.items() if k[0] & gone}
        reads = {k: m for k, m in history.reads.items() if k[0] & gone}
        writes[key] = me
        members = "new", tuple(writes.items()), tuple(reads.items()), written
        found = strand.next.get(members)  # the same as before in this epoch
        if found is None:
            found = strand.next[members] = self._write(writes, reads, written)
        return found

    def _add(self, number: int, history: History, key: tuple[int, int], me: Member, written: int) -> int:
        if history.depth > 2 * (len(history.writes) + len(history.reads)) + _SPARE_ROWS:
            writes, reads = dict(history.writes), dict(history.reads)
            (writes if key[0] >> 4 & 1 else reads)[key] = me
            return self._write(writes, reads, written)
        row = self._tables.take(HISTORIES)
        self._tables.histories[row] = (number, key[0], key[1], *me, written)
        return row

    def _write(self, writes: dict[Any, Member], reads: dict[Any, Member], written: int) -> int:
        members = [*writes.items(), *reads.items()]
        row = self._tables.take(HISTORIES, len(members))
        for number, ((kind, slot), member) in enumerate(members):
            before = row + number - 1 if number else UNKNOWN
            self._tables.histories[row + number] = (before, kind, slot, *member, written)
        return row + len(members) - 1


def different(cells: Any) -> list[int]:
    """Return the different numbers in some cells."""
    first = cells[0]
    if (cells == first).all():
        return [int(first)]
    low, high = int(cells.min()), int(cells.max())
    if high - low > 1 << 16:
        return [int(number) for number in np.unique(cells)]
    present = np.zeros(high - low + 1, np.bool_)
    present[cells - np.uint32(low)] = True
    return [low + int(number) for number in np.flatnonzero(present)]


def replaced(cells: Any, new: dict[int, int]) -> Any:
    """Return cells with every number replaced, by a dict that has all of them."""
    low, high = min(new), max(new)
    if high - low > 1 << 16:
        keys = np.array(sorted(new), np.uint32)
        values = np.array([new[int(key)] for key in keys], np.uint32)
        return values[np.searchsorted(keys, cells)]
    table = np.zeros(high - low + 1, np.uint32)
    for old, number in new.items():
        table[old - low] = number
    return table[cells - np.uint32(low)]
