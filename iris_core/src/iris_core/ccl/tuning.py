"""Measuring the algorithms of collectives on this machine, for a table from which `ctx.ccl` chooses.

At each size all algorithms are measured as they would choose their launch themselves, and those that come near the best
again with every configuration that they offer (`Collective.tunings`).  All ranks see the same results and so take the
same decisions.  Data is verified in the timed configuration; who delivers wrong data is left out, and named.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import math
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iris_core.ccl.samples import OPS, SPOILED, Sample
from iris_core.ccl.tables import ANY_DTYPE, Entry
from iris_core.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from iris_core import Iris
    from iris_core.bench import RunOptions, State
    from iris_core.bootstrap import World

DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int32", "int64")
"""Element types that can be measured: they can hold the samples."""

_FIRST_ROUNDS = 3
_NEAR = 1.3
"""An algorithm is tuned where it takes at most so many times as long as the best."""
_USEFUL = 2.0
"""It gets an entry where it takes at most so many times as long: for calls that the better ones cannot serve."""
_MAX_ENTRIES = 4
_HOPELESS = 3.0
"""It is left out at the next size where it took more than so many times as long, and more than at the size before."""


@dataclass(frozen=True)
class TuneOptions:
    """What to measure; the same on every rank.

    Attributes:
        ops: operations; those with a single algorithm need no measuring and are passed over.
        dtypes: element types; what is found for the first one also counts for all that are not named.
        min_nbytes, max_nbytes: sizes of the full buffer (a gather's output, a scatter's input).
        factor: from one size to the next.

    Raises:
        ArgumentError: something cannot be measured.
    """

    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = ("bfloat16",)
    min_nbytes: int = 1 << 10
    max_nbytes: int = 1 << 30
    factor: int = 2

    def __post_init__(self) -> None:
        for kind, given, known in (("operation", self.ops, OPS), ("element type", self.dtypes, DTYPES)):
            if strange := [each for each in given if each not in known]:
                raise ArgumentError(f"no {kind} {', '.join(strange)} can be tuned; there are {', '.join(known)}")
            if not given or len(set(given)) < len(given):
                raise ArgumentError(f"give each {kind} once, and one at least")
        if not 0 < self.min_nbytes <= self.max_nbytes:
            raise ArgumentError(f"sizes from {self.min_nbytes} to {self.max_nbytes} bytes are none")
        if self.factor < 2:
            raise ArgumentError(f"the factor between sizes must be 2 or more, not {self.factor}")

    @property
    def sizes(self) -> list[int]:
        """Bytes of the full buffers, growing."""
        steps = int(math.log(self.max_nbytes / self.min_nbytes, self.factor) + 1e-9)
        return [self.min_nbytes * self.factor**step for step in range(steps + 1)]


@dataclass(frozen=True)
class Tuned:
    """What was found; the same on every rank.

    Attributes:
        device: name of the device, as tables have it.
        entries: of the table.
        wrong: algorithms that delivered wrong data, with what was wrong.
        passed_over: operations that were not measured, with the reason.
    """

    device: str
    entries: tuple[Entry, ...]
    wrong: tuple[str, ...]
    passed_over: tuple[str, ...]


def tune_on_this_rank(wanted: TuneOptions, options: RunOptions) -> Tuned:
    """Measure, as one of the ranks.

    Collective: every rank of the world calls it with the same arguments.

    Args:
        wanted: what to measure.
        options: ranks, plugins, heap and rounds; its axes are not looked at.

    Raises:
        ArgumentError: the heap is too small for the largest size.
        DeviceTimeoutError: an algorithm did not end.
    """
    from iris_core.api import Iris
    from iris_core.bootstrap import connect

    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    try:
        with Iris(
            options.heap_size, allocator=options.allocator, backend=options.backend, device=options.device
        ) as ctx:
            world = connect(None, ctx.settings.barrier_timeout)
            try:
                return _Tuner(ctx, world, wanted, options).tune()
            finally:
                world.close()
    finally:
        faulthandler.cancel_dump_traceback_later()


Launch = tuple[str, tuple[tuple[str, Any], ...]]
"""An algorithm's name, and fields of its config."""


