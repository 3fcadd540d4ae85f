"""What the stack suite calls each device function with, and what must come of it, as plain Python computes it.

Every rank works on the next one, so each memory has one writer and each result is known; in a world of one the rank
works on itself.  A form is the way to call: "function", with ranks and heap bases, or "method" of the DeviceContext.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FORMS = ("function", "method")
MOVES = ("load", "store", "get", "put", "copy")
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "atomic_add": operator.add,
    "atomic_sub": operator.sub,
    "atomic_xchg": lambda old, val: val,
    "atomic_xor": operator.xor,
    "atomic_and": operator.and_,
    "atomic_or": operator.or_,
    "atomic_min": min,
    "atomic_max": max,
}
ATOMICS = (*OPERATIONS, "atomic_cas")
LOOKS = ("wait_any", "test", "load_acquire")
NAMES = (*MOVES, *ATOMICS, "signal", "put_signal", "wait", *LOOKS, "barrier")
"""All device functions that have programs; every backend has them."""

LANES = 256
"""Elements of a block."""

UNTOUCHED, OTHER = -7, 77
"""What targets are filled with before a call, and what a load returns where its mask is 0."""

FLAG = 40
"""What flags are before a signal."""


def mask(kind: str) -> list[int]:
    """Return which elements count: "whole" for all (the call then has no mask), or "masked" for two of three."""
    return [int(kind == "whole" or i % 3 != 1) for i in range(LANES)]


KINDS = ("whole", "masked")


# -- loads, stores and copies -----------------------------------------------------------------------------------------
def source(rank: int) -> list[int]:
    """What a rank's source has; no two elements of any ranks are equal."""
    return [1000 * (rank + 1) + i for i in range(LANES)]


def moved(name: str, rank: int, world_size: int, kind: str) -> list[int]:
    """Return a rank's target after the others' and its own call of load, store, get, put or copy.

    The caller reads from the next rank and writes to it; `copy` reads from the next rank and writes to the one after.
    """
    reads = name in ("load", "get")
    data = source((rank + 1 if reads else rank - 1) % world_size)
    off = OTHER if name == "load" else UNTOUCHED
    return [value if on else off for value, on in zip(data, mask(kind), strict=True)]


# -- atomics on a block -----------------------------------------------------------------------------------------------
def cells(rank: int) -> list[int]:
    """What a rank's words are at first, of both signs."""
    return [(37 * i + 11 * rank) % 101 - 50 for i in range(LANES)]


def operands(rank: int) -> list[int]:
    """What a rank passes to an atomic."""
    return [(53 * i + 29 * rank) % 97 - 48 for i in range(LANES)]


def compares(rank: int, world_size: int) -> list[int]:
    """What a rank's compare-and-swap expects: every other element is right."""
    return [cell + i % 2 for i, cell in enumerate(cells((rank + 1) % world_size))]


def changed(name: str, rank: int, world_size: int, kind: str) -> tuple[list[int], list[int]]:
    """Return a rank's words after the call, and what the call on this rank has returned."""
    before, returned = cells(rank), cells((rank + 1) % world_size)
    writer = (rank - 1) % world_size
    if name == "atomic_cas":  # has no mask
        expected = compares(writer, world_size)
        after = [val if old == cmp else old for old, cmp, val in zip(before, expected, operands(writer), strict=True)]
        return after, returned
    change, on = OPERATIONS[name], mask(kind)
    after = [change(old, val) if yes else old for old, val, yes in zip(before, operands(writer), on, strict=True)]
    return after, [old if yes else UNTOUCHED for old, yes in zip(returned, on, strict=True)]


# -- atomics of many programs on one word -----------------------------------------------------------------------------
PROGRAMS = 13
"""Programs of each rank that change the same word of each rank; four ranks have 52 bits of it."""


def first(name: str) -> int:
    """What the word is at first."""
    return {"atomic_and": -1, "atomic_min": 1 << 40}.get(name, 0)


