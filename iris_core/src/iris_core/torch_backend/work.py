"""Work of the backend's operations, a `torch.distributed.Work` over a thread or a CUDA event, and profiler events."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._mode_utils import no_dispatch

from iris_core.api import Iris
from iris_core.device.launch_order import SideStream
from iris_core.providers.torch_distributed import watch_for_lost


def begin_event(name: str, tensors: Sequence[torch.Tensor], result: Sequence[torch.Tensor]) -> Any:
    """Begin an event "iris:name" of torch's profiler, with the shapes of the inputs; None where no profiler runs."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return None
    outputs = {id(each) for each in result}
    inputs = [each for each in tensors if id(each) not in outputs] or tensors
    return torch.autograd._record_function_with_args_enter(f"iris:{name}", *inputs)  # type: ignore[attr-defined]


def end_event(event: Any) -> None:
    """End what `begin_event` returned; in another thread, the profiler calls it asynchronous."""
    if event is not None:
        torch.autograd._record_function_with_args_exit(event)  # type: ignore[attr-defined]


class DoneWork(dist.Work):
    """An operation that is finished, or that the current stream has in its order."""

    def __init__(self, result: list[Any], device: torch.device) -> None:
        super().__init__()
        self._result = result
        self._device = device

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Let the current stream, or on the CPU the caller, wait for the operation."""
        return True

    def synchronize(self) -> None:
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Whether the operation is finished; it does not wait."""
        return True

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the output tensors; waiting for it makes the current stream wait."""
        devices: list[Any] | None = [self._device] if self._device.type == "cuda" else None
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        self._fulfil(future)
        return future

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        future.set_result(self.result())


class StreamWork(DoneWork):
    """An operation on a stream of its own; `wait` makes the current stream wait for it.

    Its result lives as long as it does, its other tensors until the stream that it was called on waits.  So torch's
    allocator, which takes a while to ask other streams, need not know of the stream (as NCCL's works do from torch 2.8
    on).
    """

    def __init__(
        self, result: list[Any], device: torch.device, side: SideStream, tensors: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(result, device)
        self._tensors, self._caller, self._side, self._event = tensors, side.current(), side, side.mark()

    def __del__(self) -> None:
        if hasattr(self, "_event"):
            with no_dispatch():  # what runs as the work is collected may have fake tensors
                for each in self._tensors:
                    each.record_stream(self._side.stream)
            self._side.spare.append(self._event)

    def wait(self, timeout: timedelta | None = None) -> bool:
        current = self._side.current()
        self._event.wait(current)
        if current == self._caller:
            self._tensors = ()
        return super().wait()

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def _fulfil(self, future: torch.futures.Future[Any]) -> None:
        with torch.cuda.stream(self._side.stream):  # whose event the future takes
            super()._fulfil(future)


class ThreadWork(DoneWork):
    """An operation that a thread of the group runs."""

    def __init__(
        self, result: list[Any], device: torch.device, running: concurrent.futures.Future[Any], name: str
    ) -> None:
        super().__init__(result, device)
        self._running, self._name = running, name

    def wait(self, timeout: timedelta | None = None) -> bool:
        try:
            self._running.result(None if not timeout else timeout.total_seconds())  # torch says "none" as 0
        except TimeoutError as e:
            if self._running.done():  # the operation's own error is one, too
                raise
            raise RuntimeError(f"{self._name}: not finished within {timeout}") from e
        return super().wait()

    def is_completed(self) -> bool:
        return self._running.done()

    def is_success(self) -> bool:
        return self._running.done() and self._running.exception() is None

    def get_future(self) -> torch.futures.Future[Any]:
        if self.is_success():
            return super().get_future()
        ended: torch.futures.Future[Any] = torch.futures.Future()
        result, running = self.result(), self._running

        def pass_on_beside(_: Any) -> None:
            # what waits for the future may itself wait for a later call, which the group's thread runs
            threading.Thread(target=ended.set_result, args=(None,), daemon=True).start()

        def outcome(_: Any) -> list[Any]:
            running.result()  # `set_exception` would give C++ code, such as DDP's, the error as a value
            return result

        running.add_done_callback(pass_on_beside)
        return ended.then(outcome)


class SeveralWorks(DoneWork):
    """Works that were begun together."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__([], torch.device("cpu"))
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for each in self._works:
            each.wait(*([] if timeout is None else [timeout]))
        return super().wait()

    def is_completed(self) -> bool:
        return all(each.is_completed() for each in self._works)

    def is_success(self) -> bool:
        return all(each.is_success() for each in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the works' results; gloo's messages have none, and raise."""
        return torch.futures.collect_all([each.get_future() for each in self._works])


@contextlib.contextmanager
def watched(contexts: Mapping[str, Iris], what: str) -> Iterator[None]:
    """Raise PeerLostError for an error of the group inside, if a peer of `contexts` is lost; else say `what` failed."""
    try:
        yield
    except RuntimeError as error:
        for ctx in contexts.values():
            watch_for_lost(ctx.heap.check_peers)
        error.args = (f"{what}: {error}",)
        raise


class PassedWork(dist.Work):
    """A work of the group inside; see `watched`."""

    def __init__(self, work: dist.Work, contexts: Mapping[str, Iris], what: str) -> None:
        super().__init__()
        self._work, self._about = work, (contexts, what)

    def _call(self, name: str, *args: Any, **named: Any) -> Any:
        with watched(*self._about):
            return getattr(self._work, name)(*args, **named)


for _name in ("wait", "synchronize", "is_completed", "is_success", "exception", "result", "get_future", "_source_rank",
              "source_rank", "block_current_stream"):  # fmt: skip
    setattr(PassedWork, _name, functools.partialmethod(PassedWork._call, _name))
