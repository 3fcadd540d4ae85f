"""Measuring algorithms on this machine, for tables from which `ctx.ccl` and `ctx.ops` choose: what `iris tune` does.

At each point (one operation with one size or shape) all algorithms are measured as they would choose their launch
themselves, and those that come near the best again with every configuration that they offer (their `tunings`).  All
ranks see the same results and so take the same decisions.  Data is verified in the timed configuration; who delivers
wrong data is left out, and named.

What a point is, `iris_core.tuning.collectives` and `iris_core.tuning.matmuls` say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import math
import re
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from iris_core.api import Iris
from iris_core.errors import ArgumentError, HeapExhaustedError, IrisError, UnsupportedError
from iris_core.world import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from iris_core.bench import RunOptions, State
    from iris_core.dispatch.choice import Explanation
    from iris_core.dispatch.tables import Entry
    from iris_core.world import World

_FIRST_ROUNDS = 3
_NEAR = 1.3
"""An algorithm is tuned where it takes at most so many times as long as the best."""
_USEFUL = 2.0
"""It gets an entry where it takes at most so many times as long: for calls that the better ones cannot serve."""
_MAX_ENTRIES = 4
_HOPELESS = 3.0
"""It is left out at the next size where it took more than so many times as long, and more than at the size before."""
_GRACE_S = 600.0
"""After the limit, a point may take so long until the ranks are ended: compiling, and waits that time out."""

Launch = tuple[str, tuple[tuple[str, Any], ...]]
"""An algorithm's name, and fields of its config."""


class Point(Protocol):
    """One operation with one size or shape."""

    @property
    def op(self) -> str:
        """The operation, and what else is a kind of its own: whoever is wrong is wrong in it at all sizes."""

    @property
    def where(self) -> str:
        """The size or shape, for people."""

    def call(self, ctx: Iris) -> Call:
        """Allocate tensors, the inputs filled.  Collective: every rank calls it, in a scope."""