def contributions(name: str, rank: int) -> list[int]:
    """What the programs of a rank pass.

    Those of atomic_cas take the word and give it back: program 0 puts a number of its own where it finds 0, program 1
    puts 0 where it finds that number, and so on.
    """
    numbers = [rank * PROGRAMS + j for j in range(PROGRAMS)]
    if name in ("atomic_xor", "atomic_or"):
        return [1 << number for number in numbers]
    if name == "atomic_and":
        return [~(1 << number) for number in numbers]
    if name == "atomic_cas":
        return [0 if j % 2 else number + 1 for j, number in enumerate(numbers)]
    # each program goes further than those before it on any rank, so that nearly every call changes the word
    steps = [1000 * (j + 1) + rank for j in range(PROGRAMS)]
    return [10**6 - step for step in steps] if name == "atomic_min" else steps


def expectations(rank: int) -> list[int]:
    """What the programs of a rank expect when they pass their contributions to atomic_cas."""
    passed = contributions("atomic_cas", rank)
    return [passed[j - 1] if j % 2 else 0 for j in range(PROGRAMS)]


def contention_problem(name: str, final: int, returned: Sequence[Sequence[int]]) -> str:
    """Say what is wrong with a word that all programs of all ranks have changed; empty if nothing is.

    Args:
        name: the atomic.
        final: what the word is afterwards.
        returned: what the calls on this word have returned, of each rank in the order of its contributions.
    """
    if name == "atomic_cas":
        return _lock_problem(final, returned)
    change = OPERATIONS[name]
    calls = [
        (old, change(old, val))
        for rank, olds in enumerate(returned)
        for old, val in zip(olds, contributions(name, rank), strict=True)
    ]
    # In any order, the calls that change the word lead from one value to the next, from the first to the last one.
    changes = [(old, new) for old, new in calls if old != new]
    step = dict(changes)
    if len(step) < len(changes):
        return f"{len(changes) - len(step)} calls have found what another one had found and changed"
    value = first(name)
    for _ in range(len(step)):
        value = step.pop(value, value)
    if step:
        return f"{len(step)} calls have found what the word never was"
    if value != final:
        return f"the word is {final}, and should be {value}"
    passed = [val for rank in range(len(returned)) for val in contributions(name, rank)]
    right = passed if name == "atomic_xchg" else [functools.reduce(change, passed, first(name))]
    return "" if final in right else f"the word is {final}, which these calls cannot make of it"


def _lock_problem(final: int, returned: Sequence[Sequence[int]]) -> str:
    """The same for atomic_cas: whoever has taken the word, and has not given it back, has it in the end."""
    taken: set[int] = set()
    given_back: set[int] = set()
    for rank, olds in enumerate(returned):
        passed, expected = contributions("atomic_cas", rank), expectations(rank)
        for j, old in enumerate(olds):
            if old == expected[j]:
                (given_back if j % 2 else taken).add(expected[j] if j % 2 else passed[j])
    if not taken:
        return "nobody has taken the word"
    if given_back - taken:
        return f"{given_back - taken} were given back by programs that never had the word"
    holders = taken - given_back
    return "" if holders == {final} - {0} else f"{len(holders)} have taken the word at a time, which is {final} now"


# -- synchronisation --------------------------------------------------------------------------------------------------
OPS = ("set", "add")


def sent(rank: int) -> int:
    """What a rank signals."""
    return 100 + rank


def signalled(op: str, rank: int, world_size: int) -> int:
    """Return a rank's flag after the signal of the one before."""
    value = sent((rank - 1) % world_size)
    return value if op == "set" else FLAG + value


@dataclass(frozen=True)
class Wait:
    """A flag before and after a signal, and what it is compared with: the comparison holds afterwards only."""

    cmp: str
    before: int
    sent: int
    value: int


WAITS = (
    Wait("eq", 3, 5, 5),
    Wait("ne", 5, 4, 5),
    Wait("gt", 5, 6, 5),
    Wait("ge", 4, 5, 5),
    Wait("lt", 5, 4, 5),
    Wait("le", 6, 5, 5),
)


def looked_at(name: str, each: Wait) -> list[int]:
    """Return what a look at two flags says, of which the second one was changed: place, truths, or the flags."""
    return {"wait_any": [1, UNTOUCHED], "test": [0, 1], "load_acquire": [each.before, each.sent]}[name]


def groups(world_size: int) -> tuple[tuple[int, int, int], ...]:
    """Groups that meet at a barrier, (rank_start, rank_stride, group_size): others than the world, where there are."""
    return ((0, 2, (world_size + 1) // 2), (world_size - 1, 1, 1))
