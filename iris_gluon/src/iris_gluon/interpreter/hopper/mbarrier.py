"""mbarriers: arrivals, bytes, phases, and what they order.

Copies that signal a barrier are complete when somebody waits for it, and not before: their data is written then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from iris_gluon.interpreter.clocks import Clock
from iris_gluon.interpreter.errors import MBarrierError
from iris_triton.interpreter.source import Line, here

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_gluon.interpreter.cta import Cta, Partition
    from iris_gluon.interpreter.hopper.shared import View

_MAX_COUNT = (1 << 20) - 1


class Signal(NamedTuple):
    """What a copy does at a barrier when it is complete."""

    nbytes: int
    arrivals: int
    deliver: Callable[[], None]
    complete: Callable[[], bool]
    what: str


class MBarrier:
    """One barrier; an agent whose time is the number of phases that are complete."""

    def __init__(self, view: View, count: int) -> None:
        self.name = view.name
        self.count = count
        self.phase = 0
        self.missing = count
        self.nbytes = 0  # announced, and not yet brought
        self._copies: list[Signal] = []
        self._published = Clock()
        self._gathered = Clock()

    @property
    def next_time(self) -> int:
        return self.phase + 1

    @property
    def remedy(self) -> str:
        return f"wait for mbarrier {self.name!r}, which it signals"

    # -- arriving -----------------------------------------------------------------------------------------------------
    def arrive(self, partition: Partition, count: int) -> None:
        """Count arrivals of a partition; what it did before is ordered before what those who wait do afterwards."""
        if self.missing < count:
            waiting = f", and {self.nbytes} bytes of its copies have not been waited for" if self._copies else ""
            raise MBarrierError(
                f"{here()}: {count} arrival(s) at mbarrier {self.name!r} in {partition.name}, but phase {self.phase} "
                f"waits for {self.missing} of {self.count} only{waiting}: wait for the phase before arriving again"
            )
        self._gathered.join(partition.clock)
        partition.tick()
        self.missing -= count
        if not self._copies:
            self._advance(here())

    def expect(self, partition: Partition, nbytes: int) -> None:
        """Announce bytes that copies will bring, and arrive."""
        if nbytes < 0:
            raise MBarrierError(f"{here()}: mbarrier {self.name!r} cannot expect {nbytes} bytes")
        self.nbytes += nbytes
        self.arrive(partition, 1)

    def signal_after(self, copy: Signal) -> None:
        """Note a copy that is under way: it brings bytes, or arrives by itself, when it is complete."""
        self._copies.append(copy)

    def under_way(self) -> str:
        """Say which copies nobody has waited for; empty if there are none."""
        return ", ".join(copy.what for copy in self._copies if not copy.complete())

    def publish(self, agent: Any, time: int) -> None:
        """Order what an agent has done up to a time before what those who wait do."""
        self._gathered.seen[agent] = max(time, self._gathered.seen.get(agent, 0))

    # -- waiting ------------------------------------------------------------------------------------------------------
    def settle(self, line: Line) -> None:
        """Complete the copies that are under way, for a wait in some line."""
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.deliver()
            self.nbytes -= copy.nbytes
            self.missing -= copy.arrivals
        if copies and self.missing <= 0 and self.nbytes < 0:
            raise MBarrierError(
                f"{line}: the copies that signal mbarrier {self.name!r} brought {-self.nbytes} bytes more in phase "
                f"{self.phase} than mbarrier.expect had announced"
            )
        self._advance(line)

    def _advance(self, line: Line) -> None:
        if self.missing < 0:
            raise MBarrierError(
                f"{line}: {-self.missing} arrivals too many at mbarrier {self.name!r} in phase {self.phase}; it was "
                f"initialised with count={self.count}"
            )
        if self.missing == 0 and self.nbytes == 0:
            self.phase += 1
            self.missing = self.count
            self._published.join(self._gathered)
            self._published.seen[self] = self._published.fenced[self] = self.phase

    def passed(self, parity: int, line: Line) -> bool:
        """Whether the last complete phase has this parity; before the first phase, the answer for 1 is yes."""
        if (self.phase & 1) == parity:
            self.settle(line)
        return (self.phase & 1) != parity

    def acquire(self, partition: Partition) -> None:
        """Order what follows in a partition after the complete phases."""
        partition.clock.join(self._published)

    def describe(self, parity: int) -> str:
        """Say what is missing."""
        lacks = []
        if self.missing:
            lacks.append(f"{self.missing} of {self.count} arrivals")
        if self.nbytes > 0:
            lacks.append(f"{self.nbytes} bytes that mbarrier.expect announced and no copy brings")
        elif self.nbytes < 0:
            lacks.append(f"an mbarrier.expect for {-self.nbytes} bytes that copies brought")
        return (
            f"mbarrier {self.name!r} with phase={parity}; {self.phase} phases are complete, and phase {self.phase} "
            f"lacks {' and '.join(lacks)}"
        )


def init(cta: Cta, view: View, count: int) -> None:
    """Make a barrier of a program."""
    _check_memory(view)
    if not 1 <= count <= _MAX_COUNT:
        raise MBarrierError(f"{here()}: the count of mbarrier {view.name!r} must be 1 to {_MAX_COUNT}, got {count}")
    barriers = view.allocation.barriers
    if view.offset in barriers:
        raise MBarrierError(f"{here()}: mbarrier {view.name!r} is initialised already; call mbarrier.invalidate before")
    barrier = barriers[view.offset] = MBarrier(view, count)
    cta.barriers.append(barrier)


def find(view: View, doing: str) -> MBarrier:
    """Return the barrier of a memory descriptor."""
    _check_memory(view)
    barrier: MBarrier | None = view.allocation.barriers.get(view.offset)
    if barrier is None:
        raise MBarrierError(f"{here()}: {doing} of mbarrier {view.name!r}, which mbarrier.init has not initialised")
    return barrier


def invalidate(cta: Cta, view: View) -> None:
    """End a barrier of a program."""
    barrier = find(view, "invalidation")
    copies = barrier.under_way()
    if copies:
        raise MBarrierError(
            f"{here()}: mbarrier {barrier.name!r} is invalidated while {copies} may be under way: wait for it before"
        )
    del view.allocation.barriers[view.offset]
    cta.barriers.remove(barrier)


def _check_memory(view: View) -> None:
    view.check_inside()
    if view.data.size != 1 or view.data.itemsize != 8 or not view.dtype.is_int():
        raise MBarrierError(
            f"{here()}: barrier allocation must be a descriptor of Nxi64 type with N <= number of CTAs; {view.name!r} "
            f"has shape {list(view.data.shape)} of {view.dtype}"
        )
