"""One program of a launch: its partitions, which take turns, and what each of them has synchronised with.

A kernel begins as one partition.  gl.warp_specialize adds more, one thread each, of which exactly one runs at a time:
it hands over when it waits for an mbarrier that is not ready, when it polls global memory in vain, or when it ends.  If
nobody can go on, that is a deadlock, and known at once: without clusters, nobody else can arrive at these mbarriers.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.clocks import Clock, Queue
from iris_gluon.interpreter.errors import RaceError
from iris_triton.interpreter.errors import DeadlockError
from iris_triton.interpreter.memory.regions import running_ranks
from iris_triton.interpreter.scheduler import Cancelled, Program, run_on_thread
from iris_triton.interpreter.source import here
from iris_triton.interpreter.state import Launch, current

if TYPE_CHECKING:
    from collections.abc import Callable


class Copy(NamedTuple):
    """An asynchronous copy to shared memory that is under way."""

    deliver: Callable[[], None]
    idle: bool  # all its elements are masked off
    what: str


class Partition(Program):
    """Warps that run the same code; an agent whose time advances whenever others learn how far it is."""

    remedy = ""  # what it does itself is complete at once

    __slots__ = (
        "_turn",
        "clock",
        "copies",
        "cta",
        "done",
        "groups",
        "name",
        "products",
        "ready",
        "spinning",
        "stores",
        "uncommitted",
        "unfinished_stores",
        "waits_for",
        "warps",
    )

    def __init__(self, cta: Cta, name: str, warps: int) -> None:
        super().__init__(cta.program.pid, cta.program.scheduler)
        self.cta, self.name, self.warps = cta, name, warps
        self.clock = Clock()
        self.clock.seen[self] = self.clock.fenced[self] = 0
        self.tick()
        self.products, self.stores = Queue("call warpgroup_mma_wait"), Queue("call tma.store_wait")
        self.copies = Queue("call async_copy.commit_group and wait_group")
        self.unfinished_stores: list[tuple[int, Callable[[], None]]] = []
        self.uncommitted: list[Copy] = []
        self.groups: list[tuple[int, list[Copy]]] = []
        self.done = self.spinning = False
        self.ready: Callable[[], bool] | None = None
        self.waits_for: Callable[[], str] | None = None
        self._turn = threading.Semaphore(0)

    # -- time ---------------------------------------------------------------------------------------------------------
    @property
    def next_time(self) -> int:
        return self.clock.seen[self]

    def tick(self) -> None:
        """What follows is not part of what others have been told so far."""
        self.clock.seen[self] += 1

    def fence(self) -> None:
        """fence_async_shared."""
        self.clock.fence()
        self.tick()

    def complete(self, queue: Queue, pending: int) -> int:
        """Wait for a queue of its own until `pending` operations are under way; returns how many are complete."""
        done = max(queue.issued - pending, self.clock.seen.get(queue, 0))
        self.clock.seen[queue] = done
        return done

    # -- what it has under way ----------------------------------------------------------------------------------------
    def deliver_stores(self, time: int) -> None:
        """Let the TMA stores up to a time arrive in global memory."""
        while self.unfinished_stores and self.unfinished_stores[0][0] <= time:
            self.unfinished_stores.pop(0)[1]()

    def commit_copies(self) -> int:
        """Make one group of the copies issued since the last one; returns its time."""
        time = self.copies.issue(here())
        self.groups.append((time, self.uncommitted))
        self.uncommitted = []
        return time

    def wait_copies(self, pending: int) -> None:
        """Wait until at most so many groups are under way."""
        self.deliver_copies(self.complete(self.copies, pending))

    def deliver_copies(self, time: int) -> None:
        """Let the groups up to a time arrive in shared memory."""
        while self.groups and self.groups[0][0] <= time:
            for copy in self.groups.pop(0)[1]:
                copy.deliver()

    def copies_under_way(self, group: int | None = None) -> list[Copy]:
        """The copies that read memory and that nobody has waited for: those of one group, or all."""
        copies = [copy for time, copies in self.groups if group in (None, time) for copy in copies]
        if group is None:
            copies += self.uncommitted
        return [copy for copy in copies if not copy.idle]

    # -- turns --------------------------------------------------------------------------------------------------------
    def wait(self, place: Any, value: bytes) -> None:
        """Global memory shows the same value again: let others run."""
        self.cta.spin(self, place, value)

    def block(self, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """Let the other partitions run until a condition holds; a deadlock if none can go on."""
        if not ready():
            self.cta.block(self, ready, waits_for)


class Cta:
    """The partitions of one program."""

    def __init__(self, program: Program, warps: int, launch: Launch) -> None:
        self.program, self.launch = program, launch
        self.failed: BaseException | None = None
        self.root = Partition(self, "the kernel", warps)
        self.barriers: list[Any] = []  # of `hopper.mbarrier.MBarrier`
        self._partitions = [self.root]
        self._ended: list[Partition] = []

    # -- warp_specialize ----------------------------------------------------------------------------------------------
    def run_partitions(self, default: Callable[[], Any], workers: list[tuple[str, int, Callable[[], None]]]) -> Any:
        """Run the default partition on this thread and the workers (name, warps, body) beside it.

        Returns what the default one returns.
        """
        root = self.root
        if current.program is not root or len(self._partitions) > 1:
            raise UnsupportedError("gl.warp_specialize cannot be called inside a partition")
        partitions = [Partition(self, name, warps) for name, warps, _ in workers]
        for partition in partitions:
            partition.clock.join(root.clock)
        root.tick()
        self._partitions = [root, *partitions]
        root.name, outer = "the default partition", root.name
        for partition, (_, _, body) in zip(partitions, workers, strict=True):
            run_on_thread(functools.partial(self._work, partition, body))
        result = None
        try:
            result = default()
        except BaseException as error:  # noqa: BLE001 - raised again when the workers have ended
            self._fail(error)
        self._join(partitions)
        self._partitions, root.name = [root], outer
        if self.failed is not None:
            raise self.failed
        for partition in partitions:
            root.clock.join(partition.clock)
            self._check_end(partition)
            self._ended.append(partition)
        return result

    def _work(self, partition: Partition, body: Callable[[], None]) -> None:
        partition._turn.acquire()
        if self.failed is None:
            current.launch, current.program = self.launch, partition
            try:
                with np.errstate(all="ignore"):
                    body()
            except BaseException as error:  # noqa: BLE001 - the launching thread raises it
                if not isinstance(error, Cancelled):
                    error.add_note(f"in {partition.name}")
                self._fail(error)
            finally:
                current.__dict__.clear()
        partition.done = True
        self._heir(partition)._turn.release()

    def _join(self, workers: list[Partition]) -> None:
        """Wait on the launching thread until all workers have ended."""
        root = self.root
        root.ready = lambda: all(worker.done for worker in workers)
        root.waits_for = lambda: "the end of the other partitions"
        while not root.ready():
            heir = self._heir(root)
            if heir is not root:
                self._hand_over(root, heir)
        root.ready = root.waits_for = None

    # -- turns --------------------------------------------------------------------------------------------------------
    def block(self, partition: Partition, ready: Callable[[], bool], waits_for: Callable[[], str]) -> None:
        """See `Partition.block`."""
        partition.ready, partition.waits_for = ready, waits_for
        while True:
            if self.failed is not None:
                raise Cancelled
            if ready():
                break
            heir = self._next(partition)
            if heir is None:
                raise self._deadlock()
            self._hand_over(partition, heir)
        partition.ready = partition.waits_for = None

    def spin(self, partition: Partition, place: Any, value: bytes) -> None:
        """A partition has polled global memory in vain: others of the program first, then other programs."""
        if self.failed is not None:
            raise Cancelled
        partition.spinning = True
        heir = self._next(partition, working=True)
        if heir is None:
            self.program.scheduler.wait(self.program, place, value)
            heir = self._next(partition)
        if heir is not None:
            self._hand_over(partition, heir)
        partition.spinning = False
        if self.failed is not None:
            raise Cancelled

    def _next(self, partition: Partition, *, working: bool = False) -> Partition | None:
        """The next partition that can go on, or None; `working` leaves out those that poll global memory."""
        at = self._partitions.index(partition)
        for other in (*self._partitions[at + 1 :], *self._partitions[:at]):
            if not other.done and not (working and other.spinning) and (other.ready is None or other.ready()):
                return other
        return None

    def _heir(self, partition: Partition) -> Partition:
        """The partition that goes on after one that has nothing more to do; fails the program if none can.

        After a failure the others end one after the other, the launching thread last.
        """
        if self.failed is None:
            try:
                heir = self._next(partition)
                if heir is not None:
                    return heir
                self._fail(self._deadlock())
            except BaseException as error:  # noqa: BLE001 - a barrier may find its copies wrong
                self._fail(error)
        return next((other for other in self._partitions[1:] if not other.done), self.root)

    def _hand_over(self, partition: Partition, heir: Partition) -> None:
        heir._turn.release()
        try:
            partition._turn.acquire()
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt on the launching thread
            self._fail(error)
            partition._turn.acquire()

    def _fail(self, error: BaseException) -> None:
        if self.failed is None:
            self.failed = error

    def _deadlock(self) -> DeadlockError:
        parts = [f"{p.name} waits for {p.waits_for()}" for p in self._partitions if not p.done and p.waits_for]
        kernel, pid = self.launch.kernel, self.program.pid
        message = f"kernel {kernel!r}, program {pid}: no partition can go on. {'; '.join(parts)}"
        rank = next((rank for rank, _ in running_ranks()), None)
        return DeadlockError(message, kernel=kernel, rank=rank, program=pid, address=0, last_value=0)

    # -- the end ------------------------------------------------------------------------------------------------------
    def finish(self) -> None:
        """End the program, and with it its shared memory: TMA stores arrive in global memory."""
        self._check_end(self.root)
        for barrier in self.barriers:
            copies = barrier.under_way()
            if copies:
                raise RaceError(
                    f"the program ends while {copies} may be under way: wait for mbarrier {barrier.name!r} before"
                )
        ended = (self.root, *self._ended)
        for partition in ended:
            for copy in partition.copies_under_way():
                raise RaceError(
                    f"the program ends while {copy.what} may be under way: call async_copy.commit_group and "
                    f"wait_group(0) at the end of {partition.name}"
                )
        for partition in ended:
            partition.deliver_stores(partition.stores.issued)

    def _check_end(self, partition: Partition) -> None:
        for queue, what, remedy in (
            (partition.stores, "TMA stores may still read its shared memory", "tma.store_wait(0)"),
            (partition.products, "products of warpgroup_mma may be under way", "warpgroup_mma_wait(0, deps=...)"),
        ):
            pending = queue.issued - partition.clock.seen.get(queue, 0)
            if pending:
                raise RaceError(
                    f"{partition.name} ends while {pending} {what}, the last one issued in {queue.line}: call {remedy} "
                    "at its end"
                )


def complete_stores() -> None:
    """For CPU entries: wait until the TMA stores of the running partition are in global memory.

    What `cp.async.bulk.wait_group 0` is on a GPU.  tma.store_wait is less: unless it is told otherwise (Triton 3.8 and
    newer), it waits until shared memory has been read, and the data may arrive as late as the program ends.
    """
    partition = current.program
    if isinstance(partition, Partition):
        partition.deliver_stores(partition.complete(partition.stores, 0))
