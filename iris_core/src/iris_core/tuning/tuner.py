"""Measure algorithms on this machine, for tables from which `ctx.ccl` and `ctx.ops` choose: what `iris tune` runs.

The first call at each point (one operation with one size or shape) measures all algorithms that can serve it, and the
launches that the best of them offer (IRIS_TUNE=exhaustive).  Then each is called by name, on data that is checked; an
algorithm that delivers wrong data is left out, and named.

`iris_core.tuning.samples` says what the points are.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from iris_core.api import Iris
from iris_core.bench import RunOptions
from iris_core.bench.runner import opened_on_this_rank
from iris_core.dispatch.config import FusedConfig
from iris_core.dispatch.first_calls import label
from iris_core.dispatch.tables import Entry
from iris_core.errors import HeapExhaustedError
from iris_core.tuning.samples import SPOILED, Point
from iris_core.world import World

_USEFUL = 2.0
"""An algorithm gets an entry if its time is at most this multiple of the best one: for calls that the better ones
cannot serve."""
_MAX_ENTRIES = 4
_NEAR = 1.1  # so does one that outside of graphs takes at most this multiple
_GRACE_S = 600.0
"""After the limit, a point may take so long until the ranks are ended: compiling, and waits that time out."""


@dataclass(frozen=True)
class Tuned:
    """Results of tuning; the same on every rank."""

    device: str  # its name, as tables have it
    entries: tuple[Entry, ...]  # of the table
    wrong: tuple[str, ...]  # algorithms that delivered wrong data
    passed_over: tuple[str, ...]  # what was not measured, with the reason


def tune_on_this_rank(wanted: Any, options: RunOptions) -> Tuned:
    """Measure what is wanted (`TuneOptions` or `FusedTuneOptions`), as one of the ranks.

    Collective: every rank of the world calls it with the same arguments.  Of the options, ranks, plugins, heap and
    limit count; when the limit is reached, what is left is passed over.

    Raises:
        ArgumentError: the ranks cannot divide what is wanted.
        DeviceTimeoutError: an algorithm did not end.
    """
    with opened_on_this_rank(replace(options, limit_s=options.limit_s + _GRACE_S)) as (ctx, world):
        tuner = _Tuner(ctx, world, options.limit_s)
        points = wanted.points(ctx.cur_rank, ctx.num_ranks)
        entries = tuple(entry for point in points for entry in tuner.best_launches(point))
        device = "cpu" if ctx.device == "cpu" else torch.cuda.get_device_name(ctx.target.index)
        return Tuned(device, entries, tuple(tuner.wrong), tuple(tuner.passed_over))


class _Tuner:
    """Measures points on this rank; `world` is for exchanges."""

    def __init__(self, ctx: Iris, world: World, limit_s: float) -> None:
        self._ctx, self._world = ctx, world
        self._limit_s, self._end = limit_s, time.monotonic() + limit_s
        self.wrong: list[str] = []
        self.passed_over: list[str] = []

    def best_launches(self, point: Point) -> list[Entry]:
        """Return the best launch of each algorithm that is fast enough for an entry, the fastest first."""
        dim = point.sample.options.get("gather_dim")
        name = point.sample.op if dim is None else f"{point.sample.op}(gather_dim={dim})"
        entries, problem = list["Entry"](), ""
        over: list[bool] = self._world.all_gather_object(time.monotonic() >= self._end)
        if over[0]:  # by rank 0's clock, so that all stop at the same point
            problem = f"the limit of {self._limit_s:.0f} s was reached"
        else:
            try:
                with self._ctx.scope():
                    entries = self._measure(point, name)
            except HeapExhaustedError as error:  # on all ranks alike; what was measured before is kept
                problem = str(error)
        if not entries:
            self.passed_over.append(f"{name} at {point.where}: {problem or 'there is nothing to choose from'}")
        elif self._ctx.cur_rank == 0:
            shown = "; ".join(f"{label(e.algorithm, e.config)} {e.seconds * 1e6:.1f} us" for e in entries[:3])
            print(f"{name} {point.where}: {shown}", file=sys.stderr, flush=True)
        eager_s = min((e.eager_seconds for e in entries), default=0.0)
        best = [e for e in entries if e.seconds <= _USEFUL * entries[0].seconds][:_MAX_ENTRIES]
        best += [e for e in entries if e not in best and e.eager_seconds <= _NEAR * eager_s]
        return [replace(e, dtype=point.dtype or e.dtype) for e in best]

    def _measure(self, point: Point, name: str) -> list[Entry]:
        """Measure all algorithms by the first call, and check each that has an entry."""
        sample, config = point.sample, point.config
        face: Any = self._ctx.ops if isinstance(config, FusedConfig) else self._ctx.ccl
        out, *inputs = tensors = sample.tensors(self._ctx)
        if sample.op == "broadcast":
            tensors = [inputs[0] if out is None else out]
        run = getattr(face, sample.op)
        run(*tensors, config=config, **sample.options)
        candidates = face.explain(sample.op, *tensors, config=config, **sample.options).candidates
        found = [each.entry for each in candidates if each.is_near and each.entry is not None and not each.entry.source]
        right = []
        for entry in sorted(found, key=lambda each: each.seconds):
            if out is not None:
                out.fill_(SPOILED)
            run(*tensors, config=replace(config, algorithm=entry.algorithm, **entry.config), **sample.options)
            everyone: list[bool] = self._world.all_gather_object(sample.is_right(out))
            if all(everyone):
                right.append(entry)
            else:
                ranks = ", ".join(str(rank) for rank, ok in enumerate(everyone) if not ok)
                self.wrong.append(f"{name} {label(entry.algorithm, entry.config)} at {point.where}: ranks {ranks}")
        return right
