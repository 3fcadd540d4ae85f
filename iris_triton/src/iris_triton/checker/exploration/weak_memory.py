"""Memory as weak as PTX allows: stores wait in a buffer of their program, and loads may return older values.

A store of a program is seen by itself at once and by others when it leaves the buffer: at a release, a fence, the end
of the program, before a later store to the same words, or when the seed says so.  What has left the buffers is kept in
a log with what it overwrote.  A load goes back in it, entry by entry, as far as the seed wants and the model allows:
not beyond a write that happens before the load, nor beyond one that a load has observed that happens before it
(causality order of the PTX ISA, "Memory Consistency Model").  Atomics read the newest value.  Clocks are those of
`checker.strands`; what a write hands over depends on scopes, as there, but for the write that was really read.

Weaker than this is PTX in one thing: loads do not wait for later stores of their own program ("load buffering").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from iris_triton import _compat
from iris_triton.checker.changes import GPU, MAX_WORDS, SYS
from iris_triton.checker.exploration.turns import ARENA, FIRST, NEXT, Turns
from iris_triton.checker.places import Heaps
from iris_triton.checker.shared import CLOCKS, Tables
from iris_triton.checker.strands import LaunchStrands, Strand, joined

_OBSERVERS = 6  # loads that are remembered for each entry; one more makes the entry known to all
SLOT, EPOCH, LOW, HIGH, SIZE, COUNT, AT, RANK, SCOPE, MODIFIES, APART, SYSTEM = range(12)
"""Columns of the log: who wrote, where (first byte, end), size of elements and how many (negative: one behind the
other), where its bytes are, from which rank with what scope (-1: weak), whether it has read what it overwrote, or
nothing orders the two, the clock that any rank may acquire; then those that each rank may acquire at scope gpu, and
pairs of slot and epoch of loads that have observed it."""

ENTRIES, ARENA_NBYTES = 4096, 64 << 20
WEAK = -1


def columns(places: int) -> int:
    """Return the number of columns of the log for a number of ranks."""
    return SYSTEM + 1 + places + 2 * _OBSERVERS


class Store(NamedTuple):
    """A store in the buffer: keys and addresses of its elements, their values, and what it hands over."""

    keys: Any
    addresses: Any
    values: Any
    scope: int
    clocks: Any

    def overlaps(self, low: int, high: int) -> bool:
        return bool((self.keys < high).any() and (self.keys + self.values.itemsize > low).any())


class Thread:
    """The things that a program of a launch has in its buffer and has heard; `rank` is whose GPU it runs on."""

    __slots__ = ("buffer", "fences", "heard", "heard_at", "is_late", "rank", "released", "strand")

    def __init__(self, strand: Strand, rank: int) -> None:
        self.strand, self.rank = strand, rank
        self.buffer: list[Store] = []
        self.fences: dict[int, int] = {}  # row of clocks of the last fence, by its scope
        self.heard: dict[int, list[int]] = {GPU: [], SYS: []}  # rows that a fence of that scope acquires
        self.heard_at: dict[int, list[tuple[int, int]]] = {}  # the same of single words, for acquires there
        self.released: dict[int, tuple[int, int]] = {}  # row and scope of the last release, by word
        self.is_late = False  # whether the last load may see something else when it is repeated


class WeakMemory:
    """The buffers, the log, and what the seed makes of them; `arrays` are "log", "arena" and "fences", shared."""

    def __init__(self, turns: Turns, tables: Tables, heaps: Heaps, arrays: dict[str, Any]) -> None:
        self.turns, self._tables, self._heaps = turns, tables, heaps
        self._log, self._arena, self._fences = arrays["log"], arrays["arena"], arrays["fences"]
        self._places = self._fences.size - 1
        self._observers = SYSTEM + 1 + self._places
        self._control = turns.control
        self.choose_rates()

    def choose_rates(self) -> None:
        """Let the seed say how weak memory is."""
        seed = self.turns.seed
        self._stale, self._drained = (1, 2, 3)[seed // 2 % 3], (0, 2, 8)[seed // 6 % 3]
        """Of 4 decisions, how many are for an older value; of 16 steps, in how many a store leaves a buffer."""

    def forget(self) -> None:
        """Forget the log, where everything that happened is known to all ranks and no kernel runs."""
        self._control[FIRST] = self._control[NEXT]
        self._fences[:] = 0
        self._tables.counters[CLOCKS] = 0

    def keys(self, addresses: Any) -> Any:
        return self._heaps.keys(addresses, self.turns.rank)

    # -- the buffer ----------------------------------------------------------------------------------------------------
    def store(self, thread: Thread, addresses: Any, values: Any, *, scope: int = WEAK, releases: bool = False) -> None:
        """Put a store into the buffer, or, if it releases, everything into memory."""
        keys = self.keys(addresses)
        if scope == WEAK:
            thread.buffer.append(Store(keys, addresses, values, WEAK, None))
            return
        if releases:
            self.drain(thread)
        for lane in range(keys.size):
            at = slice(lane, lane + 1)
            clocks = self._handed_over(thread, int(keys[lane]), scope, releases)
            thread.buffer.append(Store(keys[at], addresses[at], values[at], scope, clocks))
        if releases:
            self.drain(thread)
            thread.strand.tick(self._tables)

    def drain(self, thread: Thread) -> None:
        """Let all stores leave the buffer, in any order between different words."""
        while thread.buffer:
            self._let_out(thread, self.turns.draw(len(thread.buffer)))

    def _let_out(self, thread: Thread, number: int) -> None:
        """Let one store leave the buffer, and before it those to the same words that were made before."""
        chosen = thread.buffer[number]
        low, high = int(chosen.keys.min()), int(chosen.keys.max()) + chosen.values.itemsize
        for other in range(number):
            if thread.buffer[other].overlaps(low, high):
                self._let_out(thread, other)
                return
        del thread.buffer[number]
        self._write(thread, chosen)

    def let_some_out(self, launch: LaunchStrands) -> None:
        """Let a store of a thread leave its buffer, if the seed wants that."""
        if self._drained and self.turns.draw(16) < self._drained:
            full = [strand.thread for strand in launch.strands.values() if strand.thread.buffer]
            if full:
                thread = full[self.turns.draw(len(full))]
                self._let_out(thread, self.turns.draw(len(thread.buffer)))

    def let_waiting_out(self, thread: Thread) -> None:
        """Let the stores of a thread that polls in vain leave its buffer, each sooner or later."""
        for _ in range(len(thread.buffer)):
            if thread.buffer and self.turns.draw(2):
                self._let_out(thread, self.turns.draw(len(thread.buffer)))

    def settle(self, thread: Thread, low: int, high: int) -> None:
        """Let the stores to some bytes leave the buffer."""
        while found := [at for at, each in enumerate(thread.buffer) if each.overlaps(low, high)]:
            self._let_out(thread, found[0])

    def _write(self, thread: Thread, store: Store) -> None:
        is_apart = False
        if store.keys.size == 1:
            last = self._newest(int(store.keys[0]), store.values.itemsize)
            is_apart = last is not None and not self._is_ordered(thread, last, store.scope)
            if last is not None and self._write_before(thread, store, last):
                return
        everywhere = np.ones(store.values.shape, np.bool_)
        old = _compat.native.load(store.addresses, everywhere, np.zeros_like(store.values), store.values.dtype)
        _compat.native.store(store.addresses, store.values, everywhere)
        self._note(thread, store.keys, old, store.scope, store.clocks, is_apart=is_apart)

    def _write_before(self, thread: Thread, store: Store, last: int) -> bool:
        """Overwrite a word before the last write there, which nothing orders before this one, if the seed wants that.

        Memory stays as it is; the log, which is in the order in which words are overwritten, says that it was so.
        """
        size = store.values.itemsize
        if self.turns.draw(4):
            return False
        row = self._log[last % ENTRIES]
        theirs, old = self._entry(row)
        if row[MODIFIES] or row[SIZE] != size or theirs.size > 1 or self._is_known(thread, row):
            return False
        self._note(thread, store.keys, old.copy(), store.scope, store.clocks)
        if self._control[FIRST] > last:
            return True  # it has just left the log
        old[:] = store.values.view(np.uint8).reshape(old.shape)
        numbers = np.arange(last, self._control[NEXT]) % ENTRIES
        self._log[numbers] = self._log[np.roll(numbers, 1)]
        return True

    def _note(
        self, thread: Thread, keys: Any, old: Any, scope: int, clocks: Any, at_most: int = 1 << 62,
        *, modifies: bool = False, is_apart: bool = False
    ) -> None:  # fmt: skip
        """Append what was written to the log, with what was there before, unless it is too large."""
        self.turns.moved()
        size, count, control = old.nbytes // keys.size, keys.size, self._control
        is_run = count == 1 or bool((np.diff(keys) == size).all())
        nbytes = -(-(old.nbytes + (0 if is_run else keys.nbytes)) // 8) * 8
        low, high = (int(keys[0]), int(keys[-1])) if is_run else (int(keys.min()), int(keys.max()))
        if nbytes > ARENA_NBYTES // 8 or keys.size > at_most:
            for number in self._overlapping(low, high + size):  # too large to keep: others see it at once
                self._log[number % ENTRIES, EPOCH] = 0
            return
        at = int(control[ARENA])
        if at % ARENA_NBYTES + nbytes > ARENA_NBYTES:
            at = -(-at // ARENA_NBYTES) * ARENA_NBYTES
        number = int(control[NEXT])
        control[ARENA], control[NEXT] = at + nbytes, number + 1
        first = max(int(control[FIRST]), number + 1 - ENTRIES)
        while first < number and self._log[first % ENTRIES, AT] < at + nbytes - ARENA_NBYTES:
            first += 1
        control[FIRST] = first
        row = self._log[number % ENTRIES]
        row[:] = 0
        row[:SYSTEM] = (
            thread.strand.slot, thread.strand.epoch, low, high + size, size, -count if is_run else count, at,
            thread.rank, scope, modifies, is_apart,
        )  # fmt: skip
        if clocks is not None:
            row[SYSTEM : self._observers] = clocks
        place = at % ARENA_NBYTES
        self._arena[place : place + old.nbytes] = old.reshape(-1).view(np.uint8)
        if not is_run:
            self._arena[place + old.nbytes :][: keys.nbytes] = keys.view(np.uint8)

    # -- loads ---------------------------------------------------------------------------------------------------------
    def _overlapping(self, low: int, high: int) -> list[int]:
        """Numbers of the entries that touch a range, the newest first."""
        first, last = int(self._control[FIRST]), int(self._control[NEXT])
        if first == last:
            return []
        start, end = first % ENTRIES, first % ENTRIES + last - first
        parts = [(start, min(end, ENTRIES), first)] + [(0, end - ENTRIES, last - (end - ENTRIES))] * (end > ENTRIES)
        found: list[int] = []
        for begin, stop, number in parts:
            rows = self._log[begin:stop]
            found += (np.flatnonzero((rows[:, LOW] < high) & (rows[:, HIGH] > low)) + number).tolist()
        return found[::-1]

    def _entry(self, row: Any) -> tuple[Any, Any]:
        """Return the keys of an entry, and what it overwrote, a row of bytes for each."""
        size, count, place = int(row[SIZE]), int(row[COUNT]), int(row[AT]) % ARENA_NBYTES
        old = self._arena[place : place + size * abs(count)].reshape(-1, size)
        if count < 0:
            return np.arange(row[LOW], row[HIGH], size), old
        return self._arena[place + size * count :][: 8 * count].view(np.int64), old

    def _is_known(self, thread: Thread, row: Any) -> bool:
        """Whether a write, or a load that has observed it, happens before what a thread does now."""
        clock = thread.strand.clock
        if row[EPOCH] <= clock[row[SLOT]]:
            return True
        seen = row[self._observers :].reshape(-1, 2)
        return bool(((seen[:, 1] > 0) & (seen[:, 1] <= clock[seen[:, 0]])).any())

    def load(self, thread: Thread, addresses: Any, values: Any) -> None:
        """Replace values (flat, from memory) by what a weak load returns."""
        thread.is_late = False
        size = values.itemsize
        keys = self.keys(addresses)
        low, high = int(keys.min()), int(keys.max()) + size
        entries = self._overlapping(low, high)
        own = [store for store in thread.buffer if store.overlaps(low, high)]
        if not entries and not own:
            return
        data = values.view(np.uint8).reshape(-1, size)
        open_bytes = np.ones(data.shape, np.bool_)  # that may still become older
        for number in entries:
            row = self._log[number % ENTRIES]
            theirs, old = self._entry(row)
            mine, at = _matches(keys, size, theirs, int(row[SIZE]))
            going = open_bytes.reshape(-1)[mine]
            if not going.any():
                continue
            is_last = self._is_known(thread, row)
            if self.turns.draw(4) >= self._stale or (is_last and not row[APART]):
                open_bytes.reshape(-1)[mine] = False
                continue
            thread.is_late = True
            if mine.size > size and self.turns.draw(4) == 0:  # some elements only
                elements = np.random.default_rng(self.turns.draw(1 << 32)).random(keys.size) < 0.5
                stays = elements[mine // size]
                open_bytes.reshape(-1)[mine[stays]] = False
                going &= ~stays
            data.reshape(-1)[mine[going]] = old.reshape(-1)[at[going]]
            if is_last:  # one of two writes that are not ordered, and both happen before: either, but nothing older
                open_bytes.reshape(-1)[mine] = False
        for store in own:
            mine, at = _matches(keys, size, store.keys, store.values.itemsize)
            data.reshape(-1)[mine] = store.values.view(np.uint8).reshape(-1)[at]
            thread.is_late = True

    def load_word(self, thread: Thread, address: Any, value: Any, scope: int, *, acquires: bool) -> None:
        """As `load`, for one word and a load that is no weak one: no later load sees older than it observes."""
        thread.is_late = False
        key, size = int(self.keys(address)[0]), value.itemsize
        data = value.view(np.uint8)
        own = [store for store in thread.buffer if store.overlaps(key, key + size)]
        if own:
            mine, at = _matches(np.array([key]), size, own[-1].keys, own[-1].values.itemsize)
            if mine.size == size and self.turns.draw(4):
                data[mine] = own[-1].values.view(np.uint8).reshape(-1)[at]
                thread.is_late = True
                return
            self.settle(thread, key, key + size)
            data[:] = _raw(address, size)[0].view(np.uint8)
        for number in self._overlapping(key, key + size):
            row = self._log[number % ENTRIES]
            theirs, old = self._entry(row)
            mine, at = _matches(np.array([key]), size, theirs, int(row[SIZE]))
            if not mine.size:
                continue
            if self._is_known(thread, row) or self.turns.draw(4) >= self._stale:
                self._observe(thread, row, key, scope, acquires)
                return
            data[mine] = old.reshape(-1)[at]
            thread.is_late = True

    def _observe(self, thread: Thread, row: Any, key: int, scope: int, acquires: bool) -> None:
        """Record what a load that is not weak knows from now on: it has read a write."""
        if not _are_strong(thread, scope, row):
            return
        strand, tables = thread.strand, self._tables
        if row[SLOT] != strand.slot and not self._is_known(thread, row):
            seen = row[self._observers :].reshape(-1, 2)
            free = np.flatnonzero(seen[:, 1] == 0)
            if free.size:
                seen[free[0]] = strand.slot, strand.epoch
            else:
                row[EPOCH] = 0
        rows = [(SYS, int(row[SYSTEM])), (GPU, int(row[SYSTEM + 1 + thread.rank]))]
        rows = [(needed, each) for needed, each in rows if each]
        if acquires:
            for needed, each in rows + thread.heard_at.get(key, []):
                if scope >= needed:
                    strand.learn(tables.clocks[each], tables.clocks[each])
        else:
            for needed, each in rows:
                thread.heard[needed].append(each)
            if rows:
                thread.heard_at.setdefault(key, []).extend(rows)

    # -- atomics and fences --------------------------------------------------------------------------------------------
    def atomic(
        self, thread: Thread, addresses: Any, lanes: Any, size: int, run: Callable[[], Any], scope: int,
        *, acquires: bool, releases: bool, changed: Callable[[Any], Any], reads: bool = True
    ) -> Any:  # fmt: skip
        """Run an atomic operation on the newest values.

        `changed` says of its result which lanes have changed; without `reads` it is a store, which hands on nothing.
        """
        flat = addresses.reshape(-1)
        keys = self.keys(flat)
        if releases:
            self.drain(thread)
        elif lanes.size:
            self.settle(thread, int(keys[lanes].min()), int(keys[lanes].max()) + size)
        thread.is_late = False
        if lanes.size > MAX_WORDS:  # these are data
            result = run()
            self._note(thread, keys[lanes], np.zeros(lanes.size, f"i{size}"), WEAK, None, at_most=0)
            return result
        before = _raw(flat[lanes], size)
        newest = [self._newest(int(key), size) for key in keys[lanes]]
        last = newest[0] if lanes.size == 1 and reads else None
        if last is not None and not (self._is_ordered(thread, last, scope) or self.turns.draw(4)):
            row = self._log[last % ENTRIES]
            theirs, old = self._entry(row)
            if theirs.size == 1 and row[SIZE] == size:  # it does not see that write, which is lost
                _compat.native.store(flat[lanes], old.reshape(-1).view(before[0].dtype), np.ones(1, np.bool_))
                newest = [None]
        result = run()
        for key, last in zip(keys[lanes], newest, strict=True):
            if last is not None and reads:
                self._observe(thread, self._log[last % ENTRIES], int(key), scope, acquires)
        written = changed(result)
        for lane, old, last in zip(lanes.tolist(), before, newest, strict=True):
            if written[lane]:
                clocks = self._handed_over(thread, int(keys[lane]), scope, releases)
                if last is not None and reads:
                    row = self._log[last % ENTRIES]
                    if _are_strong(thread, scope, row):
                        both = zip(clocks, row[SYSTEM : self._observers].tolist(), strict=True)
                        clocks = [joined(self._tables, each) for each in both]
                self._note(thread, keys[lane : lane + 1], old, scope, clocks, modifies=reads)
        if releases:
            thread.strand.tick(self._tables)
        return result

    def _is_ordered(self, thread: Thread, number: int, scope: int) -> bool:
        """Whether a thread's write comes after an earlier one: it happens before, or the two are morally strong."""
        row = self._log[number % ENTRIES]
        return _are_strong(thread, scope, row) or self._is_known(thread, row)

    def _newest(self, key: int, size: int) -> int | None:
        for number in self._overlapping(key, key + size):
            row = self._log[number % ENTRIES]
            if _matches(np.array([key]), size, self._entry(row)[0], int(row[SIZE]))[0].size:
                return number
        return None

    def _handed_over(self, thread: Thread, key: int, scope: int, releases: bool) -> list[int]:
        """Rows of the clocks that a write hands over: to any rank, and to each one at scope gpu."""
        given = [(each, row) for each, row in thread.fences.items()]
        if releases:
            thread.released[key] = scope, thread.strand.release(self._tables)
        if key in thread.released:
            given.append(thread.released[key])
        clocks = [0] * (1 + self._places)
        clocks[0] = joined(self._tables, [row for each, row in given if each == SYS])
        clocks[1 + thread.rank] = joined(self._tables, [row for each, row in given if each >= GPU])
        return clocks

    def fence(self, thread: Thread, scope: int, kind: str) -> None:
        """Acquire what was heard, unless `kind` is "release", and release what was done, unless it is "acquire".

        Fences of kind "sc" have one order, for each scope.
        """
        strand, tables, is_sc = thread.strand, self._tables, kind == "sc"
        rows = [row for needed in (GPU, SYS) if scope >= needed for row in thread.heard[needed] if kind != "release"]
        places = [1 + thread.rank] * (scope >= GPU) + [0] * (scope == SYS)
        if is_sc:
            rows += [int(self._fences[place]) for place in places if self._fences[place]]
        for row in rows:
            strand.learn(tables.clocks[row], tables.clocks[row])
        if kind == "acquire":
            return
        self.drain(thread)
        thread.fences[scope] = strand.release(tables)
        if is_sc:
            for place in places:
                self._fences[place] = joined(tables, [int(self._fences[place]), thread.fences[scope]])
        strand.tick(tables)


