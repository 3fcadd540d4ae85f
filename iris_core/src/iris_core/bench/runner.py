"""Measuring on one rank: declare, call once, verify, measure in turn, verify again, gather.

All ranks make the same exchanges in the same order, whatever they find: a wrong result on one rank is known to all
before any of them goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from iris_core.bench.results import Result
from iris_core.bench.state import Provider, SkipPoint, State
from iris_core.bench.timers import GPU_TIMERS, MAX_GRAPH_CALLS, Batch, SingleCalls, synchronize, warm_clocks
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from iris_core.api import Iris
    from iris_core.bench.registry import Benchmark, RunOptions
    from iris_core.world import World

MAX_UNITS = 100_000
"""Bound of the repetitions in one round, for calls that take next to nothing."""


@dataclass
class Measured:
    """What all ranks have found out about one provider; where there is an error, the times do not count."""

    times: list[list[float]] = field(default_factory=list)  # of one operation, in s; empty for a rank without a part
    calls: int = 0
    verified: bool = False
    error: str = ""


@dataclass
class _Candidate:
    """A provider on its way through the phases, on this rank."""

    provider: Provider
    batch: Batch | SingleCalls | None = None
    units: int = 1
    seconds: float = 0.0  # of one call, roughly
    times: list[float] = field(default_factory=list)
    error: str = ""

    def __post_init__(self) -> None:
        self.on_gpu = self.provider.timer in GPU_TIMERS
        self.reports = self.provider.timer == "reported"  # it may take seconds: no call only to see how many


class Runner:
    """Measures benchmarks on this rank.

    Collective: every rank of the world makes one and calls `point` with the same benchmarks and parameters.  `ctx` is
    what the benchmarks get; None for those without ranks.
    """

    def __init__(self, world: World, ctx: Iris | None, options: RunOptions) -> None:
        self._world = world
        self._ctx = ctx
        self._options = options
        self._batch_s = options.batch_ms / 1e3
        self._on_gpu = ctx is not None and ctx.device.startswith("cuda")

    def point(self, benchmark: Benchmark, params: Mapping[str, Any]) -> list[Result]:
        """Measure all providers of a benchmark at one point of its axes.

        The results, one for each provider, are the same on every rank but for counters, which are the rank's own.
        A declaration that is wrong, or differs between ranks, is a `BenchmarkError`.
        """
        num_ranks = 0 if self._ctx is None else self._world.world_size
        state = State(benchmark.name, params, on_gpu=self._on_gpu, rounds=self._options.rounds)
        state.warmup = state.warmup if self._options.warmup is None else self._options.warmup
        state.repeat = self._options.repeat
        with contextlib.ExitStack() as stack:
            if self._ctx is not None:
                stack.enter_context(self._ctx.scope())
            stack.callback(state.close)
            reason = self._declare(benchmark, state)
            if reason is not None:
                results = [Result(state.benchmark, "", _plain(state.params), num_ranks, skipped=reason)]
            else:
                measured = self._measure(state)
                counters = {name: float(v() if callable(v) else v) for name, v in state.counters.items()}
                results = summarize(state, measured, num_ranks, counters)
        if self._ctx is not None:
            self._ctx.barrier()  # what the scope freed is free now; waits that timed out are raised here
        return results

    # -- phases -------------------------------------------------------------------------------------------------------
    def _declare(self, benchmark: Benchmark, state: State) -> str | None:
        """Call the benchmark function; returns the reason where it skips the point."""
        reason = None
        try:
            benchmark.function(state, self._ctx)
            state.check()
        except SkipPoint as skip:
            reason = str(skip)
        providers = [(p.name, p.timer, p.operations, p.skipped, p.before is not None) for p in state.providers.values()]
        everyone = self._world.all_gather_object((reason, state.rounds, state.repeat, state.warmup, providers))
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise BenchmarkError(
                    f"benchmark {state.benchmark!r} at {state.params} is not declared alike on all ranks: "
                    f"rank 0 has {everyone[0]}, rank {rank} has {theirs}"
                )
        return reason

    def _measure(self, state: State) -> dict[str, Measured]:
        candidates = [_Candidate(each) for each in state.providers.values() if not each.skipped]
        try:
            self._call_once(candidates, state)
            self._verify(candidates, state)
            if any(each.on_gpu for each in candidates):
                warm_clocks(self._options.warm_ms)
            self._measure_in_turn(candidates, state)
            return self._gather(candidates)
        finally:
            for each in candidates:
                if each.batch is not None:
                    each.batch.close()

    def _call_once(self, candidates: list[_Candidate], state: State) -> None:
        """Call eagerly, so that kernels are compiled before anything is captured; a second time to see how long."""
        for each in candidates:
            if each.reports:
                continue
            call, before = each.provider.call, each.provider.before
            if call is not None and before is not None:
                barrier = functools.partial(self._finish, each)
                each.batch = SingleCalls(call, barrier, before, each.on_gpu, state.warmup)
                call = each.batch.once
            for _ in range(2):
                self._prepare(each)
                start = time.perf_counter()
                if call is not None:
                    call()
                if each.on_gpu:
                    synchronize()
                each.seconds = time.perf_counter() - start
                self._world.barrier()
        self._agree_on_seconds(candidates)
        for each in candidates:
            fitting = math.ceil(self._batch_s / each.seconds) if each.seconds else 1
            calls = min(MAX_GRAPH_CALLS, state.repeat or fitting)
            each.batch = each.batch or Batch(each.provider, state.warmup, self._align, graph_calls=calls)

    def _verify(self, candidates: list[_Candidate], state: State) -> None:
        """Run each provider as it will be timed, check its data on all ranks, and choose the size of its batch."""
        for each in candidates:
            assert each.batch is not None
            if each.reports and each.provider.check is None:
                continue
            self._prepare(each)
            if each.provider.timer == "graph":
                each.batch.once()  # the first replay is slow, because the graph goes to the device with it
            start = time.perf_counter()
            each.batch.once()
            each.seconds = time.perf_counter() - start
            self._finish(each)
            self._check(each)
        self._agree_on_errors(candidates)
        self._agree_on_seconds(candidates)
        for each in candidates:
            assert each.batch is not None
            if state.repeat is not None:
                each.units = math.ceil(state.repeat / each.batch.calls_per_unit)
            elif each.seconds and not each.reports:
                each.units = max(1, min(MAX_UNITS, math.ceil(self._batch_s / each.seconds)))

    def _measure_in_turn(self, candidates: list[_Candidate], state: State) -> None:
        """Measure every provider once in each round; the round's first provider changes, so that none has an order."""
        right = [each for each in candidates if not each.error]
        for number in range(state.rounds):
            first = number % len(right) if right else 0
            for each in right[first:] + right[:first]:
                assert each.batch is not None
                self._prepare(each)
                seconds = each.batch.time(each.units)
                if each.provider.call is not None:
                    each.times.append(seconds / each.provider.operations)
                self._finish(each)
                if number == state.rounds - 1:
                    self._check(each)
        self._agree_on_errors(candidates)

    def _gather(self, candidates: list[_Candidate]) -> dict[str, Measured]:
        everyone = self._world.all_gather_object([(each.times, each.provider.check is not None) for each in candidates])
        measured = {}
        for each, found in zip(candidates, zip(*everyone, strict=True), strict=True):
            assert each.batch is not None
            verified = not each.error and any(checked for _, checked in found)
            calls = each.units * each.batch.calls_per_unit
            measured[each.provider.name] = Measured([times for times, _ in found], calls, verified, each.error)
        return measured

    # -- steps --------------------------------------------------------------------------------------------------------
    def _prepare(self, each: _Candidate) -> None:
        """Spoil the output on every rank, then begin together; all earlier calls have ended on all ranks."""
        if each.provider.prepare is not None:
            each.provider.prepare()
        self._finish(each)

    def _finish(self, each: _Candidate) -> None:
        """Wait for this rank's device, then for the other ranks."""
        if each.on_gpu:
            synchronize()
        self._world.barrier()

    def _check(self, each: _Candidate) -> None:
        """Note what is wrong with the data on this rank."""
        try:
            answer = None if each.provider.check is None else each.provider.check()
        except AssertionError as error:
            each.error = str(error).strip() or "an assertion of the check failed"
        else:
            each.error = "the data is wrong" if answer is not None and not answer else each.error

    def _agree_on_errors(self, candidates: list[_Candidate]) -> None:
        everyone = self._world.all_gather_object([each.error for each in candidates])
        for each, texts in zip(candidates, zip(*everyone, strict=True), strict=True):
            rank, text = next(((rank, text) for rank, text in enumerate(texts) if text), (0, ""))
            if len(everyone) > 1 and text:
                each.error = text if text.startswith("rank ") else f"rank {rank}: {text}"

    def _agree_on_seconds(self, candidates: list[_Candidate]) -> None:
        everyone = self._world.all_gather_object([each.seconds for each in candidates])
        for each, seconds in zip(candidates, zip(*everyone, strict=True), strict=True):
            each.seconds = max(seconds)

    def _align(self) -> None:
        """Put a barrier of the devices on the stream: behind it they go on within microseconds of each other."""
        if self._ctx is not None and self._ctx.num_ranks > 1:
            self._ctx.device_barrier()


