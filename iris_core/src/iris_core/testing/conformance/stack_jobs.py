"""Jobs that the stack suite runs on ranks: each returns the problems, as sentences; none if the backend is right.

`call_all` calls every device function; plain Python computes what must come of it.  Every rank works on the next one,
so each memory has one writer and each result is known; in a world of one the rank works on itself.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from iris_core.errors import DeviceTimeoutError
from iris_core.testing.conformance import oracle

_LATE_S = 0.05  # how long one rank lets the others wait, in many turns


@dataclass(frozen=True)
class Setup:
    """Plugins of a suite and where they run, as ranks need them."""

    allocator: str
    backend: str
    device: str  # "cpu" or "cuda"
    ranks: int
    tested: str  # module of the programs of a stack, or name of the collective
    timeout_s: float | None = None  # bound of the waits in kernels
    in_float32: bool = True  # a collective adds up half-precision numbers in single precision
    check: tuple[str, ...] = ()  # what the checker looks for, see `Iris`

    def open(self) -> Any:
        """Open a context on this rank."""
        from iris_core import Iris

        places: dict[str, Any] = {"allocator": self.allocator, "backend": self.backend, "device": self.device}
        return Iris("64MiB", **places, device_timeout=self.timeout_s, check=self.check or None)


class Rank:
    """One rank of a stack: runs programs together with the others, and notes what is wrong as sentences, `problems`."""

    def __init__(self, ctx: Any, stack: Setup) -> None:
        self.ctx = ctx
        self.programs: Any = importlib.import_module(stack.tested)
        self.timeout_s = stack.timeout_s
        self.me, self.world = ctx.cur_rank, ctx.num_ranks
        self.peer = (self.me + 1) % self.world
        self.problems: list[str] = []
        self._what = ""

    def note(self, problem: str) -> None:
        """Note what is wrong with the program that was run last."""
        self.problems.append(f"{self._what}, rank {self.me}: {problem}")

    def tensor(self, values: Sequence[int], dtype: str = "int32") -> torch.Tensor:
        """Allocate a symmetric tensor with these values on this rank."""
        out: torch.Tensor = self.ctx.empty(len(values), dtype=getattr(torch, dtype))
        return out.copy_(torch.tensor(values, dtype=out.dtype))

    @contextlib.contextmanager
    def together(self, what: str, slow: int | None = None) -> Iterator[None]:
        """Begin with the other ranks, except for a slow one (modulo the number of ranks), and wait for all at the end.

        A rank that does not wait for the slow one computes with old data.  Errors are noted: the other ranks go on.
        """
        self._what = what
        self.ctx.barrier()
        if slow is not None and self.me == slow % self.world:
            time.sleep(_LATE_S)
        try:
            yield
            if self.ctx.device != "cpu":
                torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - whatever a program raises; the others must not wait for this rank
            self.note(traceback.format_exc())
        try:
            self.ctx.barrier()
        except DeviceTimeoutError:  # raised after all ranks have arrived, so they stay in step
            self.note(traceback.format_exc())

    def read(self, tensor: torch.Tensor, rank: int) -> list[int]:
        """Return a rank's part of a symmetric tensor, as raw memory at a translated address shows it."""
        bases = self.ctx.heap.heap_bases
        there = bases[rank] + tensor.data_ptr() - bases[self.me]
        raw = oracle.read_bytes(there, tensor.nbytes, self.ctx.device)
        return torch.frombuffer(bytearray(raw), dtype=tensor.dtype).tolist()

    def check(self, tensor: torch.Tensor, expected: Sequence[list[int]]) -> None:
        """Compare a symmetric tensor with what it should be on each rank, as raw memory and as torch has it."""
        raw = [(rank, "", self.read(tensor, rank)) for rank in range(self.world)]
        for rank, where, found in [*raw, (self.me, " in torch", tensor.flatten().tolist())]:
            pairs = enumerate(zip(found, expected[rank], strict=True))
            wrong = [f"{i}: {got} instead of {right}" for i, (got, right) in pairs if got != right]
            if wrong:
                self.note(f"memory of rank {rank}{where}: {len(wrong)} words, the first at {wrong[0]}")


