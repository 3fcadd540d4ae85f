"""Streams and freed memory: which streams may still use a block, and which must wait before it is used again.

A kernel runs long after its launch, so a block that the program has freed may be in use for a while.  The rule is
torch's, and a little wider: a block is in use until everything is done that had been launched when it was freed on the
stream that was current when it was allocated, on the one current when it is freed, and on those named with
`SymmetricHeap.record_stream`.  Other streams are the program's business, as in torch.

On CPU ranks a launch returns when its kernel is done, but for asynchronous collectives: each team runs them in order in
a thread, and that thread is a stream like any other (`HostStream`).

Events are recorded at the moment of the free.  Their use depends on the world:

- in a world of several ranks nothing is handed out before the events of all ranks are complete (`is_idle`);
- in a world of one rank the block is handed out at once, and the stream that gets it waits for the others (`fence`,
  `hand_out`): the host never waits.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import weakref
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from operator import itemgetter
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.compiler import is_dynamo_compiling

from iris_core.device.targets import on_device
from iris_core.errors import CollectiveTimeoutError, DeviceError, HeapError
from iris_core.heap.offsets import RangeSet
from iris_core.types import DeviceTarget, DeviceType

_FIRST_PRUNING = 64
_start, _end = itemgetter(0), itemgetter(1)
_DONE: Future[Any] = Future()
_DONE.set_result(None)
P = ParamSpec("P")
T = TypeVar("T")
eagerly: Any = _disable_dynamo(lambda call, *given, **named: call(*given, **named))  # not compiled, nor what it calls


def uncompiled(call: Callable[P, T]) -> Callable[P, T]:
    """Make a function break the graph of compiled code that calls it, or raise where that must be whole."""
    why = f"{call.__qualname__} is not for compiled code"

    @functools.wraps(call)
    def call_outside(*given: P.args, **named: P.kwargs) -> T:
        if not is_dynamo_compiling():
            return call(*given, **named)
        torch._dynamo.graph_break(msg=why)
        return eagerly(call, *given, **named)  # type: ignore[no-any-return]

    return call_outside


class Stream(Protocol):
    """Work in order; `torch.cuda.Stream` is one."""

    def record_event(self) -> Any:
        """Return an event that stands for everything launched so far: `query()` says whether that is done."""

    def wait_event(self, event: Any) -> None:
        """Let later work wait for an event; the host goes on."""


class TorchStreams:
    """torch's streams of the GPU with an index."""

    def __init__(self, index: int) -> None:
        self._target = DeviceTarget(DeviceType.CUDA, index)

    def current(self) -> Stream:
        """Return the stream on which this thread launches."""
        return torch.cuda.current_stream(self._target.index)

    def is_capturing(self) -> bool:
        """Whether that stream is being captured into a graph."""
        with on_device(self._target):
            return torch.cuda.is_current_stream_capturing()

    def synchronize(self, stream: Any = None) -> None:
        """Wait for everything that was launched on the device, or on one stream."""
        if stream is not None:
            stream.synchronize()
        else:
            torch.cuda.synchronize(self._target.index)


class HostEvent:
    """A moment of a `HostStream`: the last call launched before it."""

    def __init__(self, last: Future[Any]) -> None:
        self._last = last

    def query(self) -> bool:
        return self._last.done()

    def synchronize(self) -> None:
        """Wait for it.  The error of a call is raised elsewhere."""
        concurrent.futures.wait((self._last,))


