"""Plans by what they are looked up by, of which those stay that are used."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

T = TypeVar("T")

GENERATION = 256
"""Plans of a generation; there are two, so at least so many of the last kinds of calls are known."""


class Plans(dict[Any, T], Generic[T]):
    """A dict of the young plans, with an old generation behind it: nearly the least recently used are dropped.

    A lookup is that of a dict, for nothing is written down about it.  When the young ones are too many, they become
    the old ones, and what is left of those is dropped; an old one that is used again becomes young.
    """

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[Any, T] = {}
        self._held: dict[int, T] = {}

    @property
    def total(self) -> int:
        """Number of plans that are known."""
        return len(self) + len(self._old)

    def recall(self, key: Any) -> T | None:
        """Take a plan out of the old generation; None if it is not there.  `keep` makes it young."""
        return self._old.pop(key, None)

    def keep(self, key: Any, plan: T) -> list[T]:
        """Make a plan known; returns those that are not any more, whose memory kernels may still use."""
        dropped: list[T] = []
        if len(self) >= GENERATION:
            dropped = list(self._old.values())
            self._old = dict(self)
            super().clear()
        self[key] = plan
        return dropped

    def hold(self, plan: T) -> None:
        """Let a plan live as long as this: a graph knows its memory."""
        self._held[id(plan)] = plan

    def clear(self) -> None:
        """Let go of all, held ones, too."""
        super().clear()
        self._old.clear()
        self._held.clear()
