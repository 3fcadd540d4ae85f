"""Handles of collectives: done already, done when a stream is there, or done when a thread of the host is."""

from __future__ import annotations

import concurrent.futures
import time
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 50e-6


class DoneWork:
    """Nothing is left to be done, or the current stream does it in order."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Return at once."""

    def is_completed(self) -> bool:
        """Return True."""
        return True


class StreamWork:
    """A collective on a stream of its own.

    Args:
        event: a torch.cuda.Event, recorded on that stream behind it.
        what: the operation, for messages.
        tensors: kept alive until the handle is gone.
    """

    def __init__(self, event: Any, what: str, tensors: tuple[Any, ...]) -> None:
        self._event = event
        self._what = what
        self._tensors = tensors

    def wait(self, timeout_s: float | None = None) -> None:
        """Let the current stream of the collective's device wait until it is done; the host goes on at once.

        Args:
            timeout_s: if given, the host waits instead, so long at most.

        Raises:
            CollectiveTimeoutError: it was not done in time.
        """
        if timeout_s is None:
            torch.cuda.current_stream(self._event.device).wait_event(self._event)  # the thread's may be another
            return
        deadline = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"{self._what} was not done within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def is_completed(self) -> bool:
        """Whether it is done."""
        return bool(self._event.query())


class HostWork:
    """A collective on a stream of the host.

    Args:
        future: of that stream.
        what: the operation, for messages.
        was_raised: called with an error that the caller gets.
    """

    def __init__(
        self, future: concurrent.futures.Future[Any], what: str, was_raised: Callable[[BaseException], None]
    ) -> None:
        self._future = future
        self._what = what
        self._was_raised = was_raised

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it is done.

        Args:
            timeout_s: so long at most.

        Raises:
            CollectiveTimeoutError: it was not done in time.
            Exception: what it raised, or a call of the team before it.
        """
        self.result(timeout_s)

    def result(self, timeout_s: float | None = None) -> Any:
        """The same; returns what the call does."""
        if not concurrent.futures.wait((self._future,), timeout_s).done:
            raise CollectiveTimeoutError(f"{self._what} was not done within {timeout_s:g} s")
        if (error := self._future.exception()) is not None:
            self._was_raised(error)
            raise error
        return self._future.result()

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        return self._future.done()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call something when it is done, has failed or was dropped: in whatever thread does that."""
        self._future.add_done_callback(lambda _: callback())
