"""What happened before what: vector clocks of a program's partitions and asynchronous operations.

An *agent* is anything whose actions are ordered among themselves: a partition, an mbarrier (its phases), a queue of
asynchronous operations that complete in order.  Each has a `next_time`, at which what it begins now is complete, and a
`remedy`, for messages.  A partition's clock says up to which time of every agent it has synchronised; an access by
agent `a` at time `t` is ordered before everything a partition does iff `clock[a] >= t`.

There are two clocks.  `seen` is about ordinary order.  `fenced` is what fence_async_shared has passed on to the
hardware's other path to shared memory, the async proxy, which TMA and wgmma use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_triton.interpreter.source import Line

Times = dict[Any, int]


def join(times: Times, other: Times) -> None:
    """Raise every time to that of the other clock."""
    for agent, time in other.items():
        if times.get(agent, 0) < time:
            times[agent] = time


class Clock:
    """What a partition has synchronised with, or what an mbarrier hands to those who wait for it."""

    __slots__ = ("fenced", "seen")

    def __init__(self) -> None:
        self.seen: Times = {}
        self.fenced: Times = {}

    def join(self, other: Clock) -> None:
        """Synchronise with all that the other one has synchronised with."""
        join(self.seen, other.seen)
        join(self.fenced, other.fenced)

    def fence(self) -> None:
        """Pass on everything seen to the async proxy."""
        join(self.fenced, self.seen)


class Queue:
    """Asynchronous operations of one partition that complete in the order in which they were issued; an agent."""

    __slots__ = ("issued", "line", "remedy")

    def __init__(self, remedy: str) -> None:
        self.issued = 0
        self.line: Line | None = None  # of the last one
        self.remedy = f"{remedy} first, in the partition that issued it"  # what completes them

    @property
    def next_time(self) -> int:
        return self.issued + 1

    def issue(self, line: Line) -> int:
        """Number the next operation; its time."""
        self.issued, self.line = self.next_time, line
        return self.issued