def _are_strong(thread: Thread, scope: int, row: Any) -> bool:
    """Whether an operation of a thread and one in the log are morally strong: no weak ones, and in their scopes."""
    return bool(min(scope, row[SCOPE]) >= (GPU if row[RANK] == thread.rank else SYS))


def _raw(addresses: Any, size: int) -> list[Any]:
    """Return the integers at some addresses, as arrays of one element."""
    dtype = np.dtype(f"i{size}")
    found = _compat.native.load(addresses, np.ones(addresses.shape, np.bool_), np.zeros(addresses.shape, dtype), dtype)
    return [found[lane : lane + 1] for lane in range(found.size)]


def _matches(keys: Any, size: int, theirs: Any, their_size: int) -> tuple[Any, Any]:
    """Bytes that two arrays of elements share: indices into the bytes of each."""
    if size != their_size:
        return _matches(_bytes(keys, size), 1, _bytes(theirs, their_size), 1)
    order = np.argsort(theirs, kind="stable") if theirs.size > 1 and (np.diff(theirs) < 0).any() else None
    ordered = theirs if order is None else theirs[order]
    at = np.minimum(np.searchsorted(ordered, keys), theirs.size - 1)
    mine = np.flatnonzero(ordered[at] == keys)
    if size > 1 and not mine.size and (np.bitwise_or.reduce(keys) | np.bitwise_or.reduce(theirs)) % size:
        return _matches(_bytes(keys, size), 1, _bytes(theirs, size), 1)
    at = at[mine]
    return _bytes(mine * size, size), _bytes((at if order is None else order[at]) * size, size)


def _bytes(first: Any, size: int) -> Any:
    """All bytes of elements that begin at some bytes."""
    return (first[:, None] + np.arange(size)).reshape(-1)
