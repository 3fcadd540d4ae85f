"""The order of launches on a device that share flags, whatever streams or threads they come from."""

from __future__ import annotations

import importlib.util
import threading
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable

_CAPTURES_AT_A_TIME = 16


class LaunchOrder:
    """On a GPU: a launch on another stream than the last one first waits for that stream.

    Launches that a graph captures are ordered in the same way, but among themselves: nothing orders replays.

    Args:
        index: of the device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._raw_stream = torch._C._cuda_getCurrentRawStream
        self._lock = threading.RLock()  # a launch follows the one that it waits for, from whatever thread
        self._last_raw: int | None = None
        self._last: Any = None
        self._captured: dict[int | None, Any] = {}

    def run(self, launch: Callable[..., Any], plan: Any, *tensors: Any) -> Any:
        """Launch on the current stream; returns what `launch` does.  Tensors may be None."""
        with self._lock:
            if self._raw_stream(self._index) != self._last_raw:
                self._follow()
            return launch(plan, *tensors)

    def mark(self) -> Any:
        """Return an event that has happened when everything launched so far is done; None if there was nothing."""
        if self._last is None or capture_of(self._last) != 0:
            return None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._last)
        return event

    def _follow(self) -> None:
        """Make the current stream the last one, or the last one of the graph that it is captured into."""
        current = torch.cuda.current_stream(self._index)
        capture = capture_of(current)
        # What was captured on the last stream was not noticed; torch has waited for the device before the capture.
        last = self._last if capture == 0 else self._captured.pop(capture, self._last)
        if last is not None and last != current and capture_of(last) == capture:
            current.wait_stream(last)
        if capture == 0:
            self._last, self._last_raw = current, self._raw_stream(self._index)
            return
        self._last_raw = None
        while len(self._captured) >= _CAPTURES_AT_A_TIME:
            del self._captured[next(iter(self._captured))]
        self._captured[capture] = current


def current_capture(index: int) -> int | None:
    """Return `capture_of` a device's current stream."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    return capture_of(torch.cuda.current_stream(index))


def capture_of(stream: Any) -> int | None:
    """Return the number of the capture that a torch stream is part of: 0 for none, None where it cannot be asked for.

    It is asked for through cuda-bindings, which torch's CUDA wheels bring.
    """
    with torch.cuda.stream(stream):
        if not torch.cuda.is_current_stream_capturing():
            return 0
    if torch.version.hip or importlib.util.find_spec("cuda") is None:
        return None
    from cuda.bindings import driver

    code, _, number, *_ = driver.cuStreamGetCaptureInfo(stream.cuda_stream)
    if int(code) != 0:
        raise DriverError("cuStreamGetCaptureInfo", int(code), code.name)
    return int(number)
