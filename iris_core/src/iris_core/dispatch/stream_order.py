"""The order of one team's collectives on this rank, whatever streams or threads they are launched from.

The calls of a team share flags and workspaces, so no two of them may overlap on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris_core.device.launch_order import LaunchOrder
from iris_core.dispatch.work import HostWork, StreamWork

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.heap.streams import HostStream, HostStreams
    from iris_core.protocols import Work


class HostOrder:
    """On the CPU, where a launch ends when its kernel does: asynchronous calls run on a stream of their own.

    Args:
        streams: of the rank.
        keep: called with a tensor and the stream that is going to use it.
    """

    def __init__(self, streams: HostStreams, keep: Callable[[Any, Any], None]) -> None:
        self._streams = streams
        self._keep = keep
        self._stream: HostStream | None = None

    def run(self, launch: Callable[..., Any], plan: Any, *tensors: Any) -> Any:
        """Launch after everything that is on the stream, and wait for it; returns what `launch` does.

        Raises:
            DeviceError: an asynchronous call of this rank has failed before, and no caller has waited for it.
        """
        is_idle = self._stream is None or self._stream.is_idle
        self._streams.check()  # behind it: what fails from now on is under way, and the call fails with it
        if is_idle:
            return launch(plan, *tensors)
        return self._launch("call", launch, plan, *tensors).result()

    def run_async(self, what: str, launch: Callable[..., Any], plan: Any, *tensors: Any) -> Work:
        """Launch on the stream; `what` is for messages.  Raises like `run`."""
        self._streams.check()
        return self._launch(what, _finish, launch, plan, *tensors)

    def _launch(self, what: str, call: Callable[..., Any], *arguments: Any) -> HostWork:
        if self._stream is None:
            self._stream = self._streams.make()
        for each in arguments:
            if isinstance(each, torch.Tensor):
                self._keep(each, self._stream)
        return HostWork(self._stream.launch(what, call, *arguments), what, self._streams.was_raised)

    def mark(self) -> None:
        """Nothing can be under way that does not hold what it needs."""

    def close(self) -> None:
        """End the thread."""
        if self._stream is not None:
            self._stream.close()


def _finish(launch: Callable[..., Any], plan: Any, *tensors: Any) -> None:
    work = launch(plan, *tensors)
    if work is not None:
        work.wait()


class DeviceOrder(LaunchOrder):
    """On a GPU: a `LaunchOrder`, with a stream of its own for asynchronous calls.

    Args:
        index: of the device.
        keep: called with a tensor and the stream that is going to use it, where that is not the current one.
    """

    def __init__(self, index: int, keep: Callable[[Any, Any], None]) -> None:
        super().__init__(index)
        self._keep = keep
        self._side: Any = None

    def run_async(self, what: str, launch: Callable[..., Any], plan: Any, *tensors: Any) -> Work:
        """Launch on the team's own stream, after what the current stream does now; `what` is for messages."""
        if self._side is None:
            self._side = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]
        side = self._side
        side.wait_stream(torch.cuda.current_stream(self._index))
        used = tuple(tensor for tensor in tensors if tensor is not None)
        for tensor in used:
            self._keep(tensor, side)
        with torch.cuda.stream(side):
            work: Work | None = self.run(launch, plan, *tensors)
            if work is not None:
                return work
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(side)
        return StreamWork(event, what, used)

    def close(self) -> None:
        """Nothing is left to be done: the context has waited for the device."""
