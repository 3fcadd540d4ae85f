"""mbarriers: arrivals, bytes, phases, and what they order.

Copies that signal a barrier complete when a partition waits for it, not before: their data is written then.
"""

from iris_gluon.interpreter.cta import Clock, Copy, Partition, running_partition
from iris_gluon.interpreter.errors import MBarrierError
from iris_gluon.interpreter.hopper.shared import View
from iris_triton.interpreter.state import Line, here

_MAX_COUNT = (1 << 20) - 1


class MBarrier:
    """One barrier; an agent whose time is the number of phases that are complete."""

    def __init__(self, view: View, count: int) -> None:
        self.name = view.name
        self.count = count
        self.phase = 0
        self.missing = count
        self.nbytes = 0  # announced, and not yet brought
        self.copies: list[Copy] = []  # under way
        self._published = Clock()
        self._gathered = Clock()

    @property
    def next_time(self) -> int:
        return self.phase + 1

    @property
    def remedy(self) -> str:
        return f"wait for mbarrier {self.name!r}, which it signals"

    def arrive(self, partition: Partition, count: int) -> None:
        """Count arrivals of a partition; what it did before is ordered before what those who wait do afterwards."""
        if self.missing < count:
            waiting = f", and {self.nbytes} bytes of its copies have not been waited for" if self.copies else ""
            raise MBarrierError(
                f"{here()}: {count} arrival(s) at mbarrier {self.name!r} in {partition.name}, but phase {self.phase} "
                f"waits for {self.missing} of {self.count} only{waiting}: wait for the phase before arriving again"
            )
        self._gathered.join(partition.clock)
        partition.tick()
        self.missing -= count
        if not self.copies:
            self._advance()

    def expect(self, partition: Partition, nbytes: int) -> None:
        """Announce bytes that copies will bring, and arrive."""
        if nbytes < 0:
            raise MBarrierError(f"{here()}: mbarrier {self.name!r} cannot expect {nbytes} bytes")
        self.nbytes += nbytes
        self.arrive(partition, 1)

    def under_way(self) -> str:
        """Name the copies that have not been waited for; empty if there are none."""
        return ", ".join(copy.what for copy in self.copies)

    def wait(self, partition: Partition, parity: int) -> None:
        """Let a partition wait until the last complete phase has this parity; 1 is fine before the first phase."""
        line = here()
        if parity not in (0, 1):
            raise ValueError(f"{line}: mbarrier.wait takes the parity of a phase, 0 or 1, not {parity}")

        def passed() -> bool:
            if (self.phase & 1) == parity:
                self._settle(line)
            return (self.phase & 1) != parity

        partition.block(passed, lambda: f"{self._describe(parity)} in {line}")
        partition.clock.join(self._published)

    def _settle(self, line: Line) -> None:
        """Complete the copies that are under way."""
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.deliver()
            self.nbytes -= copy.nbytes
        if copies and self.missing == 0 and self.nbytes < 0:
            raise MBarrierError(
                f"{line}: the copies that signal mbarrier {self.name!r} brought {-self.nbytes} bytes more in phase "
                f"{self.phase} than mbarrier.expect had announced"
            )
        self._advance()

    def _advance(self) -> None:
        if self.missing == 0 and self.nbytes == 0:
            self.phase += 1
            self.missing = self.count
            self._published.join(self._gathered)
            self._published.seen[self] = self._published.fenced[self] = self.phase

    def _describe(self, parity: int) -> str:
        lacks = [f"{self.missing} of {self.count} arrivals"] if self.missing else []
        if self.nbytes > 0:
            lacks.append(f"{self.nbytes} bytes that mbarrier.expect announced and no copy brings")
        elif self.nbytes < 0:
            lacks.append(f"an mbarrier.expect for {-self.nbytes} bytes that copies brought")
        phases = f"{self.phase} phases are complete, and phase {self.phase} lacks {' and '.join(lacks)}"
        return f"mbarrier {self.name!r} with phase={parity}; {phases}"


def init(view: View, count: int) -> None:
    """Make a barrier of the running program."""
    count = int(count)
    _check_memory(view)
    if not 1 <= count <= _MAX_COUNT:
        raise MBarrierError(f"{here()}: the count of mbarrier {view.name!r} must be 1 to {_MAX_COUNT}, got {count}")
    barriers = view.allocation.barriers
    if view.offset in barriers:
        raise MBarrierError(f"{here()}: mbarrier {view.name!r} is initialised already; call mbarrier.invalidate before")
    barrier = barriers[view.offset] = MBarrier(view, count)
    running_partition().cta.barriers.append(barrier)


def find(view: View, doing: str) -> MBarrier:
    """Return the barrier of a memory descriptor."""
    _check_memory(view)
    barrier: MBarrier | None = view.allocation.barriers.get(view.offset)
    if barrier is None:
        raise MBarrierError(f"{here()}: {doing} of mbarrier {view.name!r}, which mbarrier.init has not initialised")
    return barrier


def invalidate(view: View) -> None:
    """End a barrier of the running program."""
    barrier = find(view, "invalidation")
    if copies := barrier.under_way():
        raise MBarrierError(
            f"{here()}: mbarrier {barrier.name!r} is invalidated while {copies} may be under way: wait for it before"
        )
    del view.allocation.barriers[view.offset]
    running_partition().cta.barriers.remove(barrier)


def _check_memory(view: View) -> None:
    view.check_inside()
    if view.data.size != 1 or view.data.itemsize != 8 or not view.dtype.is_int():
        raise MBarrierError(
            f"{here()}: barrier allocation must be a descriptor of Nxi64 type with N <= number of CTAs; {view.name!r} "
            f"has shape {list(view.data.shape)} of {view.dtype}"
        )
