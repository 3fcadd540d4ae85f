"""Which order of synchronisation to run next, so that each that differs is run once (`iris check --all-orders`).

Two orders are the same if they differ only in operations next to each other that touch different words, or only read.
After each run, of every two operations that depend on each other and that nothing else orders, the other way round is
added to what is left (source sets: Abdulla, Aronis, Jonsson and Sagonas, Optimal dynamic partial order reduction, POPL
2014; after Flanagan and Godefroid, POPL 2005); sleep sets (Godefroid, 1996) leave out what was run.

Journals and names of orders are those of `iris_triton.checker.exploration.orders`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Words = dict[int, bool]  # by word, whether it is changed

CAN, CHOSEN, ACCESS, NEEDS, KNOWS, ASLEEP = range(6)
_HOLDS = operator.eq, operator.ne, operator.gt, operator.ge, operator.lt, operator.le, operator.ge


@dataclass
class Step:
    """An operation of a thread, and the state before it: who can go on, who is asleep, and what is left to be tried."""

    thread: int
    index: int
    able: list[int]
    program: int  # bits of the steps that come before it whatever the order of words
    words: Words = field(default_factory=dict)
    old: dict[int, int] = field(default_factory=dict)
    needs: dict[int, tuple[int, int]] = field(default_factory=dict)
    depends: list[int] = field(default_factory=list)  # earlier steps of other threads on the same words
    before: int = 0  # bits of all steps that happen before it
    asleep: dict[int, Words] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)


@dataclass
class Walk:
    """What was run: how many orders, in how many runs, and whether these are all."""

    orders: int = 0
    runs: int = 0
    is_whole: bool = False


def walk(run: Callable[[str], list[list[int]] | None], most: int) -> Walk:
    """Run a program in all its orders, in `most` runs at most.

    `run` runs it in the order of a name, and returns its journal, or None where that is not complete.
    """
    found, steps, is_complete = Walk(), list[Step](), True
    name, first = "order:", 0
    while found.runs < most:
        rows = run(name)
        found.runs += 1
        if rows is None:
            is_complete = False
            del steps[first:]
            for step in steps[-1:]:
                step.words = {}
        else:
            made, is_new = _steps(rows)
            found.orders += is_new
            for step, before in zip(made, steps[:first], strict=False):
                step.asleep, step.left = before.asleep, before.left
            _fall_asleep(made, max(first, 1))
            steps = made
            for at in range(max(first - 1, 0), len(steps)):
                _look_back(steps, at)
        name, first = _next(steps)
        if not name:
            found.is_whole = is_complete
            return found
    return found


def _steps(rows: list[list[int]]) -> tuple[list[Step], bool]:
    """Return the steps of a journal, and whether its order is new: not if only threads that sleep could go on."""
    steps: list[Step] = []
    known: dict[int, int] = {}
    able: list[int] = []
    for kind, thread, *rest in rows:
        if kind == ASLEEP:
            return steps, False
        if kind == CAN:
            able.append(thread)
        elif kind == KNOWS:
            known[thread] = known.get(thread, 0) | known.get(rest[0], 0)
        elif kind == CHOSEN:
            past = known.get(thread, 0)
            steps.append(Step(thread, rest[0], able, past, before=past))
            known[thread] = past | 1 << len(steps) - 1
            able = []
        elif kind == NEEDS:
            steps[-1].needs[rest[0]] = rest[1], rest[2]
        else:
            last, (word, changes, old) = steps[-1], rest
            last.words[word] = last.words.get(word, False) or bool(changes)
            last.old.setdefault(word, old)
            for at, step in enumerate(steps[:-1]):
                if word in step.words and (changes or step.words[word]):
                    last.before |= 1 << at | step.before
                    if step.thread != thread and at not in last.depends:
                        last.depends.append(at)
            known[thread] |= last.before
    return steps, True


def _depend(one: Words, other: Words) -> bool:
    return any(word in other and (changes or other[word]) for word, changes in one.items())


def _fall_asleep(steps: list[Step], first: int) -> None:
    """Who is asleep before each step from a number on: those of the step before that it has not woken."""
    for at in range(first, len(steps)):
        last = steps[at - 1]
        steps[at].asleep = {
            thread: words
            for thread, words in last.asleep.items()
            if thread != last.thread and not _depend(words, last.words)
        }


def _look_back(steps: list[Step], number: int) -> None:
    """Let the steps that one depends on, and that nothing else orders before it, come after it in another run."""
    step = steps[number]
    for at in step.depends:
        others = [steps[each].before for each in step.depends if each != at]
        if step.program >> at & 1 or any(before >> at & 1 for before in others):
            continue
        earlier = steps[at]
        needs = [(cmp, earlier.old[word], value) for word, (cmp, value) in step.needs.items() if word in earlier.words]
        if any(not _HOLDS[cmp](old, value) for cmp, old, value in needs):
            continue  # it waits for this
        free = [each for each in range(at + 1, number) if not steps[each].before >> at & 1] + [number]
        firsts: list[int] = []
        past = 0
        for each in free:
            if not steps[each].before & past:
                firsts.append(steps[each].thread)
            past |= 1 << each
        if {earlier.thread, *earlier.left, *earlier.asleep}.isdisjoint(firsts):
            able = [each for each in firsts if each in earlier.able]
            if able:
                earlier.left.add(step.thread if step.thread in able else able[0])


def _next(steps: list[Step]) -> tuple[str, int]:
    """Return the name of the next order, "" for none, and how many steps it shares, with the one that differs."""
    while steps:
        step = steps[-1]
        step.asleep[step.thread] = step.words
        step.left -= step.asleep.keys()
        if step.left:
            step.thread = min(step.left)
            step.index = step.able.index(step.thread)
            asleep = ";".join(f"{thread}:{','.join(_named(words))}" for thread, words in step.asleep.items())
            return f"order:{'.'.join(str(each.index) for each in steps)}~{asleep}", len(steps)
        steps.pop()
    return "", 0


def _named(words: Words) -> Iterator[str]:
    return (f"{word}{'+' * changes}" for word, changes in words.items())


def name_of(rows: list[list[int]]) -> str:
    """Return the name of the order that a journal is of."""
    choices: list[Any] = [index for kind, _, index, *_ in rows if kind == CHOSEN]
    while choices and not choices[-1]:
        choices.pop()
    return "order:" + ".".join(map(str, choices))
