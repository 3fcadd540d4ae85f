"""Handles of collectives: done already, done when a stream is there, or done when a thread is."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

import torch

from iris_core.errors import CollectiveTimeoutError

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
        """Let the current stream wait until it is done; the host goes on at once.

        Args:
            timeout_s: if given, the host waits instead, so long at most.

        Raises:
            CollectiveTimeoutError: it was not done in time.
        """
        if timeout_s is None:
            torch.cuda.current_stream().wait_event(self._event)
            return
        deadline = time.monotonic() + timeout_s
        while not self._event.query():
            if time.monotonic() > deadline:
                raise CollectiveTimeoutError(f"{self._what} was not done within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def is_completed(self) -> bool:
        """Whether it is done."""
        return bool(self._event.query())


class FutureWork:
    """A collective that a thread of this process runs, on the CPU.

    Args:
        future: of that thread.
        what: the operation, for messages.
    """

    def __init__(self, future: concurrent.futures.Future[Any], what: str) -> None:
        self._future = future
        self._what = what

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until it is done.

        Args:
            timeout_s: so long at most.

        Raises:
            CollectiveTimeoutError: it was not done in time.
            Exception: what it raised.
        """
        try:
            self._future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            if self._future.done():  # the collective itself raised a TimeoutError
                raise
            raise CollectiveTimeoutError(f"{self._what} was not done within {timeout_s:g} s") from error

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""
        return self._future.done()