# -- from times to results --------------------------------------------------------------------------------------------
def summarize(state: State, measured: Mapping[str, Measured], num_ranks: int, counters: Any) -> list[Result]:
    """Make the results of one point; `measured` is by provider, without those that were skipped."""
    rounds = {name: _slowest(each.times) for name, each in measured.items() if not each.error}
    results = []
    for provider in state.providers.values():
        found = measured.get(provider.name, Measured())
        result = Result(
            benchmark=state.benchmark,
            provider=provider.name,
            params=_plain(state.params),
            num_ranks=num_ranks,
            timer=provider.timer,
            calls=found.calls,
            nbytes=state.nbytes,
            flops=state.flops,
            baseline=provider.baseline,
            error=found.error,
            skipped=provider.skipped,
        )
        if provider.name in rounds:
            numbers = _times(found, rounds[provider.name]) | _speeds(state, provider, rounds)
            result = dataclasses.replace(result, **numbers, verified=found.verified, counters=dict(counters))
        targets = tuple(each.judged(result) for each in state.targets.get(provider.name, ()))
        results.append(dataclasses.replace(result, targets=targets))
    return results


def _slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """The slowest rank's time of every round."""
    active = [each for each in times if each]
    if not active:
        raise BenchmarkError("no rank took part: the provider's call is None on all of them")
    return [max(row) for row in zip(*active, strict=True)]


