"""Runs the programs of one launch, one at a time, and switches when a program waits.

A program *observes* memory when it executes an atomic or a volatile load, or thousands of plain loads that see nothing
new.  Seeing the same value at the same place again means that it is waiting (spinning).  It then hands the baton on: to
a program that has not started, else to the one that has waited longest.  When every program of the launch waits, the
thread sleeps between polls so that other ranks get the processor, and the time spent so is counted; a long computation
elsewhere is not waiting and does not count.  A poll of the kernel takes the CPU a millisecond; to look whether a polled
word has changed takes a tenth of that, so most polls are left out, but for those that prove a standstill.  Where all
ranks can only wait for each other, the launch fails at once (`iris_core.device.status`).

Programs start in the order of a GPU's linear block index: x fastest, then y, then z.  They run on the launching thread;
another thread is taken from the pool only when a program waits while others have not started.  A language may add
programs to a launch that run beside the one that adds them (`start`), and that wait for a condition (`ready`).
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from iris_core.world.failures import name_ranks
from iris_triton.interpreter.errors import DeadlockError
from iris_triton.interpreter.memory import regions

MAX_WAITING = 2048  # programs of a launch that are in progress at the same time; each one that waits keeps a thread
_FORGET = 1024  # places a program remembers; a loop that polls more of them is not seen as waiting
_POLLED_WORDS = 64  # what a loop of plain loads may read to be seen as waiting, in one load and in different ones
_IDLE_LOADS = 5000  # plain loads in a row that see nothing new, before they are seen as waiting
_COUNTED_S = 0.1  # a single poll never counts for more: the process may have been stopped or starved
_SLEEP_S = 500e-6, 4e-3  # between two looks at what is polled, at most: at first, and after long waits
_UNPOLLED_S = 20e-3  # without a poll of any program, at most: polls may be counted, or look at a clock
_CHECK_S = 0.2  # how often the scheduler looks for a standstill of all ranks
_PROVING_POLLS = 128  # of each program before its wait can be endless: a bounded one has looked at the clock by then
_IDLE_KEPT = 16  # threads that stay for later launches


class Cancelled(BaseException):
    """Unwinds a waiting program after another one has failed.  Not an Exception: kernels cannot catch it."""


class Program:
    """One program in progress."""

    __slots__ = ("baton", "idle_loads", "loads", "pid", "polled", "ready", "scheduler", "seen")

    def __init__(self, pid: tuple[int, int, int], scheduler: "Scheduler") -> None:
        self.pid, self.scheduler = pid, scheduler
        self.seen: dict[Any, bytes] = {}
        self.loads: dict[Any, bytes] = {}
        self.idle_loads = 0
        self.baton: threading.Semaphore | None = None
        self.polled: tuple[Any, Any] | None = None  # addresses and values of the last poll in vain
        self.ready: Callable[[], bool] | None = None  # whether it can go on; None: it can

    def observe(self, addresses: Any, data: Any) -> None:
        """Record an atomic or volatile access; hand the baton over if the program is polling."""
        if self.scheduler.error is not None:
            raise Cancelled
        place, value = _words(addresses), data.tobytes()
        if self.seen.get(place) == value:
            self.polled = addresses, data
            self.wait(addresses, data)
        else:
            if len(self.seen) >= _FORGET:
                self.seen.clear()
            self.seen[place] = value
            self.progress()

    def loaded(self, addresses: Any, data: Any) -> None:
        """Record a plain load: a loop that only reads the same few words thousands of times counts as polling."""
        if addresses.size > _POLLED_WORDS:
            self.idle_loads = 0
            return
        place, value = _words(addresses), data.tobytes()
        if self.loads.get(place) != value:
            if len(self.loads) >= _POLLED_WORDS:
                self.loads.clear()
            self.loads[place] = value
            self.idle_loads = 0
            return
        self.idle_loads += 1
        if self.idle_loads > _IDLE_LOADS:
            self.scheduler.is_bounded = True  # it may be counting
            self.observe(addresses, data)

    def progress(self) -> None:
        """Record a store or a changed value: the program makes progress."""
        self.scheduler.idle_polls = self.idle_loads = 0

    def wait(self, addresses: Any, data: Any) -> None:
        """Yield to other programs, because the values there have not changed."""
        self.scheduler.wait(self, addresses, data)


def _words(addresses: Any) -> Any:
    """Return a key for the words of an access: one address as an int, several addresses as bytes."""
    return int(addresses.reshape(-1)[0]) if addresses.size == 1 else addresses.tobytes()


class Scheduler:
    """Scheduler of one launch: its programs, the one that has the baton, and the idle time."""

    def __init__(self, launch: Any, run: Callable[..., None], timeout_s: float) -> None:
        """Prepare a `state.Launch`; `run` runs a program, or the part of it given as a second argument (a function)."""
        self._kernel, self._checker, self._run, self._timeout_s = launch.kernel, launch.checker, run, timeout_s
        x, y, z = launch.grid
        self._pids = ((i % x, i // x % y, i // (x * y)) for i in range(x * y * z))
        self._unstarted = x * y * z
        self._waiting: deque[Program] = deque()
        self._in_progress = 0
        self._threads = 0
        self._lock = threading.RLock()
        self._all_left = threading.Event()
        self._idle_s = self._last_poll = self._next_check_s = 0.0
        self._checked = 0  # `idle_polls` at the last check; 0 if another thread could act then
        self._launcher = threading.current_thread()
        self.is_bounded = False  # whether a program may wait for a time or a number of polls, not for memory alone
        self.error: BaseException | None = None
        self.idle_polls = 0

    def run(self) -> None:
        """Run all programs; raise the first error after the other programs have been unwound."""
        self._threads = 1
        _running.add(self)
        try:
            self._work(self._run_rest)
            self._all_left.wait()
        except BaseException as error:  # noqa: BLE001 - KeyboardInterrupt while another thread has the baton
            self._fail(error)
            self._all_left.wait()
        finally:
            _running.discard(self)
        if self.error is not None:
            raise self.error

    def start(self, program: Program, body: Callable[[], None]) -> None:
        """Add a program that runs `body` on its own thread once it gets the baton."""
        baton = program.baton = threading.Semaphore(0)

        def task() -> None:
            baton.acquire()
            self._run_one(program, body)

        with self._lock:
            self._threads += 1
            self._waiting.append(program)
        _threads.run(lambda: self._work(task))

    def _work(self, task: Callable[[], None]) -> None:
        """Run programs on a thread of the launch, then release the baton."""
        try:
            task()
        except Cancelled:
            pass  # the launch has failed already; self.error says how
        except BaseException as error:  # noqa: BLE001 - whatever it is, the launching thread raises it
            self._fail(error)
        with self._lock:
            self._threads -= 1
            last = self._threads == 0
            heir = self._take()
        if heir is not None and heir.baton is not None:
            heir.baton.release()
        if last:
            self._all_left.set()

    def _run_rest(self) -> None:
        while self._unstarted and self.error is None:
            self._unstarted -= 1
            self._run_one(Program(next(self._pids), self))

    def _run_one(self, *program: Any) -> None:
        if self.error is None:
            self._in_progress += 1
            self._run(*program)
            self._in_progress -= 1
            self.idle_polls = 0

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.error = error

    def _take(self, heir: Program | None = None) -> Program | None:
        """Remove a program from the waiting ones, by default the longest-waiting one that is ready."""
        with self._lock:
            try:
                heir = heir or next((p for p in self._waiting if p.ready is None or p.ready()), None)
            except BaseException as error:  # noqa: BLE001 - the condition itself may find a mistake
                self._fail(error)
            if heir is None and self.error is not None and self._waiting:
                heir = self._waiting[0]
            if heir is not None:
                self._waiting.remove(heir)
            return heir

    def wait(self, program: Program, addresses: Any, data: Any) -> None:
        """Yield to other programs, because `program` has seen no change there."""
        if self.can_start():
            self.start_next(program)
        elif self._waiting:
            self.hand_over(program)
        if self.error is not None:
            raise Cancelled
        self.idle_polls += 1
        if self.idle_polls > 2 * self._in_progress:
            self._idle(program, addresses, data)

    def can_start(self) -> bool:
        return self._unstarted > 0 and self._in_progress < MAX_WAITING

    def start_next(self, program: Program) -> None:
        """Start programs on another thread, while `program` waits."""
        with self._lock:
            self._threads += 1
        self._park(program, lambda: _threads.run(lambda: self._work(self._run_rest)))

    def hand_over(self, program: Program, heir: Program | None = None) -> None:
        """Hand the baton to another program, by default the longest-waiting one, and wait for it to come back."""
        heir = self._take(heir)
        if heir is not None and heir.baton is not None:
            self._park(program, heir.baton.release)
        if self.error is not None:
            raise Cancelled

    def _park(self, program: Program, hand_over: Callable[[], None]) -> None:
        baton = program.baton = program.baton or threading.Semaphore(0)
        with self._lock:
            self._waiting.append(program)
        hand_over()
        try:
            baton.acquire()
        except BaseException as error:
            # KeyboardInterrupt on the launching thread.  If the baton has not been handed back, it is not ours to pass.
            self._fail(error)
            with self._lock:
                ours = program not in self._waiting
                if not ours:
                    self._waiting.remove(program)
            if ours:
                baton.acquire()
            raise

    def _idle(self, program: Program, addresses: Any, data: Any) -> None:
        now = time.monotonic()
        if self.idle_polls == 2 * self._in_progress + 1:
            self._idle_s, self._last_poll, self._next_check_s, self._checked = 0.0, now, _CHECK_S, 0
        self._idle_s += min(now - self._last_poll, _COUNTED_S)
        self._last_poll = now
        if self._idle_s >= self._next_check_s:
            self._next_check_s = self._idle_s + _CHECK_S
            if self._stands_still():
                raise self._deadlock(program, addresses, data, "for words that no program of any rank changes")
        if self._idle_s > self._timeout_s:
            raise self._deadlock(program, addresses, data, f"for {self._timeout_s:g} s")
        # Short at first, for ping-pong between ranks; later a round of all programs takes half of the time waited.
        soon, late = _SLEEP_S
        pause = min(self._idle_s / 2, max(soon, min(late, self._idle_s / (8 * self._in_progress))))
        proves = self._checked > 0 and not self.is_bounded and self.idle_polls < _PROVING_POLLS * self._in_progress
        end = now if proves else now + min(self._idle_s / 2, _UNPOLLED_S) / self._in_progress
        time.sleep(pause)
        while (heir := self._changed(program)) is None and time.monotonic() < end:
            time.sleep(pause)
        if heir not in (None, program):
            self.hand_over(program, heir)

    def _changed(self, program: Program) -> Program | None:
        """Return a program that can go on: words that it polls have changed; `program` itself before others."""
        with self._lock:
            for each in (program, *self._waiting):
                if each.ready is not None:
                    if each.ready():
                        return each
                elif each.polled is None or not self._checker.holds(*each.polled):
                    return each
        return None

    def _stands_still(self) -> bool:
        """Return whether the launch is deadlocked: no value has changed, and no thread or rank can change one."""
        polls = self.idle_polls
        others = (thread for thread in threading.enumerate() if not thread.name.startswith("iris-"))
        alone = _running == {self} and all(thread is self._launcher for thread in others)
        quiet = alone and self._checked > 0 and polls - self._checked >= 2 * self._in_progress
        self._checked = polls if alone else 0  # another thread may have written just before it ended
        still = quiet = quiet and not self.is_bounded and polls >= _PROVING_POLLS * self._in_progress
        for heap in regions.registered_heaps():
            heap.check_peers()
            still = heap.stands_still(quiet) and still
        return still

    def _deadlock(self, program: Program, addresses: Any, data: Any, how: str) -> DeadlockError:
        address, first = int(addresses.reshape(-1)[0]), data.reshape(-1)[:1].tobytes()
        last = int.from_bytes(first, "little")
        ranks = regions.running_ranks()
        on = f" on rank {', '.join(f'{rank} of {count}' for rank, count in ranks)}" if ranks else ""
        where = f"{addresses.size} words, the first at " if addresses.size > 1 else "the word at "
        message = (
            f"kernel {self._kernel!r}, program {program.pid}{on}: all programs of the launch have been waiting {how}. "
            f"This one polls {where}{self._checker.describe(address)}; the last value seen was {last:#x} "
            f"({int.from_bytes(first, 'little', signed=True)} as a signed integer). {len(self._waiting)} other "
            f"programs wait, {self._unstarted} have not started. Look for what should write there, or raise "
            "IRIS_TRITON__CPU_TIMEOUT."
        )
        elsewhere = tuple(sorted({rank for heap in regions.registered_heaps() for rank in heap.elsewhere()}))
        if elsewhere:
            message += f" Meanwhile no kernel waited on {name_ranks(elsewhere)}: busy on the host, stopped, or gone on."
        known = {"rank": ranks[0][0] if ranks else None, "address": address, "last_value": last}
        return DeadlockError(message, kernel=self._kernel, program=program.pid, elsewhere=elsewhere, **known)


_running: set[Scheduler] = set()  # the launches of this process, by any thread


class _Threads:
    """Threads that run tasks.  A few wait for the next launch; the rest end."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait for a task, less the tasks that wait for a thread

    def run(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)
        with self._lock:
            found = self._idle > 0
            self._idle -= found
        if not found:
            threading.Thread(target=self._serve, name="iris-cpu-program", daemon=True).start()

    def _serve(self) -> None:
        while True:
            self._tasks.get()()
            with self._lock:
                if self._idle >= _IDLE_KEPT:
                    return
                self._idle += 1


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.__init__)  # type: ignore[misc]  # the child has none of the threads