class _Tuner:
    def __init__(self, ctx: Iris, world: World, wanted: TuneOptions, options: RunOptions) -> None:
        from iris_core.bench.runner import Runner

        self._ctx = ctx
        self._wanted = wanted
        first = dataclasses.replace(options, rounds=min(_FIRST_ROUNDS, options.rounds))
        self._first, self._again = Runner(world, ctx, first), Runner(world, ctx, options)
        self._wrong: dict[str, str] = {}
        self._passed_over: list[str] = []

    def tune(self) -> Tuned:
        import torch

        largest, heap = self._wanted.sizes[-1], self._ctx.heap_size
        if 2 * largest + self._ctx.num_ranks * 4096 > heap:
            raise ArgumentError(f"two buffers of {largest} bytes do not fit into a heap of {heap}")
        entries: list[Entry] = []
        for op in self._wanted.ops:
            for number, name in enumerate(self._wanted.dtypes):
                found = self._tune(op, getattr(torch, name))
                entries += (dataclasses.replace(e, dtype=name if number else ANY_DTYPE) for e in found)
        index = self._ctx.target.index
        device = "cpu" if self._ctx.device == "cpu" else torch.cuda.get_device_name(index)
        wrong = tuple(f"{name}: {problem}" for name, problem in self._wrong.items())
        return Tuned(device, tuple(entries), wrong, tuple(self._passed_over))

    def _tune(self, op: str, dtype: torch.dtype) -> Iterator[Entry]:
        """Measure an operation at all sizes."""
        samples = [
            Sample.of_bytes(op, dtype, self._ctx.cur_rank, self._ctx.num_ranks, nbytes) for nbytes in self._wanted.sizes
        ]
        samples = list({sample.length: sample for sample in samples}.values())
        before: dict[str, float] = {}  # how much longer than the best each took at the size before
        hopeless: set[str] = set()
        for sample, above in zip(samples, [*samples[1:], None], strict=True):
            tunings = self._tunings(sample)
            if len(tunings) < 2 and not before:
                self._passed_over.append(f"{op}: only {', '.join(tunings) or 'nothing'} can serve it")
                return
            names = [name for name in tunings if name not in hopeless | self._broken(op)]
            times = self._measure(sample, [(name, ()) for name in names], self._first)
            if not times:
                continue
            best = min(times.values())
            again = [
                (name, tuple(sorted(config.items())))
                for (name, _), seconds in times.items()
                if seconds <= _NEAR * best
                for config in tunings[name]
            ]
            # what was not near is not measured again, but may still be of use
            times |= self._measure(sample, again, self._again)
            fastest = _fastest(times)
            best = next(iter(fastest.values()))
            ratios = {name: seconds / best for (name, _), seconds in fastest.items()}
            hopeless |= {name for name, r in ratios.items() if r > _HOPELESS and r > before.get(name, math.inf)}
            before = ratios
            self._report(sample, fastest)
            bound = math.inf if above is None else math.sqrt(sample.looked_up_nbytes * above.looked_up_nbytes)
            useful = [(launch, s) for launch, s in fastest.items() if s <= _USEFUL * best][:_MAX_ENTRIES]
            for (name, config), seconds in useful:
                yield Entry(op, "", math.floor(bound) if above else bound, name, seconds, "", dict(config))

    def _tunings(self, sample: Sample) -> dict[str, Sequence[Mapping[str, Any]]]:
        """Algorithms that serve a sample's call, with the configurations that they offer."""
        with self._ctx.scope():
            out, inp = sample.tensors(self._ctx)
            candidates = self._ctx.ccl.explain(sample.op, *sample.arguments(out, inp)).candidates
        return {each.name: each.tunings for each in candidates if each.ok}

    def _measure(self, sample: Sample, launches: Sequence[Launch], runner: Any) -> dict[Launch, float]:
        """Measure some launches in turn; those that are wrong or find no memory are left out."""
        from iris_core.bench.registry import Benchmark

        def declare(state: State, ctx: Iris) -> None:
            _declare(state, ctx, sample, launches)

        benchmark = Benchmark(f"tune.{sample.op}", declare, (), True, (), False, __file__, 0)
        by_label = {_label(launch): launch for launch in launches}
        times = {}
        for result in runner.point(benchmark, {"nbytes": sample.nbytes}):
            launch = by_label[result.provider]
            if result.error:
                self._wrong[f"{sample.op} {result.provider} at {sample.nbytes} bytes"] = result.error
            elif result.time_us is not None:
                times[launch] = result.time_us / 1e6
        return times

    def _broken(self, op: str) -> set[str]:
        return {each.split()[1] for each in self._wrong if each.split()[0] == op}

    def _report(self, sample: Sample, fastest: Mapping[Launch, float]) -> None:
        if self._ctx.cur_rank == 0:
            shown = "; ".join(f"{_label(each)} {seconds * 1e6:.1f} us" for each, seconds in list(fastest.items())[:3])
            print(f"{sample.op} {sample.dtype} {sample.nbytes} bytes: {shown}", file=sys.stderr, flush=True)


def _declare(state: State, ctx: Iris, sample: Sample, launches: Sequence[Launch]) -> None:
    """Declare a provider for each launch."""
    from iris_core.ccl import Config

    state.enter(ctx.scope())
    out, inp = sample.tensors(ctx)
    run, tensors = getattr(ctx.ccl, sample.op), sample.arguments(out, inp)
    if state.on_gpu:
        state.set_timer("graph")

    def check() -> bool:
        return sample.is_right(out)

    def spoil() -> None:
        if out is not None:
            out.fill_(SPOILED)

    for launch in launches:
        name, fields = launch
        config = Config(algorithm=name, **dict(fields))
        try:
            run(*tensors, config=config)  # it finds its memory here, on all ranks or on none
        except UnsupportedError as error:
            state.skip_provider(_label(launch), str(error))
            continue
        state.provider(
            _label(launch),
            lambda config=config: run(*tensors, config=config),  # type: ignore[misc]
            check=check,
            prepare=spoil,
        )


def _label(launch: Launch) -> str:
    name, fields = launch
    return " ".join([name, *(f"{field}={value}" for field, value in fields)])


def _fastest(times: Mapping[Launch, float]) -> dict[Launch, float]:
    """The best launch of each algorithm, the fastest first."""
    found: dict[str, tuple[Launch, float]] = {}
    for launch, seconds in sorted(times.items(), key=lambda each: each[1]):
        found.setdefault(launch[0], (launch, seconds))
    return dict(found.values())


def file_name(device: str, group_size: int) -> str:
    """Return the name of the file of a table."""
    return f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{group_size}.json"


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """Return the entries of two tables: of operations and types that were measured again, only the new ones."""
    again = {(entry.op, entry.dtype) for entry in new}
    return [entry for entry in old if (entry.op, entry.dtype) not in again] + list(new)
