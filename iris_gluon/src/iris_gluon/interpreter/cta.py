"""One program of a launch: its partitions, which take turns, and their vector clocks.

A kernel begins as one partition.  gl.warp_specialize adds more, which the scheduler runs like programs: exactly one
goes on at a time, until it waits for an mbarrier that is not ready, polls global memory in vain, or ends.  If none of a
program can go on, that is a deadlock, and known at once: without clusters, nothing else arrives at these mbarriers.

What happened before what is known by vector clocks.
An *agent* is anything whose actions are ordered among themselves: a partition, an mbarrier (its phases), a queue of
asynchronous operations that complete in order.  Each has a `next_time`, at which what it begins now is complete, and a
`remedy`, for messages.  A partition's clock says up to which time of every agent it has synchronised; an access by
agent `a` at time `t` is ordered before everything a partition does iff `clock[a] >= t`.

There are two clocks.  `seen` is about ordinary order.  `fenced` is what fence_async_shared has passed on to the
hardware's other path to shared memory, the async proxy, which TMA and wgmma use.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Self

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.errors import RaceError
from iris_triton.interpreter.errors import DeadlockError
from iris_triton.interpreter.memory.regions import running_ranks
from iris_triton.interpreter.scheduler import Program
from iris_triton.interpreter.state import Line, ProgramInfo, current, here


class Clock:
    """Vector clock of a partition, or of an mbarrier, which passes it on to its waiters."""

    __slots__ = ("fenced", "seen")

    def __init__(self) -> None:
        self.seen, self.fenced = Counter[Any](), Counter[Any]()

    def join(self, other: Self) -> None:
        self.seen |= other.seen  # the later one of each agent's times
        self.fenced |= other.fenced

    def fence(self) -> None:
        """Make everything seen visible to the async proxy."""
        self.fenced |= self.seen


class Copy(NamedTuple):
    """An asynchronous copy that is under way."""

    deliver: Callable[[], None]
    what: str = ""
    nbytes: int = 0  # that it brings to an mbarrier
    idle: bool = False  # all its elements are masked off


class Queue:
    """Asynchronous operations of one partition that complete in the order in which they were issued; an agent."""

    __slots__ = ("issued", "line", "remedy", "under_way")

    def __init__(self, remedy: str) -> None:
        self.issued = 0
        self.line: Line | None = None  # of the last one
        self.under_way: list[tuple[int, Copy]] = []  # with their times
        self.remedy = f"{remedy} first, in the partition that issued it"  # what completes them

    @property
    def next_time(self) -> int:
        return self.issued + 1

    def issue(self, *copies: Copy) -> int:
        """Give the next operation, which is made of copies or is none, a number; return its time."""
        self.issued, self.line = self.next_time, here()
        self.under_way += [(self.issued, copy) for copy in copies]
        return self.issued

    def deliver(self, time: int) -> None:
        """Let the copies up to a time arrive."""
        while self.under_way and self.under_way[0][0] <= time:
            self.under_way.pop(0)[1].deliver()


class Partition(Program):
    """Warps that run the same code; an agent whose time advances whenever others learn how far it is."""

    remedy = ""  # what it does itself is complete at once

    __slots__ = (
        "clock", "copies", "cta", "done", "name", "polls", "products", "stores", "uncommitted", "waits_for", "warps",
    )  # fmt: skip

    def __init__(self, cta: "Cta", name: str, warps: int) -> None:
        super().__init__(cta.program.pid, cta.program.scheduler)
        self.cta, self.name, self.warps = cta, name, warps
        self.clock = Clock()
        self.clock.seen[self] = 1
        self.products, self.stores = Queue("call warpgroup_mma_wait"), Queue("call tma.store_wait")
        self.copies = Queue("call async_copy.commit_group and wait_group")
        self.uncommitted: list[Copy] = []  # of the next group
        self.done = self.polls = False
        self.waits_for: Callable[[], str] | None = None

    @property
    def next_time(self) -> int:
        return self.clock.seen[self]

    def tick(self) -> None:
        """Advance the own time: later operations are not covered by clocks passed on so far."""
        self.clock.seen[self] += 1

    def fence(self) -> None:
        self.clock.fence()
        self.tick()

    def complete(self, queue: Queue, pending: int) -> int:
        """Wait for a queue of its own until `pending` operations are under way; returns how many are complete."""
        done = max(queue.issued - pending, self.clock.seen[queue])
        self.clock.seen[queue] = done
        return done

    def wait(self, addresses: Any, data: Any) -> None:
        """Yield because global memory is unchanged: first to other partitions, then to other programs."""
        self.polls = True
        heir = self.cta.next_after(self, working=True)
        if heir is None:
            self.scheduler.wait(self, addresses, data)
        else:
            self.scheduler.hand_over(self, heir)
        self.polls = False

    def block(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Run the other partitions until a condition holds; DeadlockError if none is ready."""
        self.ready, self.waits_for = ready, waits_for
        while not ready():
            self.scheduler.hand_over(self, self.cta.next_after(self) or self.cta.fail())
        self.ready = self.waits_for = None


