"""What is known of kinds of calls: the launches of those that are used, and what the members have agreed on.

A program whose lengths or split sizes vary makes new kinds without end.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

GENERATION = 512
"""Launches of a generation; there are two, so at least so many of the last kinds of calls are known."""

_DESCRIBED = 4096
"""Kinds of a group that a message can describe: the latest ones."""

MOST_KINDS = (1 << 15) - 1
"""Numbers of kinds that kernels can tell apart; afterwards they begin again at 1."""


class CanBeDropped(Protocol):
    """What serves a kind of call."""

    @property
    def droppable(self) -> bool:
        """Whether it can be made again without anybody noticing."""


T = TypeVar("T", bound=CanBeDropped)


class Launches(dict[Any, T]):
    """A dict of the young ones, with an old generation behind it: nearly the least recently used are dropped.

    A lookup is that of a dict, for nothing is written down about it.  When the young ones are too many, they become
    the old ones, and what is left of those is dropped; an old one that is used again becomes young.  What cannot be
    dropped stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[Any, T] = {}
        self._staying = 0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """How many are known."""
        return len(self) + len(self._old)

    def recall(self, key: Any) -> T | None:
        """Take one out of the old generation; None if it is not there.  `keep` makes it young."""
        return self._old.pop(key, None)

    def keep(self, key: Any, launch: T) -> list[T]:
        """Make one known; returns those that are not any more."""
        dropped: list[T] = []
        with self._lock:  # of threads that call with different groups
            if len(self) - self._staying >= GENERATION:
                dropped = list(self._old.values())
                self._old = {key: each for key, each in self.items() if each.droppable}
                for name in self._old:
                    del self[name]
                self._staying = len(self)
            self[key] = launch
        return dropped

    def clear(self) -> None:
        """Let go of all."""
        super().clear()
        self._old.clear()
        self._staying = 0


class Agreed:
    """Kinds of calls on which the members of groups have agreed, with a number each.

    Members agree on the same kinds in the same order, so the numbers are the same on all of them.  Nothing is ever
    forgotten, or a member could ask for an agreement in which the others take no part; a kind takes 100 bytes.
    """

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._begun: set[bytes] = set()
        self._counts: dict[tuple[int, ...], int] = {}
        self._latest: dict[tuple[int, ...], deque[tuple[int, str]]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, members: tuple[int, ...], facts: Mapping[str, str]) -> int | None:
        """Return a kind's number; None if it was not agreed on."""
        return self._numbers.get(_digest(members, facts))

    def has_any(self, members: tuple[int, ...], begin: Mapping[str, str]) -> bool:
        """Whether there is a kind whose facts begin like this; see `add`."""
        return _digest(members, begin) in self._begun

    def next_number(self, members: tuple[int, ...]) -> int:
        """Draw a number; every member does."""
        count = self._counts[members] = self._counts.get(members, 0) + 1
        return (count - 1) % MOST_KINDS + 1

    def add(self, members: tuple[int, ...], facts: Mapping[str, str], number: int, *begins: Mapping[str, str]) -> None:
        """Write down that the members have agreed; `begins` are parts of the facts that `has_any` finds it by."""
        self._numbers[_digest(members, facts)] = number
        self._begun.update(_digest(members, begin) for begin in begins)
        latest = self._latest.setdefault(members, deque(maxlen=_DESCRIBED))
        latest.append((number, ", ".join(f"{name} {value}" for name, value in facts.items())))

    def describe(self, members: tuple[int, ...], number: int) -> str:
        """Describe the kind that has a number."""
        latest = tuple(self._latest.get(members, ()))  # another thread may add to them
        texts = (text for found, text in reversed(latest) if found == number)
        return next(texts, "a call that is not known here")


def _digest(members: tuple[int, ...], facts: Mapping[str, str]) -> bytes:
    return hashlib.blake2b(repr((members, tuple(facts.items()))).encode(), digest_size=16).digest()