def on_rank(stack: Setup, needs: str, job: Callable[..., Any], *arguments: Any) -> Any:
    """Open a context, call job(rank, *arguments), and leave it together; return `needs` if the backend lacks that."""
    with stack.open() as ctx:
        if needs and needs not in ctx.backend.device_api() and not hasattr(ctx.backend, needs):
            return needs
        result = job(Rank(ctx, stack), *arguments)
        ctx.barrier()  # others may look at this rank's memory until they are here
        return result


def give_up(rank: Rank) -> list[str]:
    """Wait in a kernel for a flag that no rank raises: the launch raises, or the next barrier does, once."""
    flag, found = (rank.tensor([0], "int64") for _ in range(2))
    rank.ctx.barrier()
    raised = []
    launch = functools.partial(rank.programs.await_flag, rank.ctx, "method", "ge", flag, 0, 1, found)
    for number, step in enumerate((lambda: launch(rank.timeout_s), rank.ctx.barrier, rank.ctx.barrier)):
        try:
            step()
        except DeviceTimeoutError:
            raised.append(number)
    if raised not in ([0], [1]):
        rank.note(f"of the launch and two barriers, DeviceTimeoutError was raised by {raised}, and not by 0 or 1")
    return rank.problems


def self_test(rank: Rank) -> tuple[list[Any], list[str]]:
    """Run the backend's self-test, as `iris doctor` does; return its checks, and the operations that it announced."""
    begun: list[str] = []
    return list(rank.ctx.backend.self_test(rank.ctx, lambda op, peer: begun.append(op))), begun


# -- calls of every device function -----------------------------------------------------------------------------------
FORMS = ("function", "method")
"""Ways to call: with ranks and heap bases, or a DeviceContext's; `call_all` has "host", too: `ctx.device_barrier`."""

MOVES = ("load", "store", "get", "put", "copy")
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "atomic_add": operator.add, "atomic_sub": operator.sub, "atomic_xchg": lambda old, val: val,
    "atomic_xor": operator.xor, "atomic_and": operator.and_, "atomic_or": operator.or_,
    "atomic_min": min, "atomic_max": max,
}  # fmt: skip
ATOMICS = (*OPERATIONS, "atomic_cas")
SIGNALS = ("signal", "put_signal")
LOOKS = ("wait_any", "test", "load_acquire")
OPS = ("set", "add")
WAITS = {"eq": (3, 5, 5), "ne": (5, 4, 5), "gt": (5, 6, 5), "ge": (4, 5, 5), "lt": (5, 4, 5), "le": (6, 5, 5)}
"""By comparison: a flag before and after a signal, and what it is compared with; it holds afterwards only."""

_LANES = 256  # elements of a block
_MASK = [int(i % 3 != 1) for i in range(_LANES)]
_UNTOUCHED, _OTHER = -7, 77  # what targets are filled with before a call, and what a load returns where its mask is 0
_NOTHING = [_UNTOUCHED] * _LANES
_FLAG = 40  # before a signal
_PROGRAMS = 13  # of each rank that change the same word of each rank; four ranks have 52 bits of it


def call_all(rank: Rank, form: str) -> list[str]:
    """Call every device function in one form; return what is wrong, errors too: ranks go on with the next one."""
    for name in ("barrier",) if form == "host" else NAMES:
        _CALLS[name](rank, form, name)
    return rank.problems


# -- loads, stores and copies -----------------------------------------------------------------------------------------
def _data(rank: int) -> list[int]:
    """Return a rank's source data; no two elements of any ranks are equal."""
    return [1000 * (rank + 1) + i for i in range(_LANES)]


def _move(rank: Rank, form: str, name: str) -> None:
    """Read from the next rank or write to it; `copy` reads from the next rank and writes to the one after."""
    source, far = rank.tensor(_data(rank.me)), (rank.me + 2) % rank.world
    step = 1 if name in ("load", "get") else -1
    off = _OTHER if name == "load" else _UNTOUCHED
    for mask in ([1] * _LANES, _MASK):
        target, lanes = rank.tensor(_NOTHING), rank.tensor(mask) if mask is _MASK else None
        with rank.together(f"{name}, masked: {mask is _MASK}"):
            rank.programs.move(rank.ctx, form, name, source, target, lanes, _OTHER, rank.peer, far)
        data = [_data((each + step) % rank.world) for each in range(rank.world)]
        rank.check(target, [[value if on else off for value, on in zip(row, mask, strict=True)] for row in data])