class Cta:
    """The partitions of one program."""

    def __init__(self, program: Program, warps: int) -> None:
        self.program = program
        self.root = Partition(self, "the kernel", warps)
        self.barriers: list[Any] = []  # of `hopper.mbarrier.MBarrier`
        self._partitions = [self.root]
        self._ended: list[Partition] = []

    def run_partitions(self, default: Callable[[], Any], workers: Sequence[tuple[str, int, Callable[[], None]]]) -> Any:
        """Run and return the default partition's body on this thread, with workers (name, warps, body) beside it."""
        root = self.root
        if current.program is not root or len(self._partitions) > 1:
            raise UnsupportedError("gl.warp_specialize cannot be called inside a partition")
        partitions = [Partition(self, name, warps) for name, warps, _ in workers]
        self._partitions = [root, *partitions]
        root.name, outer = "the default partition", root.name
        for partition, (_, _, body) in zip(partitions, workers, strict=True):
            partition.clock.join(root.clock)
            root.scheduler.start(partition, functools.partial(self._work, partition, body))
        root.tick()
        result = default()
        root.block(lambda: all(each.done for each in partitions), lambda: "the end of the other partitions")
        self._partitions, root.name = [root], outer
        for partition in partitions:
            root.clock.join(partition.clock)
            self._check_end(partition)
        self._ended += partitions
        return result

    def _work(self, partition: Partition, body: Callable[[], None]) -> None:
        try:
            body()
            partition.done = True
            if self.next_after(partition) is None:
                self.fail()
        except Exception as error:
            error.add_note(f"in {partition.name}")
            raise

    def next_after(self, partition: Partition, *, working: bool = False) -> Partition | None:
        """Return the next partition that is ready, or None; `working` leaves out those that poll global memory."""
        at = self._partitions.index(partition)
        for other in (*self._partitions[at + 1 :], *self._partitions[:at]):
            if not other.done and not (working and other.polls) and (other.ready is None or other.ready()):
                return other
        return None

    def fail(self) -> NoReturn:
        """Raise DeadlockError: no partition is ready."""
        parts = [f"{p.name} waits for {p.waits_for()}" for p in self._partitions if not p.done and p.waits_for]
        kernel, pid = current.launch.kernel, self.program.pid
        message = f"kernel {kernel!r}, program {pid}: no partition can go on. {'; '.join(parts)}"
        rank = next((rank for rank, _ in running_ranks()), None)
        raise DeadlockError(message, kernel=kernel, rank=rank, program=pid, address=0, last_value=0)

    def finish(self) -> None:
        """End the program, and with it its shared memory: TMA stores arrive in global memory."""
        self._check_end(self.root)
        for barrier in self.barriers:
            if copies := barrier.under_way():
                raise RaceError(
                    f"the program ends while {copies} may be under way: wait for mbarrier {barrier.name!r} before"
                )
        ended = (self.root, *self._ended)
        for partition in ended:
            for copy in (*(copy for _, copy in partition.copies.under_way), *partition.uncommitted):
                if not copy.idle:
                    raise RaceError(
                        f"the program ends while {copy.what} may be under way: call async_copy.commit_group and "
                        f"wait_group(0) at the end of {partition.name}"
                    )
        for partition in ended:
            partition.stores.deliver(partition.stores.issued)

    def _check_end(self, partition: Partition) -> None:
        for queue, what, remedy in (
            (partition.stores, "TMA stores may still read its shared memory", "tma.store_wait(0)"),
            (partition.products, "products of warpgroup_mma may be under way", "warpgroup_mma_wait(0, deps=...)"),
        ):
            pending = queue.issued - partition.clock.seen[queue]
            if pending:
                raise RaceError(
                    f"{partition.name} ends while {pending} {what}, the last one issued in {queue.line}: call {remedy} "
                    "at its end"
                )


def running_partition() -> Partition:
    """Return the partition of the running thread: Gluon programs are partitions."""
    return current.program  # type: ignore[return-value]


def complete_stores(program: ProgramInfo) -> None:
    """Wait until the TMA stores of the running partition are in global memory; CPU entry.

    Equivalent to `cp.async.bulk.wait_group 0` on a GPU.  tma.store_wait is weaker: unless its argument says otherwise
    (Triton 3.8 and newer), it waits until shared memory has been read, and the data may arrive as late as program end.
    """
    partition = running_partition()
    partition.stores.deliver(partition.complete(partition.stores, 0))