class Call(Protocol):
    """A point's call with its tensors."""

    def explain(self) -> Explanation:
        """Return which algorithms can serve it."""

    def runner(self, algorithm: str, fields: Mapping[str, Any]) -> Callable[[], object]:
        """Return the call by an algorithm, with fields of its config."""

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
        wrong: algorithms that delivered wrong data, with what was wrong.
        passed_over: what was not measured, with the reason.
    """

    device: str
    entries: tuple[Entry, ...]
    wrong: tuple[str, ...]
    passed_over: tuple[str, ...]


@dataclass
class Series:
    """What is remembered from one point to the next larger one: who has no hope any more.

    Attributes:
        before: how many times as long as the best each took at the point before.
        hopeless: algorithms that are not measured any more.
    """

    before: dict[str, float] = field(default_factory=dict)
    hopeless: set[str] = field(default_factory=set)

    def learn(self, ratios: Mapping[str, float]) -> None:
        """Take over what was measured."""
        behind = (name for name, r in ratios.items() if r > _HOPELESS and r > self.before.get(name, math.inf))
        self.hopeless.update(behind)
        self.before = dict(ratios)


class Tuner:
    """Measures points on this rank.

    Collective: every rank of the world makes one, and calls `best_launches` with the same points in the same order.

    Args:
        ctx: the open context.
        world: its ranks, for exchanges.
        options: rounds, and the limit.
    """

    def __init__(self, ctx: Iris, world: World, options: RunOptions) -> None:
        from iris_core.bench.runner import Runner

        self._ctx = ctx
        self._world = world
        self._end = time.monotonic() + options.limit_s
        self._limit_s = options.limit_s
        first = dataclasses.replace(options, rounds=min(_FIRST_ROUNDS, options.rounds))
        self._first, self._again = Runner(world, ctx, first), Runner(world, ctx, options)
        self._wrong: dict[tuple[str, str, str], str] = {}
        self._passed_over: list[str] = []

    @property
    def ctx(self) -> Iris:
        """The context."""
        return self._ctx

    def found(self, entries: Sequence[Entry]) -> Tuned:
        """Return everything that was found."""
        wrong = tuple(f"{op} {label} at {where}: {problem}" for (op, label, where), problem in self._wrong.items())
        return Tuned(device_name(self._ctx), tuple(entries), wrong, tuple(self._passed_over))

    def best_launches(self, point: Point, series: Series, *, all_of_them: bool = False) -> dict[Launch, float] | None:
        """Measure a point.

        Args:
            point: the point.
            series: of the smaller points before it.
            all_of_them: return also what is too slow for an entry: it tells tables of other places that it is.

        Returns:
            The best launch of each algorithm that is fast enough for an entry, in seconds, the fastest first; None if
            there is nothing to choose, or no time left.
        """
        if self._is_over():
            reason = f"the limit of {self._limit_s:.0f} s was reached"
            self._passed_over.append(f"{point.op} at {point.where}: {reason}")
            return None
        try:
            fastest = self._fastest_launches(point, series)
        except HeapExhaustedError as error:  # on all ranks alike; what was measured before is kept
            self._passed_over.append(f"{point.op} at {point.where}: {error}")
            return None
        if not fastest or all_of_them:
            return fastest
        best = next(iter(fastest.values()))
        useful = [(launch, s) for launch, s in fastest.items() if s <= _USEFUL * best]
        return dict(useful[:_MAX_ENTRIES])

    def _fastest_launches(self, point: Point, series: Series) -> dict[Launch, float] | None:
        tunings = self._tunings(point)
        if len(tunings) < 2 and not series.before:
            self._passed_over.append(f"{point.op}: only {', '.join(tunings) or 'nothing'} can serve it")
            return None
        broken = {label.split()[0] for op, label, _ in self._wrong if op == point.op}
        names = [name for name in tunings if name not in series.hopeless | broken]
        times = self._measure(point, [(name, ()) for name in names], self._first)
        if not times:
            return {}
        best = min(times.values())
        again = [
            (name, tuple(sorted(config.items())))
            for (name, _), seconds in times.items()
            if seconds <= _NEAR * best
            for config in tunings[name]
        ]
        # what was not near is not measured again, but may still be of use
        times |= self._measure(point, again, self._again)
        fastest = _fastest(times)
        best = next(iter(fastest.values()))
        series.learn({name: seconds / best for (name, _), seconds in fastest.items()})
        self._report(point, fastest)
        return fastest

    def _is_over(self) -> bool:
        """Whether the limit was reached: by rank 0's clock, so that all stop at the same point."""
        over: list[bool] = self._world.all_gather_object(time.monotonic() >= self._end)
        return over[0]

    def _tunings(self, point: Point) -> dict[str, Sequence[Mapping[str, Any]]]:
        """Algorithms that serve a point, with the configurations that they offer."""
        with self._ctx.scope():
            candidates = point.call(self._ctx).explain().candidates
        return {each.name: each.tunings for each in candidates if each.ok}

    def _measure(self, point: Point, launches: Sequence[Launch], runner: Any) -> dict[Launch, float]:
        """Measure some launches in turn; those that are wrong or find no memory are left out."""
        from iris_core.bench.registry import Benchmark

        def declare(state: State, ctx: Iris) -> None:
            self._declare(state, ctx, point, launches)

        benchmark = Benchmark(f"tune.{point.op}", declare)
        by_label = {_label(launch): launch for launch in launches}
        times = {}
        for result in runner.point(benchmark, {"at": point.where}):
            launch = by_label[result.provider]
            if result.error:
                self._wrong[point.op, result.provider, point.where] = result.error
            elif result.time_us is not None:
                times[launch] = result.time_us / 1e6
        return times

    def _declare(self, state: State, ctx: Iris, point: Point, launches: Sequence[Launch]) -> None:
        """Declare a provider for each launch that is possible."""
        state.enter(ctx.scope())
        call = point.call(ctx)
        if state.on_gpu:
            state.set_timer("graph")
        for launch in launches:
            name, fields = launch
            run = call.runner(name, dict(fields))
            if reason := self._try(run):
                state.skip_provider(_label(launch), reason)
                self._passed_over.append(f"{point.op} {_label(launch)} at {point.where}: {reason}")
            else:
                state.provider(_label(launch), run, check=call.is_right, prepare=call.spoil)

    def _try(self, run: Callable[[], object]) -> str:
        """Call once: it finds its memory and compiles, on all ranks or on none.  Returns why it cannot, else nothing.

        What a device has no registers or shared memory for is found out by the compiler, or by the driver.
        """
        failure: Exception | None = None
        try:
            run()
        except Exception as error:
            if isinstance(error, IrisError) and not isinstance(error, UnsupportedError):
                raise
            failure = error
        text = "" if failure is None else f"{type(failure).__name__}: {failure}".partition("\n")[0]
        everyone: list[str] = self._world.all_gather_object(text)
        if failure is not None and not all(everyone):  # the others wait for this rank, in a kernel
            raise failure
        return everyone[0]

    def _report(self, point: Point, fastest: Mapping[Launch, float]) -> None:
        if self._ctx.cur_rank == 0:
            shown = "; ".join(f"{_label(each)} {seconds * 1e6:.1f} us" for each, seconds in list(fastest.items())[:3])
            print(f"{point.op} {point.where}: {shown}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def tuner_of_this_rank(options: RunOptions) -> Iterator[Tuner]:
    """Open a context, and make the tuner.

    Collective: every rank of the world calls it with the same arguments.

    Args:
        options: ranks, plugins, heap, rounds and limit; its axes are not looked at.
    """
    faulthandler.dump_traceback_later(options.limit_s + _GRACE_S, exit=True)
    try:
        with Iris(
            options.heap_size, allocator=options.allocator, backend=options.backend, device=options.device
        ) as ctx:
            world = connect(None, ctx.settings.barrier_timeout)
            try:
                yield Tuner(ctx, world, options)
            finally:
                world.close()
    finally:
        faulthandler.cancel_dump_traceback_later()


def device_name(ctx: Iris) -> str:
    """Name of a context's device, as tables have it."""
    return "cpu" if ctx.device == "cpu" else torch.cuda.get_device_name(ctx.target.index)


def file_name(device: str, group_size: int) -> str:
    """Return the name of the file of a table."""
    return f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{group_size}.json"


def _label(launch: Launch) -> str:
    name, fields = launch
    return " ".join([name, *(f"{field}={value}" for field, value in fields)])


def _fastest(times: Mapping[Launch, float]) -> dict[Launch, float]:
    """The best launch of each algorithm, the fastest first."""
    found: dict[str, tuple[Launch, float]] = {}
    for launch, seconds in sorted(times.items(), key=lambda each: each[1]):
        found.setdefault(launch[0], (launch, seconds))
    return dict(found.values())


def check_names(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise ArgumentError unless all names are known, and given once."""
    if strange := [each for each in given if each not in known]:
        raise ArgumentError(f"no {kind} {', '.join(strange)} can be tuned; there are {', '.join(known)}")
    if not given or len(set(given)) < len(given):
        raise ArgumentError(f"give each {kind} once, and one at least")


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """Return the entries of two tables: of what was measured again, only the new ones.

    Of collectives, sizes that were not reached before the limit keep what was known of them.
    """
    again = {entry.place for entry in new}
    reached: dict[tuple[str, str], float] = {}
    for entry in new:
        kind = entry.op, entry.dtype
        reached[kind] = max(entry.max_nbytes, reached.get(kind, 0))

    def is_kept(entry: Entry) -> bool:
        return entry.place not in again and bool(entry.shape or entry.max_nbytes > reached.get(entry.place[:2], -1))

    return [*filter(is_kept, old), *new]
