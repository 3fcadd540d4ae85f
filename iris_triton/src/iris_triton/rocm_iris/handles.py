"""What `ctx.ccl` and `ctx.ops` of a script share: handles for which barriers wait, and configs that are advice."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from iris_core.dispatch.config import Config, FusedConfig
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.logs import logger
from iris_triton.rocm_iris.configs import plainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.dispatch.bind import Binder
    from iris_core.protocols import Work

R = TypeVar("R")

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
    """The part that `PortedCollectives` and `PortedOperations` have in common.

    Handles are kept by the thread that began them, which waits for its own: the one that runs operations on the CPU
    must not wait for later ones.  Those of a capture belong to the graph: outside of it they cannot be waited for, or
    asked, and the others cannot in it.
    """

    _binder: Binder

    def __init__(self, binder: Binder) -> None:
        super().__init__(binder)  # type: ignore[call-arg]
        self._under_way: dict[int, list[Work]] = {}
        self._plainer: dict[Any, Any] = {}

    def _begin(self, work: Work) -> None:
        """Keep a handle until `_join`, and drop those that are done."""
        place = _place()
        kept = self._under_way.get(place, [])
        if place != _CAPTURE:
            self._under_way.pop(_CAPTURE, None)  # of a capture that has ended
            kept = [each for each in kept if not each.is_completed()]
        self._under_way[place] = [*kept, work]

    def _join(self) -> None:
        """Let the current stream, on the CPU the caller, wait for all that this thread has begun."""
        for work in self._under_way.pop(_place(), ()):
            work.wait()

    def _meet(self, group: Any) -> None:
        """End a call that is not asynchronous: a barrier of the group's devices."""
        if len(self._binder.members_of(group)) > 1:
            self._binder.barrier(group, async_op=False)

    def _known(self, op: str, config: Any) -> Any:
        """Return the config with which `_oblige` has run such a call."""
        return self._plainer.get((op, config), config) if self._plainer else config

    def _oblige(self, op: str, config: Any, call: Callable[[Any], R], *, tiles: bool = False) -> R:
        """Return call(config), or call(a plainer config) where that is refused for the config's sake, on all ranks.

        With `tiles` the size of tiles is kept.  Raises what the first call did, if nothing helps.
        """
        if not isinstance(config, Config | FusedConfig):
            return call(config)
        try:
            return call(self._known(op, config))
        except (UnsupportedError, ArgumentError):
            for plain, left_out in plainer(config, tiles):
                with contextlib.suppress(UnsupportedError, ArgumentError):
                    result = call(plain)
                    logger.warning("%s: no algorithm here can fulfil %s; left out", op, left_out)
                    self._plainer[op, dataclasses.replace(config)] = plain
                    return result
            raise


def _place() -> int:
    """Of the capture that this thread makes, or of the thread."""
    is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    return _CAPTURE if is_capturing else threading.get_ident()
