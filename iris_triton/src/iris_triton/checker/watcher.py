"""The checker of one context: what the executor, the heap, the ranks' exchanges and torch tell it, and what it decides.

An access is held against the history of the granules that it touches, and noted there.  Atomics run under the lock of
the tables, so that the clock of a word is always that of the value that was read.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from iris_core.heap.heap import SymmetricHeap
from iris_core.world import World
from iris_triton import _compat
from iris_triton.checker import changes, histories, reports
from iris_triton.checker.changes import ADD, CTA, GPU, MAX_WORDS, PLAIN, RMW, SET, SYS, Reader, Wait, Words
from iris_triton.checker.given_views import View, Views, watched
from iris_triton.checker.histories import Conflict
from iris_triton.checker.places import Heaps, Place, extent_of, place_of, range_of
from iris_triton.checker.shared import ALLOCATIONS, FAILED, GRANULE, WIDE, Side, Tables
from iris_triton.checker.sites import Sites, Undefined
from iris_triton.checker.strands import HOST, Host, LaunchStrands, Strand
from iris_triton.interpreter.memory.regions import registered_heaps
from iris_triton.interpreter.state import current, program_info

POISON = 0xFF  # what every byte of a new block holds: NaN in every floating-point type, -1 in integers
_SEM = _compat.ir.MEM_SEMANTIC
_SCOPES = {"CTA": CTA, "GPU": GPU}
_SCOPE_NAMES = ("cta", "gpu", "sys")
NEUTRAL = ("ADD", "FADD", "OR", "XOR")  # operations that change nothing where the operand is 0: polls


class Watcher:
    """Watches one context for the kinds of mistakes in `checks` ("races", "uninitialised", "bounds").

    Collective: every rank of the context makes one.

    Args:
        path: file to which findings are appended, one JSON object a line; the program goes on.  Without it the first
            finding is raised.
        timeline: whether this rank's last accesses are appended, too, when it closes.
        seed: of the schedule, for reports.
    """

    def __init__(
        self, checks: Sequence[str], heap: SymmetricHeap, world: World, path: str | None, timeline: bool = False,
        seed: int | str | None = None
    ) -> None:  # fmt: skip
        self._seed = seed
        self._checks, self._heap, self._path = frozenset(checks), heap, path
        self.follows_accesses = bool(self._checks - {"bounds", "schedules"})
        self._rank, self._bases = world.rank, heap.heap_bases
        self.heaps = Heaps(self._bases, heap.nbytes)
        self.tables = Tables(world, heap.nbytes)
        self._histories, self._words = histories.Histories(self.tables), Words(self.tables, world.rank)
        self._sites, self._undefined = Sites(self.tables), Undefined()
        self.host = Host(self.tables, world)
        self.before_exchange, self.after_exchange = self.host.before_exchange, self.host.after_exchange
        self._allocations = 0
        self._said: set[Any] = set()
        self._steps = reports.Steps() if timeline and path else None
        self._freed: dict[int, Any] = {}  # storages of freed blocks that still exist: weak reference, name and offset
        self._storages: dict[int, Any] = {}  # the same of live blocks
        whole = [(ctypes.c_uint32 * (heap.nbytes // GRANULE)).from_address(base) for base in self._bases]
        self._memory = [np.frombuffer(memoryview(each), np.uint32) for each in whole]

    # -- programs ------------------------------------------------------------------------------------------------------
    def views(self) -> Views | None:
        """Return what pointers of a launch are numbered by, before its arguments are converted."""
        is_far = any(heap.rank not in ranks for heap in registered_heaps() for ranks in heap.nodes)
        return Views(self._say_beyond) if "bounds" in self._checks and not is_far else None

    def dialect(self, dialect: Any) -> Any:
        """Return the dialect that a kernel runs by while it is checked."""
        return dialect.with_operators(watched) if "bounds" in self._checks else dialect

    def launch(self, state: Any, arguments: dict[str, Any]) -> LaunchStrands | None:
        if not self.follows_accesses:
            return None
        for name, value in arguments.items():
            if hasattr(value, "untyped_storage"):
                self.check_alive(value, f"argument {name!r} of kernel {state.kernel!r}")
        return LaunchStrands(self.tables, self._rank, self.host, state.grid)

    @staticmethod
    def strand() -> Strand | None:
        strands = current.launch.watch
        return None if strands is None else strands.strands[current.program.pid]  # None: it began before the checker

    def load(self, access: str, region: Any, indices: Any, addresses: Any, mask: Any, itemsize: int) -> None:
        """Check a plain load, before it; `indices` of the active elements if they lie in one region."""
        places = self._places(region, indices, addresses, mask, itemsize)
        strand = self.strand() if places else None
        if strand is not None:
            self._note(strand, self._sites.of_kernel(access), places, [])

    def store(self, region: Any, indices: Any, addresses: Any, mask: Any, itemsize: int) -> Callable[[], None] | None:
        """As `load`, before a plain store; returns what is to be called after it, if anything."""
        places = self._places(region, indices, addresses, mask, itemsize)
        strand = self.strand() if places else None
        if strand is None:
            return None
        site = self._sites.of_kernel("store")
        words = self._note(strand, site, [], places)
        return partial(self._stored, strand, words, site) if words else None

    def _places(self, region: Any, indices: Any, addresses: Any, mask: Any, itemsize: int) -> list[Place]:
        if region is None or indices is None:
            return self.heaps.find(addresses, mask, itemsize)
        rank = region.heap_rank
        if rank is None or not indices.size:
            return []
        start = region.start - self._bases[rank]
        if not 0 <= start < self.heaps.nbytes or rank >= len(self._bases):
            return []  # another context's
        return [place_of(rank, indices.astype(np.int64, copy=False) * itemsize + start, itemsize)]

    def undefined(self, dtype: Any) -> Any:
        """Return what lanes of a load get that its mask leaves out and that have no `other`; None for 0."""
        return self._undefined.fill(dtype, self._sites.of_kernel("load")) if "uninitialised" in self._checks else None

    def using(self, data: Any, mask: Any, access: str) -> None:
        """Report values that no load has filled, among those that the active elements of an access write."""
        is_used, load = self._undefined.find(data, mask) if "uninitialised" in self._checks else (False, None)
        if is_used:
            other = None if load is None else self._running(load)
            how = "Give the load an `other`, or mask what uses it."
            one = self._running(self._sites.of_kernel(access))
            self._say(reports.UNDEFINED, one, other, self._rank, "", 0, 0, how)

    def poll(self, addresses: Any, mask: Any, seen: Any) -> None:
        """Record a volatile load, which is a relaxed atomic one.

        Words may have changed since: what counts is the earliest change to the value that was seen.
        """
        strand = self.strand()
        if strand is None:
            return
        site = self._sites.of_kernel("volatile load")
        with self.tables:
            if seen.dtype.kind in "iu" and seen.itemsize >= GRANULE and seen.size <= MAX_WORDS:
                before, strand.operation = strand.operation, ("look", "eq", seen.reshape(-1))
                self._read_words(strand, addresses, mask, seen, False, SYS, site)
                strand.operation = before
            what = histories.ATOMIC_READ | histories.form(seen.itemsize, 0, is_wide=True)
            for place in self.heaps.find(addresses, mask, seen.itemsize):
                self._access(strand, place, what, site)

    def rmw(self, run: Callable[[], Any], op: Any, addresses: Any, values: Any, mask: Any, sem: Any, scope: Any) -> Any:
        """Run an atomic operation; returns the old values."""
        strand = self.strand()
        if strand is None:
            return run()
        is_load = op.name in NEUTRAL and not values.any()
        is_set = op.name == "XCHG" and strand.operation == ("set",)
        kind = SET if is_set else ADD if op.name == "ADD" else RMW
        is_typed = op.name in ("ADD", "FADD", "XCHG") and not is_load
        number = (histories.INTEGER if values.dtype.kind in "iu" else histories.FLOAT) if is_typed else 0
        are_words = values.dtype.kind in "iu" or op.name == "XCHG"

        def meaning(old: Any) -> tuple[Any, int, Any, bool]:
            if is_load and are_words and strand.operation is None:  # a poll by hand: the first change to it counts
                strand.operation = "look", "eq", old.reshape(-1).view(f"i{old.itemsize}")
            return None if is_load else mask, kind, mask, are_words

        name = f"atomic_{op.name.lower()}"
        return self._atomic(strand, run, name, addresses, values.itemsize, number, sem, scope, meaning)

    def cas(self, run: Callable[[], Any], addresses: Any, expected: Any, desired: Any, sem: Any, scope: Any) -> Any:
        """Run a compare-and-swap; returns the old values.  One that changes nothing is a load."""
        strand = self.strand()
        if strand is None:
            return run()
        everywhere = np.ones(addresses.shape, np.bool_)

        def meaning(old: Any) -> tuple[Any, int, Any, bool]:
            swapped = (old.view(expected.dtype) == expected) & (expected != desired)
            if not swapped.any() and strand.operation is None:
                strand.operation = "look", "eq", expected.reshape(-1)
            return (swapped if swapped.any() else None), RMW, everywhere, True

        return self._atomic(strand, run, "atomic_cas", addresses, expected.itemsize, 0, sem, scope, meaning)

    def _atomic(
        self, strand: Strand, run: Callable[[], Any], name: str, addresses: Any, itemsize: int, number: int, sem: Any,
        scope: Any, meaning: Callable[[Any], tuple[Any, int, Any, bool]]
    ) -> Any:  # fmt: skip
        """`meaning` says of the old values: lanes that change (None for a load), how, active lanes, whether words.

        It may change the operation of the strand, for this one; `number` is that of `form`.
        """
        reach, operation = reach_of(scope), strand.operation
        bits = histories.form(itemsize, number, is_wide=reach == SYS)
        order = getattr(sem, "name", "RELAXED").lower().replace("acquire_release", "acq_rel")
        site = self._sites.of_kernel(f"{name} ({order}, {_SCOPE_NAMES[reach]})")
        with self.tables as tables:
            old = run()
            changed, kind, active, are_words = meaning(old)
            are_words = are_words and itemsize >= GRANULE
            if are_words and old.size > MAX_WORDS:
                are_words, tables.counters[WIDE] = False, 1
            if are_words and kind != SET:
                strand.past = strand.clock.copy()
                self._read_words(strand, addresses, active, old, acquires(sem), reach, site)
            for place in self.heaps.find(addresses, active if changed is None else changed, itemsize):
                reads = changed is not None and kind != SET and name != "atomic_xchg"
                what = bits | (histories.ATOMIC_READ if changed is None else histories.ATOMIC_WRITE)
                self._access(strand, place, what, site, reads=reads)
            strand.past = None
            if are_words and changed is not None:
                is_release = releases(sem)
                for lane in np.flatnonzero(changed):
                    address = int(addresses.reshape(-1)[lane])
                    before = int(old.reshape(-1).view(f"i{itemsize}")[lane])
                    word = self._word(address)
                    now = int.from_bytes(ctypes.string_at(address, itemsize), sys.byteorder, signed=True)
                    overtaken = self._words.change(
                        strand, word, kind, now, before, releases=is_release, scope=reach, site=site
                    )
                    if overtaken is not None and isinstance(word, tuple) and "races" in self._checks:
                        wait, last = overtaken
                        me, first = Side(site, strand.program, strand.slot), word[1] * GRANULE
                        how = reports.OVERTAKEN.format(self._side(last))
                        self._found(reports.COUNTER, me, wait, word[0], first, first + itemsize - 1, how)
                if is_release:
                    strand.tick(tables)
        strand.operation = operation
        return old

    def _word(self, address: int) -> changes.Word:
        found = self.heaps.rank_of(address)
        return address if found is None else (found[0], found[1] // GRANULE)

    def _read_words(
        self, strand: Strand, addresses: Any, mask: Any, seen: Any, acquires: bool, scope: int, site: int
    ) -> None:
        by = Reader(strand, acquires, scope, site)
        operation = strand.operation
        lanes = np.arange(seen.size) if mask is None else np.flatnonzero(mask)
        values, places = seen.reshape(-1).view(f"i{seen.itemsize}"), addresses.reshape(-1)
        what, cmp, expected = operation if operation is not None and len(operation) > 1 else ("", "", None)
        if expected is not None:
            holds = np.broadcast_to(changes.HOLDS[cmp](values, expected), values.shape)[lanes]
            if what == "wait" and not holds.all():
                return  # another look may see something else: nothing can rely on this one
            lanes = lanes[holds][: 1 if what == "any" else None]
        for lane in lanes:
            wait = None if expected is None else Wait(cmp, int(expected[lane if expected.size > 1 else 0]))
            self._words.read(by, self._word(int(places[lane])), int(values[lane]), wait)

    def _note(self, strand: Strand, site: int, read: list[Place], written: list[Place]) -> list[tuple[int, int, int]]:
        """Check plain accesses; return the words (rank, granule, value) written that atomics have changed before."""
        found = []
        with self.tables:
            for place in read:
                self._access(strand, place, histories.READ, site)
            for place in written:
                self._access(strand, place, histories.WRITE, site)
            for place in written:
                last = self.tables.words[place.rank][place.granules]
                if last.any():
                    for granule in _indices(place.granules)[last != 0].tolist():
                        found.append((place.rank, granule, self._value_of(place.rank, granule)))
        return found

    def _value_of(self, rank: int, granule: int) -> int:
        return int(self._memory[rank][granule : granule + 1].view(np.int32)[0])

    def _stored(self, strand: Strand, words: list[tuple[int, int, int]], site: int) -> None:
        """Record a plain store to words: what was handed over there before is gone."""
        with self.tables:
            for rank, granule, old in words:
                new = self._value_of(rank, granule)
                self._words.change(strand, (rank, granule), PLAIN, new, old, releases=False, scope=CTA, site=site)

    def fence(self, assembly: str) -> None:
        """Record a fence: what relaxed reads have seen is acquired, and later relaxed stores release."""
        strand = self.strand()
        if strand is None:
            return
        scope = fence_scope(assembly)
        if scope is None:
            return
        with self.tables as tables:
            if strand.heard is not None:
                strand.learn(strand.heard, strand.heard)
                strand.heard = None
            strand.fence = strand.release(tables), scope
            strand.tick(tables)

    # -- the host ------------------------------------------------------------------------------------------------------
    def host_operation(self, run: Callable[[], Any], name: str, read: list[Place], written: list[Place]) -> Any:
        """Run an operation of torch that reads and writes these places of the heap; returns its result."""
        site = self._sites.of_host(name)
        words = self._note(self.host, site, read, written)
        result = run()
        self._stored(self.host, words, site)
        return result

    # -- the heap ------------------------------------------------------------------------------------------------------
    def allocated(self, offset: int, nbytes: int, storage: Any) -> None:
        """Record an allocation, on every rank; the first one that comes makes the block unwritten on all."""
        import torch.multiprocessing.reductions as weak

        self._allocations += 1
        weakref = weak.StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._storages[storage._cdata] = weakref, *self._block_at(offset)
        self._freed.pop(storage._cdata, None)
        if len(self._storages) > 4096:
            self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
            self._freed = {key: each for key, each in self._freed.items() if not each[0].expired()}
        with self.tables as tables:
            if tables.counters[ALLOCATIONS] >= self._allocations:
                return
            tables.counters[ALLOCATIONS] = self._allocations
            if not nbytes:
                return
            granules = range_of(0, offset, nbytes).granules
            tables.words[:, granules] = 0
            if "uninitialised" in self._checks:
                for base in self._bases:
                    ctypes.memset(base + offset, POISON, nbytes)
                tables.cells[:, granules] = histories.UNWRITTEN
            else:
                tables.cells[:, granules] = 0

    def freed(self, storage: int) -> None:
        """Record that a block is freed, with the identity of its storage."""
        found = self._storages.pop(storage, None)
        if found is not None:
            self._freed[storage] = found

    def check_alive(self, tensor: torch.Tensor, what: str) -> None:
        """Report the use of a tensor whose block was freed."""
        if not self._freed:
            return
        found = self._freed.get(tensor.untyped_storage()._cdata)
        if found is None:
            return
        where = self.heaps.rank_of(tensor.data_ptr())
        if where is not None:
            one = self._side(Side(self._sites.of_host(what), HOST, self.host.slot))
            how = "Its bytes may belong to another tensor by now: free it after its last use."
            _, block, start = found
            first, nbytes = where[1] - start, tensor.numel() * tensor.element_size()
            self._say(reports.FREED, one, None, where[0], block, first, first + nbytes - 1, how)

    # -- the check -----------------------------------------------------------------------------------------------------
    def _access(self, strand: Strand, place: Place, kind: int, site: int, reads: bool | None = None) -> None:
        """Hold an access against the history, and note it.  The caller holds the lock."""
        failed = int(self.tables.counters[FAILED])
        if failed and failed != self._rank + 1:
            text = bytes(self.tables.message).rstrip(b"\0").decode(errors="replace")
            raise reports.CheckError(f"rank {failed - 1} has found a mistake, which ends the check: {text}")
        reads = not kind & 1 if reads is None else reads
        if self._steps is not None:
            self._steps.access(strand.program, site, place.rank, *extent_of(place.granules))
        if isinstance(place.masks, int):
            self._update(strand, place.rank, place.granules, kind, place.masks, site, reads)
            return
        granules = _indices(place.granules)
        for mask in histories.different(place.masks):
            self._update(strand, place.rank, granules[place.masks == mask], kind, mask, site, reads)

    def _update(self, strand: Strand, rank: int, granules: Any, kind: int, mask: int, site: int, reads: bool) -> None:
        cells = self.tables.cells[rank]
        now = cells[granules]
        new: dict[int, int] = {}
        is_changed = False
        for number in histories.different(now):
            key = number, kind, mask, site
            after = strand.next.get(key)
            if after is None:
                self._check(strand, rank, granules, now, number, kind, mask, site, reads)
                after = strand.next[key] = self._histories.after(number, kind, mask, strand, site)
            new[number] = after
            is_changed |= after != number
        if is_changed:
            cells[granules] = after if len(new) == 1 else histories.replaced(now, new)

    def _check(
        self, strand: Strand, rank: int, granules: Any, now: Any, number: int, kind: int, mask: int, site: int,
        reads: bool,
    ) -> None:  # fmt: skip
        me, missing = Side(site, strand.program, strand.slot), mask & ~self._histories.get(number).written
        if reads and missing and "uninitialised" in self._checks:
            here = _indices(granules)[now == number]
            bits = np.uint32(sum(POISON << 8 * byte for byte in range(GRANULE) if missing >> byte & 1))
            unwritten = here[self._memory[rank][here] & bits == bits]  # unreported accesses may have written it
            if unwritten.size:
                how = "Write it before, for example by ctx.zeros, or mask the load."
                self._found(reports.UNINITIALISED, me, None, rank, *extent_of(unwritten, missing), how)
        if "races" in self._checks:
            for conflict in self._histories.conflicts(number, kind, mask, strand)[:4]:
                here = extent_of(_indices(granules)[now == number], mask)
                self._found(reports.RACE, me, conflict.side, rank, *here, self._missing(strand, conflict, kind))

    def _found(self, kind: str, one: Side, other: Side | None, rank: int, first: int, last: int, how: str) -> None:
        """Report bytes of a rank's heap, by their offsets in it."""
        own = self._bases[self._rank]
        for benign in reports.benign_ranges:
            if kind == reports.RACE and benign.start <= own + first and own + last < benign.start + benign.nbytes:
                benign.count += 1
                return
        block, start = self._block_at(first)
        two = None if other is None else self._side(other)
        self._say(kind, self._side(one), two, rank, block, first - start, last - start, how)

    def _block_at(self, offset: int) -> tuple[str, int]:
        """Return the name of the block at an offset of the heap, and where it begins."""
        for block in self._heap.live_blocks():
            if block.offset_bytes <= offset < block.offset_bytes + max(block.nbytes, 1):
                return block.label, block.offset_bytes
        return "", 0

    def _say_beyond(
        self, view: View, access: str, rank: int | None, address: int, first: int, last: int, has_wrapped: bool
    ) -> None:
        place, what = self.heaps.rank_of(address), ""
        if place is not None:
            block, start = self._block_at(place[1])
            what = f"At {address:#x} is byte {place[1] - start} of {block or 'the heap'}. "
        kind, how = reports.BOUNDS, f"{what}Mask the access, or give the kernel the tensor that it means."
        if has_wrapped:
            kind, how = reports.WRAPPED, "Make one of its terms tl.int64, before they are multiplied or added."
        one, name = self._running(self._sites.of_kernel(access)), f"argument {view.name!r} ({view.text})"
        self._say(kind, one, None, self._rank if rank is None else rank, name, first, last, how)

    def _side(self, side: Side) -> reports.Access:
        program = None if side.program == HOST else side.program
        return reports.Access(**self._sites.describe(side.site), rank=side.rank, program=program)

    def _running(self, site: int) -> reports.Access:
        return self._side(Side(site, program_info().linear_id, self.host.slot))

    def _missing(self, strand: Strand, other: Conflict, kind: int) -> str:
        """Say what would order an earlier access before the present one."""
        if kind & other.kind & 2:
            return reports.MIXED
        rank = other.side.rank
        scope = "scope gpu or sys" if rank == self._rank else "sys"
        for seen in reversed(strand.unheeded.values()):
            found = self._words.why(seen, other.side.slot, other.epoch)
            if found is not None:
                reader = self._side(Side(seen.by.site, strand.program, strand.slot))
                name = "store" if kind & 1 else "load"
                why = reports.REASONS[found[1]].format(scope=scope, reader=reader, kind=name)
                return f"T{str(self._side(found[0]))[1:]} {why}."
        if self.tables.counters[WIDE]:
            return reports.TOO_WIDE.format(MAX_WORDS)
        if other.side.program == HOST or strand.program == HOST:
            return "Call ctx.barrier() between the two."
        if rank == self._rank:
            return "Order the two programs by a signal and a wait (scope gpu is enough), or put them into two launches."
        return (
            "Nothing is signalled after the first that is awaited before the second: signal (release, scope sys) and "
            "wait (acquire, scope sys), or put a barrier between them."
        )

    def _say(self, *fields: Any) -> None:
        """Report a finding: the fields of `Report` but its seed."""
        report = replace(reports.Report(*fields), seed=self._seed)
        if report.key in self._said:
            return
        self._said.add(report.key)
        if self._path is None:
            with self.tables as tables:
                if not tables.counters[FAILED]:
                    tables.put_text(tables.message, str(report))
                    tables.counters[FAILED] = self._rank + 1
            raise reports.ERRORS[report.kind](str(report), report)
        if self._steps is not None:
            self._steps.finding(report)
        with self.tables, open(self._path, "a") as file:
            file.write(report.as_json() + "\n")

    def close(self) -> None:
        """Write the heap's benign ranges into the file of findings, forget them, and give the tables back."""
        heap = range(base := self._bases[self._rank], base + self.heaps.nbytes)
        declared = [each for each in reports.benign_ranges if each.start in heap]
        reports.benign_ranges[:] = [each for each in reports.benign_ranges if each.start not in heap]
        if self._path is not None and (declared or self._steps is not None):
            with self.tables, open(self._path, "a") as file:
                file.writelines(each.as_json(self._rank) + "\n" for each in declared)
                if self._steps is not None:
                    file.write(self._steps.as_json(self._rank, self._sites.describe) + "\n")
        self.tables.close()


def reach_of(scope: Any) -> int:
    """Return the scope that the IR's name of one stands for: the system by default."""
    return _SCOPES.get(getattr(scope, "name", ""), SYS)


def acquires(sem: Any) -> bool:
    """Whether a memory order of the IR acquires."""
    return sem in (_SEM.ACQUIRE, _SEM.ACQUIRE_RELEASE)


def releases(sem: Any) -> bool:
    """Whether a memory order of the IR releases."""
    return sem in (_SEM.RELEASE, _SEM.ACQUIRE_RELEASE)


def fence_scope(assembly: str) -> int | None:
    """Return the scope of a fence; None for those of proxies alone."""
    words = assembly.partition(";")[0].split(".")
    if "proxy" in words:
        return None
    return next((_SCOPE_NAMES.index(each) for each in words if each in _SCOPE_NAMES), None)


def _indices(granules: Any) -> Any:
    return np.arange(granules.start, granules.stop) if isinstance(granules, slice) else granules