# -- atomics ----------------------------------------------------------------------------------------------------------
def _calls_on(target: int) -> list[tuple[int, int, int]]:
    """Return a rank's words, of both signs, what is passed for each, and what atomic_cas expects: half are right."""
    cells = [(37 * i + 11 * target) % 101 - 50 for i in range(_LANES)]
    return [(cell, (53 * i + 29 * target) % 97 - 48, cell + i % 2) for i, cell in enumerate(cells)]


def _changed(name: str, old: int, val: int, cmp: int) -> int:
    if name == "atomic_cas":
        return val if old == cmp else old
    return OPERATIONS[name](old, val)


def _atomic(rank: Rank, form: str, name: str) -> None:
    """Change a block of words of the next rank, then one word of each rank."""
    calls = [_calls_on(each) for each in range(rank.world)]
    before = [[cell for cell, _, _ in row] for row in calls]
    operands, compares = (rank.tensor([call[which] for call in calls[rank.peer]]) for which in (1, 2))
    for masked in (False, True):
        mask = _MASK if masked and name != "atomic_cas" else [1] * _LANES  # atomic_cas has no mask
        cells, found = rank.tensor(before[rank.me]), rank.tensor(_NOTHING)
        lanes = rank.tensor(_MASK) if masked else None
        with rank.together(f"{name}, masked: {masked}"):
            rank.programs.change(rank.ctx, form, name, cells, operands, compares, found, lanes, rank.peer)
        rank.check(cells, [
            [_changed(name, *call) if on else call[0] for call, on in zip(row, mask, strict=True)] for row in calls
        ])  # fmt: skip
        returned = before[1:] + before[:1]
        rank.check(found, [[v if on else _UNTOUCHED for v, on in zip(row, mask, strict=True)] for row in returned])
    _contend(rank, form, name)


def _contend(rank: Rank, form: str, name: str) -> None:
    """Change one word of each rank by many programs of all ranks."""
    first = -1 if name == "atomic_and" else 0
    operands, compares = (rank.tensor(each, "int64") for each in _contributions(name, rank.me))
    cell, found = rank.tensor([first], "int64"), rank.tensor([_UNTOUCHED] * (rank.world * _PROGRAMS), "int64")
    with rank.together(f"{name} of many programs"):
        rank.programs.contend(rank.ctx, form, name, cell, operands, compares, found)
    mine = slice(rank.me * _PROGRAMS, (rank.me + 1) * _PROGRAMS)
    calls: list[tuple[int, int, int]] = []
    for each in range(rank.world):
        calls += zip(rank.read(found, each)[mine], *_contributions(name, each), strict=True)
    changes = [(old, new) for old, val, cmp in calls if old != (new := _changed(name, old, val, cmp))]
    final = rank.read(cell, rank.me)[0]
    # in any order, the calls that change the word lead from one value to the next, from the first to the last one
    if not changes or Counter([first, *(new for _, new in changes)]) != Counter([*(old for old, _ in changes), final]):
        rank.note(f"the word is {final}, and calls that have changed it returned {sorted(old for old, _ in changes)}")
    elif name not in ("atomic_cas", "atomic_xchg"):
        right = functools.reduce(OPERATIONS[name], [val for _, val, _ in calls], first)
        if final != right:
            rank.note(f"the word is {final}, and should be {right}")


def _contributions(name: str, rank: int) -> tuple[list[int], list[int]]:
    """Return what the programs of a rank pass, and what they expect when they pass it to atomic_cas.

    Those of atomic_cas take the word and give it back: program 0 puts a number of its own where it finds 0, program 1
    puts 0 where it finds that number, and so on.
    """
    numbers = [rank * _PROGRAMS + j for j in range(_PROGRAMS)]
    if name == "atomic_cas":
        taken = [0 if j % 2 else number + 1 for j, number in enumerate(numbers)]
        return taken, [taken[j - 1] if j % 2 else 0 for j in range(_PROGRAMS)]
    bits = [1 << number for number in numbers]
    # each program goes further than those before it on any rank, so that nearly every call changes the word
    steps = [1000 * (j + 1) + rank for j in range(_PROGRAMS)]
    special = {"atomic_xor": bits, "atomic_or": bits, "atomic_and": [~each for each in bits]}
    return special.get(name, [-each for each in steps] if name == "atomic_min" else steps), [0] * _PROGRAMS