def _times(found: Measured, slowest: Sequence[float]) -> dict[str, Any]:
    local = [median(each) if each else None for each in found.times]
    active = [each for each in local if each is not None]
    return {
        "time_us": _rounded(median(slowest) * 1e6),
        "min_us": _rounded(min(active) * 1e6),
        "skew_pct": _rounded((1 - min(active) / max(active)) * 100) if len(active) > 1 else None,
        "local_us": tuple(None if each is None else _rounded(each * 1e6) for each in local),
        "rounds_us": tuple(_rounded(each * 1e6) for each in slowest),
    }


def _speeds(state: State, provider: Provider, rounds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    own = rounds[provider.name]

    def per_second(amount: float | None, unit: float) -> float | None:
        return None if amount is None else _rounded(amount / median(own) / unit)

    def ratio(other: str) -> float:
        """Speed in relation to another provider; round by round, for what changes slowly hits both."""
        return _rounded(median(a / b for a, b in zip(rounds[other], own, strict=True)))

    bus_nbytes = None if state.nbytes is None or state.bus_factor is None else state.nbytes * state.bus_factor
    peers = [p.name for p in state.providers.values() if p.peer and p.name != provider.name and p.name in rounds]
    best = min(peers, key=lambda name: median(rounds[name]), default="")
    return {
        "gb_per_s": per_second(state.nbytes, 1e9),
        "bus_gb_per_s": per_second(bus_nbytes, 1e9),
        "tflop_per_s": per_second(state.flops, 1e12),
        "ratio": ratio(provider.baseline) if provider.baseline in rounds else None,
        "best_peer": best,
        "ratio_to_best_peer": ratio(best) if best else None,
    }


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """The values of axes as JSON knows them; others, like dtypes, as text."""
    return {k: v if isinstance(v, bool | int | float | str | None) else str(v) for k, v in params.items()}


def _rounded(number: float) -> float:
    """Six digits are more than any clock here has."""
    return float(f"{number:.6g}")
