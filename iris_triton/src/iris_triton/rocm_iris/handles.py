"""Asynchronous operations: a result that is a handle as well, and those for which barriers wait."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from iris_triton.rocm_iris.configs import Obliging

if TYPE_CHECKING:
    from iris_core.dispatch.bind import Binder
    from iris_core.protocols import Work


_CAPTURE = -1


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


class Ported:
    """What `ctx.ccl` and `ctx.ops` of a script have in common.

    Attributes:
        under_way: asynchronous operations, for which the context's barriers wait.
    """

    _binder: Binder

    def __init__(self, binder: Binder) -> None:
        super().__init__(binder)  # type: ignore[call-arg]
        self.under_way = UnderWay()
        self._obliging = Obliging()

    def _meet(self, group: Any) -> None:
        """End a call that is not asynchronous: a barrier of the group's devices."""
        if len(self._binder.members_of(group)) > 1:
            self._binder.barrier(group, async_op=False)


class UnderWay:
    """Handles of one context's operations, by the thread that began them.

    A thread waits for its own: the one that runs operations on the CPU must not wait for later ones.
    Handles of a capture belong to the graph, others do not: neither can be waited for, or asked, on the other side.
    """

    def __init__(self) -> None:
        self._works: dict[int, list[Work]] = {}

    def add(self, work: Work) -> None:
        """Keep a handle until `join`, and drop those that are done."""
        place = _place()
        kept = self._works.get(place, [])
        if place != _CAPTURE:
            self._works.pop(_CAPTURE, None)  # of a capture that has ended
            kept = [each for each in kept if not each.is_completed()]
        self._works[place] = [*kept, work]

    def join(self) -> None:
        """Let the current stream, on the CPU the caller, wait for all that this thread has begun."""
        for work in self._works.pop(_place(), ()):
            work.wait()


def _place() -> int:
    """Of the capture that this thread makes, or of the thread."""
    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return _CAPTURE if is_capturing else threading.get_ident()