class HostStream:
    """Calls in order in a thread of this process; `keep` is called with their tensors and this stream.

    A call that was launched while an earlier one ran, or had failed and its error was not raised, fails with that one:
    its peers would be out of step.
    """

    def __init__(self, streams: HostStreams, keep: Callable[[Any, Any], None]) -> None:
        self._streams, self._keep, self._last = streams, keep, _DONE
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="iris-collective")
        self._lock = threading.RLock()  # calls of two threads take turns
        streams.made.append(weakref.ref(self))

    def run(self, launch: Callable[..., Any], *arguments: Any) -> Any:
        """Launch after everything that is on the stream, and wait for it; return what `launch` does.

        DeviceError if an asynchronous call of this rank has failed before, and no caller has waited for it.
        """
        with self._lock:
            is_idle = self._is_idle
            self._streams.check()  # after it: what fails from now on is under way, and the call fails with it
            if is_idle:
                return launch(*arguments)
            work = self.launch("call", launch, *arguments)
            work.wait()
            return work.future.result()

    def run_async(self, what: str, launch: Callable[..., Any], plan: Any, *tensors: Any) -> HostWork:
        """Launch on the stream; `what` is for messages.  Raises like `run`."""
        with self._lock:
            self._streams.check()
            return self.launch(what, _finish, launch, plan, *tensors)

    @property
    def _is_idle(self) -> bool:
        return self._last is _DONE or self._last.done()  # `done` takes a lock

    def launch(self, what: str, call: Callable[..., Any], *arguments: Any) -> HostWork:
        """Run a call after those that were launched before; `what` names it in errors."""
        for each in arguments:
            if isinstance(each, torch.Tensor):
                self._keep(each, self)
        before = None if self._is_idle and not self._has_unknown_failure() else self._last
        self._last = self._thread.submit(self._run, what, before, call, list(arguments))
        return HostWork(self._last, what, self._streams.was_raised)

    def _has_unknown_failure(self) -> bool:
        """Whether the last call has failed with an error that was not raised anywhere yet."""
        if self._last.cancelled():
            return False
        error = self._last.exception()
        return any(error is each for _, each in list(self._streams.failures))

    def _run(self, what: str, before: Future[Any] | None, call: Callable[..., Any], arguments: list[Any]) -> Any:
        try:
            if before is not None:
                before.result()
            return call(*arguments)
        except BaseException as error:
            if before is None or before.exception() is not error:
                self._streams.failures.append((what, error))
            raise
        finally:
            arguments.clear()  # a caller that waits for the call finds its tensors no longer in use

    def mark(self) -> None:
        """Return None: calls hold what they need."""

    def record_event(self) -> HostEvent:
        return HostEvent(self._last)

    def wait_event(self, event: Any) -> None:
        self.launch("wait", event.synchronize)

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def close(self) -> None:
        """Drop what has not begun, wait for the rest, and end the thread."""
        self._thread.shutdown(cancel_futures=True)


def _finish(launch: Callable[..., Any], plan: Any, *tensors: Any) -> None:
    work = launch(plan, *tensors)
    if work is not None:
        work.wait()


class HostWork:
    """A collective on a stream of the host; `was_raised` is called with an error that the caller gets."""

    def __init__(self, future: Future[Any], what: str, was_raised: Callable[[BaseException], None]) -> None:
        self.future, self._what, self._was_raised = future, what, was_raised

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it is done, and raise its error, or that of a call of the team before it."""
        if not concurrent.futures.wait((self.future,), timeout_s).done:
            raise CollectiveTimeoutError(f"{self._what} was not done within {timeout_s:g} s")
        if (error := self.future.exception()) is not None:
            self._was_raised(error)
            raise error

    def is_completed(self) -> bool:
        return self.future.done()


class HostStreams:
    """The streams of a CPU rank, and its current one: the host itself, whose launches are done when they return."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[HostStream]] = []  # whose `keep` may know what has the heap
        self.failures: list[tuple[str, BaseException]] = []  # of calls: the operation, and its error

    def current(self) -> Stream:
        return self

    def record_event(self) -> HostEvent:
        return HostEvent(_DONE)

    def wait_event(self, event: Any) -> None:
        event.synchronize()

    def is_capturing(self) -> bool:
        return False

    def synchronize(self, stream: Any = None) -> None:
        """Wait for all calls, or for those of one stream; raises like `check`."""
        for each in [made() for made in list(self.made)] if stream is None else [stream]:
            if each is not None:
                each.synchronize()
        self.check()

    def check(self) -> None:
        """Raise DeviceError, once, for calls that have failed and that no caller has waited for."""
        if self.failures:
            failures, self.failures[:] = list(self.failures), []
            text = "; ".join(f"an asynchronous {what} failed: {type(e).__name__}: {e}" for what, e in failures)
            raise DeviceError(text) from failures[0][1]

    def was_raised(self, error: BaseException) -> None:
        """Note that a caller has got this error: `check` does not raise it again."""
        self.failures[:] = [failure for failure in self.failures if failure[1] is not error]


