"""The order of launches that share flags, whatever streams or threads they come from, and their handles."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from iris_core.errors import CollectiveTimeoutError, DriverError
from iris_core.protocols import Work

_CAPTURES_AT_A_TIME = 16
_POLL_S = 50e-6


class SideStream:
    """A second stream of a GPU, and the waits between it and the current one, in a tenth of the time that torch takes.

    Kernels of a lower `priority` get multiprocessors first.
    """

    def __init__(self, index: int, priority: int = 0) -> None:
        self.stream: Any = torch.cuda.Stream(index, priority=priority)  # type: ignore[no-untyped-call]
        self._index = index
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call] # of one wait after the other
        self._lock = threading.Lock()
        self._known: tuple[int | None, Any] = None, None  # handle of the last current stream, and the stream
        self.spare: list[Any] = []  # events of `mark` that are given back: to make one takes longer than to record it

    def mark(self) -> Any:
        """Return an event that is complete when its earlier work is done; the caller may append it to `spare` later."""
        try:
            event = self.spare.pop()
        except IndexError:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def current(self) -> Any:
        """Return the current stream."""
        raw, known = torch._C._cuda_getCurrentRawStream(self._index), self._known
        if raw != known[0]:
            known = self._known = raw, torch.cuda.current_stream(self._index)
        return known[1]

    def follow(self) -> None:
        """Make it wait for earlier work of the current stream."""
        with self._lock:
            self._event.record(self.current())
            self._event.wait(self.stream)

    def join(self) -> None:
        """Make the current stream wait for its earlier work."""
        with self._lock:
            self._event.record(self.stream)
            self._event.wait(self.current())


class DeviceOrder:
    """On a GPU: a launch on another stream than the last one first waits for that stream.

    Launches that a graph captures are ordered in the same way, but among themselves: nothing orders replays.
    Asynchronous calls have a stream of their own; `keep` is called with their tensors and that stream.
    """

    def __init__(self, index: int, keep: Callable[[Any, Any], None] = lambda tensor, stream: None) -> None:
        self._index, self._keep = index, keep
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._lock = threading.RLock()  # a launch follows the one that it waits for, from whatever thread
        self._last_raw: int | None = None
        self._last: Any = None
        self._captured: dict[int | None, Any] = {}
        self._side: SideStream | None = None
        self._event: Any = None  # of streams that wait for one another, again and again
        self._engine: str | None = None  # of the last launch
        self._work: tuple[str, Any] | None = None  # of an engine's asynchronous launch

    def run(self, launch: Callable[..., Any], *arguments: Any, engine: str | None = None) -> Any:
        """Launch on the current stream; returns what `launch` does.

        An engine that has a name orders its own launches: between two of them, nothing is made to wait.  Of those that
        end on a stream of the engine, `launch` returns a handle with `wait()`.
        """
        with self._lock:
            if self._work is not None and engine != self._work[0] and current_capture(self._index) == 0:
                self._work[1].wait()
                self._work = None
            if self._raw_stream(self._index) != self._last_raw:
                self._follow(is_ordered=engine is not None and engine == self._engine)
            self._engine = engine if self._last_raw is not None else None  # a graph's launches are not among them
            result = launch(*arguments)
            if engine is not None:
                self._work = None if result is None else (engine, result)
            return result

    def continues(self, engine: str) -> bool:
        """Whether an engine's next launch is made to wait for nothing."""
        return self._engine == engine

    def mark(self) -> Any:
        """Return an event that is complete when everything launched so far is done; None if there was nothing."""
        if self._last is None or capture_of(self._last) != 0:
            return None
        return self._last.record_event()

    def _follow(self, is_ordered: bool = False) -> None:
        """Make the current stream the last one, or the last one of the graph that it is captured into."""
        current = torch.cuda.current_stream(self._index)
        capture = current_capture(self._index)
        # What was captured on the last stream was not noticed; torch has waited for the device before the capture.
        last = self._last if capture == 0 else self._captured.pop(capture, self._last)
        is_ordered = is_ordered and capture == 0
        if last is not None and last != current and not is_ordered and capture_of(last) == capture:
            if self._event is None:
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(last)
            current.wait_event(self._event)
        if capture == 0:
            self._last, self._last_raw = current, self._raw_stream(self._index)
            return
        self._last_raw = None
        while len(self._captured) >= _CAPTURES_AT_A_TIME:
            del self._captured[next(iter(self._captured))]
        self._captured[capture] = current

    def run_async(self, what: str, launch: Callable[..., Any], plan: Any, *tensors: Any) -> Work:
        """Launch on the team's own stream, after what the current stream does now; `what` is for messages."""
        if self._side is None:
            self._side = SideStream(self._index)
        self._side.follow()
        side = self._side.stream
        used = tuple(tensor for tensor in tensors if tensor is not None)
        for tensor in used:
            self._keep(tensor, side)
        work: Work | None = on_stream(side, self.run, launch, plan, *tensors)
        return StreamWork(side.record_event(), what, used) if work is None else work

    def close(self) -> None:
        """Nothing is left to be done: the context has waited for the device."""


def current_capture(index: int) -> int | None:
    """Return `capture_of` a device's current stream."""
    return capture_of(torch.cuda.current_stream(index)) if torch.cuda.is_current_stream_capturing() else 0


def capture_of(stream: Any) -> int | None:
    """Return the number of the capture that a torch stream is part of: 0 for none, None if it cannot be queried.

    The query needs cuda-bindings, which torch's CUDA wheels bring.
    """
    if not on_stream(stream, torch.cuda.is_current_stream_capturing):
        return 0
    if torch.version.hip or importlib.util.find_spec("cuda") is None:
        return None
    from cuda.bindings import driver

    code, _, number, *_ = driver.cuStreamGetCaptureInfo(stream.cuda_stream)
    if int(code) != 0:
        raise DriverError("cuStreamGetCaptureInfo", int(code), code.name)
    return int(number)


def on_stream(stream: Any, call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns with another stream as the current one; `torch.cuda.stream` takes longer."""
    index, device, select = stream.device_index, torch.cuda.current_device(), torch._C._cuda_setStream
    before = torch._C._cuda_getCurrentStream(index)
    select(stream_id=stream.stream_id, device_index=index, device_type=stream.device_type)
    try:
        return call(*arguments)
    finally:
        select(stream_id=before[0], device_index=before[1], device_type=before[2])
        if device != index:
            torch.cuda.set_device(device)


class Begun:
    """A handle of what is under way, which `finish` ends, once; of what the current stream does in order, without."""

    def __init__(self, finish: Callable[[], None] | None = None) -> None:
        self._finish = finish

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end: on the CPU the host does, else the current stream."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def is_completed(self) -> bool:
        """Whether a caller has waited for the end."""
        return self._finish is None


class StreamWork:
    """A collective on a stream of its own; keeps its tensors alive."""

    def __init__(self, event: Any, what: str, tensors: tuple[Any, ...]) -> None:
        self._event, self._what, self._tensors = event, what, tensors

    def wait(self, timeout_s: float | None = None) -> None:
        """Let the current stream of the collective's device wait until it is done; the host goes on at once."""
        if timeout_s is None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)  # the thread's may be another
            return
        deadline = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"{self._what} was not done within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def is_completed(self) -> bool:
        return bool(self._event.query())
