"""Measure algorithms on this machine, for tables from which `ctx.ccl` and `ctx.ops` choose: what `iris tune` runs.

The first call at each point (one operation with one size or shape) measures all algorithms that can serve it, and the
launches that the best of them offer (IRIS_TUNE=exhaustive).  Then each is called by name, on data that is checked; an
algorithm that delivers wrong data is left out, and named.

`iris_core.tuning.collectives` and `iris_core.tuning.matmuls` say what a point is.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from iris_core.api import Iris
from iris_core.dispatch.first_calls import label
from iris_core.errors import ArgumentError, HeapExhaustedError
from iris_core.world import connect

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from iris_core.bench import RunOptions
    from iris_core.dispatch.choice import Explanation
    from iris_core.dispatch.tables import Entry
    from iris_core.world import World

_USEFUL = 2.0
"""An algorithm gets an entry where it takes at most so many times as long as the best: for calls that the better ones
cannot serve."""
_MAX_ENTRIES = 4
_GRACE_S = 600.0
"""After the limit, a point may take so long until the ranks are ended: compiling, and waits that time out."""


class Point(Protocol):
    """One operation with one size or shape."""

    @property
    def op(self) -> str:
        """The operation, for people."""

    @property
    def where(self) -> str:
        """The size or shape, for people."""

    def call(self, ctx: Iris) -> Call:
        """Allocate tensors, the inputs filled.  Collective: every rank calls it, in a scope."""


class Call(Protocol):
    """A point's call with its tensors."""

    def explain(self) -> Explanation:
        """Return which algorithms can serve it, and how long they take."""

    def run(self, algorithm: str | None = None, fields: Mapping[str, Any] | None = None) -> object:
        """Call it by an algorithm with fields of its config; by default by the library's choice."""

    def is_right(self) -> bool:
        """Whether this rank's output is what it must be."""

    def spoil(self) -> None:
        """Make it wrong."""


@dataclass(frozen=True)
class Tuned:
    """What was found; the same on every rank.

    Attributes:
        device: name of the device, as tables have it.
        entries: of the table.
        wrong: algorithms that delivered wrong data.
        passed_over: what was not measured, with the reason.
    """

    device: str
    entries: tuple[Entry, ...]
    wrong: tuple[str, ...]
    passed_over: tuple[str, ...]


class Tuner:
    """Measures points on this rank.

    Collective: every rank of the world makes one, and calls `best_launches` with the same points in the same order.

    Args:
        ctx: the open context, whose first calls measure everything.
        world: its ranks, for exchanges.
        limit_s: no point is begun after so many seconds.
    """

    def __init__(self, ctx: Iris, world: World, limit_s: float) -> None:
        self.ctx = ctx
        self._world = world
        self._end = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._wrong: list[str] = []
        self._passed_over: list[str] = []

    def found(self, entries: Sequence[Entry]) -> Tuned:
        """Return everything that was found."""
        return Tuned(device_name(self.ctx), tuple(entries), tuple(self._wrong), tuple(self._passed_over))

    def best_launches(self, point: Point) -> list[Entry] | None:
        """Measure a point.

        Returns:
            The best launch of each algorithm that is fast enough for an entry, the fastest first; None if no time is
            left.
        """
        over: list[bool] = self._world.all_gather_object(time.monotonic() >= self._end)
        if over[0]:  # by rank 0's clock, so that all stop at the same point
            self._passed_over.append(f"{point.op} at {point.where}: the limit of {self._limit_s:.0f} s was reached")
            return None
        try:
            with self.ctx.scope():
                entries = self._measure(point, point.call(self.ctx))
        except HeapExhaustedError as error:  # on all ranks alike; what was measured before is kept
            self._passed_over.append(f"{point.op} at {point.where}: {error}")
            return []
        if not entries:
            self._passed_over.append(f"{point.op} at {point.where}: there is nothing to choose from")
        elif self.ctx.cur_rank == 0:
            shown = "; ".join(f"{label(e.algorithm, e.config)} {e.seconds * 1e6:.1f} us" for e in entries[:3])
            print(f"{point.op} {point.where}: {shown}", file=sys.stderr, flush=True)
        return [e for e in entries if e.seconds <= _USEFUL * entries[0].seconds][:_MAX_ENTRIES]

    def _measure(self, point: Point, call: Call) -> list[Entry]:
        """Measure all algorithms by the first call, and check each that has an entry."""
        call.run()
        candidates = call.explain().candidates
        found = [each.entry for each in candidates if each.is_near and each.entry is not None and not each.entry.source]
        right = []
        for entry in sorted(found, key=lambda each: each.seconds):
            call.spoil()
            call.run(entry.algorithm, entry.config)
            everyone: list[bool] = self._world.all_gather_object(call.is_right())
            if all(everyone):
                right.append(entry)
            else:
                ranks = ", ".join(str(rank) for rank, ok in enumerate(everyone) if not ok)
                self._wrong.append(f"{point.op} {label(entry.algorithm, entry.config)} at {point.where}: ranks {ranks}")
        return right


@contextlib.contextmanager
def tuner_of_this_rank(options: RunOptions) -> Iterator[Tuner]:
    """Open a context, and make the tuner.

    Collective: every rank of the world calls it with the same arguments.

    Args:
        options: ranks, plugins, heap and limit; its axes are not looked at.
    """
    faulthandler.dump_traceback_later(options.limit_s + _GRACE_S, exit=True)
    try:
        with Iris(
            options.heap_size, allocator=options.allocator, backend=options.backend, device=options.device
        ) as ctx:
            world = connect(None, ctx.settings.barrier_timeout)
            try:
                yield Tuner(ctx, world, options.limit_s)
            finally:
                world.close()
    finally:
        faulthandler.cancel_dump_traceback_later()


def device_name(ctx: Iris) -> str:
    """Return the name of a context's device, as tables have it."""
    return "cpu" if ctx.device == "cpu" else torch.cuda.get_device_name(ctx.target.index)


def check_names(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise ArgumentError unless all names are known, and given once."""
    if strange := [each for each in given if each not in known]:
        raise ArgumentError(f"no {kind} {', '.join(strange)} can be tuned; there are {', '.join(known)}")
    if not given or len(set(given)) < len(given):
        raise ArgumentError(f"give each {kind} once, and one at least")