Streams = TorchStreams | HostStreams
Uses = tuple[tuple[Stream, Any], ...]
"""Streams that have used a block, each with the moment of its last use."""


class StreamOrder:
    """The streams that still use blocks, which it gets as their `Record`s, and free ranges."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        # free ranges [start, end) that are still used: disjoint, ascending
        self.fences: list[tuple[int, int, Uses]] = []
        self._limit = _FIRST_PRUNING

    def check_not_capturing(self, what: str) -> None:
        """Raise HeapError during a capture: the graph would repeat the operation without the heap's knowledge."""
        if self.streams.is_capturing():
            raise HeapError(
                f"{what}: the current stream is being captured into a graph, which uses its memory at every replay, "
                "unknown to the heap. Allocate before the capture, and free when the graph is not replayed any more"
            )

    # -- a block's life -----------------------------------------------------------------------------------------------
    def add(self, record: Any, stream: Stream) -> None:
        if stream not in record.streams:
            record.streams.append(stream)

    def end(self, record: Any) -> None:
        """Note up to which moment streams use a block that was freed.  A second call changes nothing."""
        if record.uses is None:
            self.add(record, self.streams.current())
            record.uses = tuple((stream, stream.record_event()) for stream in record.streams)

    def is_idle(self, record: Any) -> bool:
        """Whether this rank's streams are done with a block that was freed."""
        self.end(record)
        if record.uses:
            record.uses = tuple(use for use in record.uses if not use[1].query())
        return not record.uses

    def in_use(self) -> list[tuple[int, int]]:
        """Return the free ranges [start, end) that are still used.  Any thread may call it."""
        return [(start, end) for start, end, uses in list(self.fences) if not _are_past(uses)]

    # -- one rank -----------------------------------------------------------------------------------------------------
    def fence(self, start: int, end: int, record: Any) -> None:
        """Note that a free range may be handed out again, though streams may still use it."""
        if record.uses:
            insort(self.fences, (start, end, record.uses), key=_start)
            if len(self.fences) > self._limit:  # many: most of them are past
                self._prune()
                self._limit = max(_FIRST_PRUNING, 2 * len(self.fences))

    def hand_out(self, start: int, end: int) -> None:
        """Let the current stream, which gets a range, wait for those that used it before."""
        if not self.fences:
            return
        i, j = bisect_right(self.fences, start, key=_end), bisect_left(self.fences, end, key=_start)
        taken, current = self.fences[i:j], self.streams.current()
        rest = [part for a, b, uses in taken for part in ((a, start, uses), (end, b, uses)) if part[0] < part[1]]
        self.fences[i:j] = rest
        for _, _, uses in taken:
            for stream, event in uses:
                if stream != current:
                    current.wait_event(event)

    def unfenced(self, free: RangeSet) -> RangeSet:
        """Return what of free ranges no stream uses any more."""
        self._prune()
        ranges = RangeSet(free)
        for start, end, _ in self.fences:
            ranges.remove(start, end)
        return ranges

    def device_is_idle(self, freed: Iterable[Any]) -> None:
        """Note that the whole device was waited for: it uses nothing that was freed so far."""
        self.fences = []
        for record in freed:
            record.uses = ()

    def _prune(self) -> None:
        self.fences = [fence for fence in self.fences if not _are_past(fence[2])]


def _are_past(uses: Uses) -> bool:
    return all(event.query() for _, event in uses)
