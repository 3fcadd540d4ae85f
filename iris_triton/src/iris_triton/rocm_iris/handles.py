"""Asynchronous operations: a result that is a handle as well, and those for which barriers wait."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from iris_core.protocols import Work


class Handle:
    """The result of a call that may be asynchronous, and then is its handle.

    Attributes:
        work: the handle; None of a call that was not asynchronous.
    """

    work: Work | None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for an asynchronous call; see `iris_core.protocols.Work`."""
        if self.work is not None:
            self.work.wait(timeout_s)

    def is_completed(self) -> bool:
        """Whether an asynchronous call is done; True of one that was none."""
        return self.work is None or self.work.is_completed()


class UnderWay:
    """Handles of one context's operations, by the thread that began them.

    A thread waits for its own: the one that runs operations on the CPU must not wait for later ones.
    Handles of a capture belong to the graph, others do not: neither can be waited for, or asked, on the other side.
    """

    def __init__(self) -> None:
        self._outside: dict[int, list[Work]] = {}
        self._captured: list[Work] = []

    def add(self, work: Work) -> None:
        """Keep a handle until `join`, and drop those that are done."""
        if _is_capturing():
            self._captured.append(work)
            return
        self._captured.clear()  # of a capture that has ended
        thread = threading.get_ident()
        self._outside[thread] = [each for each in self._outside.get(thread, ()) if not each.is_completed()] + [work]

    def join(self) -> None:
        """Let the current stream, on the CPU the caller, wait for all that this thread has begun."""
        if _is_capturing():
            works, self._captured = self._captured, []
        else:
            works = self._outside.pop(threading.get_ident(), [])
        for work in works:
            work.wait()


def _is_capturing() -> bool:
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