# -- synchronisation --------------------------------------------------------------------------------------------------
def _send(rank: Rank, form: str, name: str) -> None:
    """Put data to the next rank and signal it: the data is there when the signal is."""
    source, everyone = rank.tensor(_data(rank.me)), range(rank.world)
    for turn, op in enumerate(OPS):
        target, found, flag = rank.tensor(_NOTHING), rank.tensor(_NOTHING), rank.tensor([_FLAG], "int64")
        flags = [_FLAG * (op == "add") + 100 + (each - 1) % rank.world for each in everyone]
        numbers = 100 + rank.me, flags[rank.me], rank.timeout_s
        with rank.together(f"{name} {op}", slow=turn):
            rank.programs.send(rank.ctx, form, name, op, source, target, found, flag, *numbers)
        rank.check(flag, [[value] for value in flags])
        arrived = [_data((each - 1) % rank.world) for each in everyone]
        rank.check(target, arrived)
        rank.check(found, arrived)


def _look(rank: Rank, form: str, name: str) -> None:
    """Wait for a flag that the rank before changes, or look at two, of which the second is changed before or so."""
    for turn, (cmp, (before, sent, value)) in enumerate(WAITS.items()):
        first, last, says = {
            "wait": ([before], [sent], [sent]),
            "wait_any": ([before, before], [before, sent], [1, _UNTOUCHED]),
            "test": ([before, sent], [before, sent], [0, 1]),
            "load_acquire": ([before, sent], [before, sent], [before, sent]),
        }[name]
        flags, found = rank.tensor(first, "int64"), rank.tensor([_UNTOUCHED] * len(first), "int64")
        program, named = (rank.programs.await_flag, ()) if name == "wait" else (rank.programs.look, (name,))
        with rank.together(f"{name} {cmp}", slow=turn):
            program(rank.ctx, form, *named, cmp, flags, sent, value, found, rank.timeout_s)
        rank.check(flags, [last] * rank.world)
        rank.check(found, [says] * rank.world)


def _barrier(rank: Rank, form: str, name: str) -> None:
    """Run barriers of the world and of groups, whose members store to all ranks; a barrier changes no others' flags."""
    everyone = range(rank.world)
    for group in (None, (0, 2, (rank.world + 1) // 2), (rank.world - 1, 1, 1)):
        begin, stride, size = group or (0, 1, rank.world)
        members = everyone[begin::stride][:size]
        slots, found = (rank.tensor([_UNTOUCHED] * rank.world, "int64") for _ in range(2))
        flags = rank.tensor([0] * (rank.world + 1), "int64")
        for turn in range(rank.world if group is None else 2):
            value = 10 * (turn + 1)
            with rank.together(f"barrier {turn} of {group or 'all'}", slow=members[turn % size]):
                if rank.me in members and form == "host":
                    _meet(rank, slots, found, value + rank.me, group and list(members), turn)
                elif rank.me in members:
                    rank.programs.meet(rank.ctx, form, slots, found, flags, value + rank.me, group, rank.timeout_s)
            stored = [value + each if each in members else _UNTOUCHED for each in everyone]
            rank.check(slots, [stored] * rank.world)
            rank.check(found, [stored if each in members else [_UNTOUCHED] * rank.world for each in everyone])
            if rank.me not in members and any(rank.read(flags, rank.me)):
                rank.note("flags of a rank that is no member have changed")


def _meet(rank: Rank, slots: Any, found: Any, value: int, group: list[int] | None, turn: int) -> None:
    """As the program `meet`, with stores of the host and `ctx.device_barrier`."""
    bases = rank.ctx.heap.heap_bases
    for base in bases:
        place = base + slots.data_ptr() - bases[rank.me] + 8 * rank.me
        oracle.write_bytes(place, value.to_bytes(8, "little"), rank.ctx.device)
    rank.ctx.device_barrier(group, sem=("release", "relaxed")[turn % 2])
    found.copy_(slots)


_CALLS: Mapping[str, Callable[[Rank, str, str], None]] = {
    **dict.fromkeys(MOVES, _move),
    **dict.fromkeys(ATOMICS, _atomic),
    **dict.fromkeys(SIGNALS, _send),
    **dict.fromkeys(("wait", *LOOKS), _look),
    "barrier": _barrier,
}
NAMES = tuple(_CALLS)
"""All device functions that have programs; every backend has them."""
