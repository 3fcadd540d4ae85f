"""Measuring on one rank: declare, call, verify, measure in turn, verify again, gather.

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
from iris_core.bench.state import SkipPoint, State
from iris_core.bench.timers import MAX_GRAPH_CALLS, Batch, SingleCalls, synchronize, warm_clocks
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from iris_core.api import Iris
    from iris_core.bench.registry import Benchmark, RunOptions
    from iris_core.bench.state import Provider
    from iris_core.world import World

MAX_UNITS = 100_000
"""Bound of the repetitions in one round, for calls that take next to nothing."""


@dataclass
class Measured:
    """Findings of all ranks on one provider; where there is an error, the times do not count."""

    times: list[list[float]] = field(default_factory=list)  # of one operation, in s; empty for an idle rank
    calls: int = 0
    verified: bool = False
    error: str = ""


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

    def point(self, benchmark: Benchmark, params: Mapping[str, Any]) -> list[Result]:
        """Measure all providers of a benchmark at one point of its axes.

        The results, one for each provider, are the same on every rank but for counters, which are the rank's own.
        A declaration that is wrong, or differs between ranks, is a `BenchmarkError`.
        """
        ctx, options = self._ctx, self._options
        num_ranks = 0 if ctx is None else self._world.world_size
        on_gpu = ctx is not None and ctx.device.startswith("cuda")
        state = State(benchmark.name, params, on_gpu=on_gpu, rounds=options.rounds)
        state.warmup = state.warmup if options.warmup is None else options.warmup
        state.repeat = options.repeat
        with contextlib.nullcontext() if ctx is None else ctx.scope(), contextlib.closing(state):
            reason = self._declare(benchmark, state)
            if reason is not None:
                results = [Result(state.benchmark, "", _plain(state.params), num_ranks, skipped=reason)]
            else:
                measured = self._measure(state)
                counters = {name: float(v() if callable(v) else v) for name, v in state.counters.items()}
                results = summarize(state, measured, num_ranks, counters)
        if ctx is not None:
            ctx.barrier()  # what the scope freed is free now; waits that timed out are raised here
        return results

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
        """Measure every provider once in each round; rounds begin with another one each, so that none has an order."""
        found, right = {}, []
        for provider in state.providers.values():
            if not provider.skipped:
                batch, units, error = self._first_calls(provider, state)
                found[provider.name] = Measured(calls=units * batch.calls_per_unit, error=error)
                if not error:
                    right.append((provider, batch, units))
        if any(provider.on_gpu for provider, _, _ in right):
            warm_clocks(self._options.warm_ms)
        times: dict[str, list[float]] = {provider.name: [] for provider, _, _ in right}
        errors = dict.fromkeys(times, "")
        for number in range(state.rounds):
            first = number % len(right) if right else 0
            for provider, batch, units in right[first:] + right[:first]:
                self._begin(provider)
                seconds = batch.time(units)
                if provider.call is not None:
                    times[provider.name].append(seconds / provider.operations)
                self._wait(provider)
                if number == state.rounds - 1:
                    errors[provider.name] = _wrong(provider)
        own = [(times[p.name], errors[p.name], p.check is not None) for p, _, _ in right]
        for name, ranks in zip(times, zip(*self._world.all_gather_object(own), strict=True), strict=True):
            each = found[name]
            each.times = [mine for mine, _, _ in ranks]
            each.error = _of_all([error for _, error, _ in ranks])
            each.verified = not each.error and any(checked for _, _, checked in ranks)
        return found

    def _first_calls(self, provider: Provider, state: State) -> tuple[Batch | SingleCalls, int, str]:
        """Call a provider eagerly, so that its kernels are compiled; then as it will be timed, and check its data.

        Returns what is timed, how often in a round, and what is wrong with the data of any rank.
        """
        batch: Batch | SingleCalls | None = None
        call, seconds = provider.call, 0.0
        is_reported = provider.timer == "reported"  # it may take seconds: no call only to see how many
        if call is not None and provider.before is not None:
            barrier = functools.partial(self._wait, provider)
            batch = SingleCalls(call, barrier, provider.before, provider.on_gpu, state.warmup)
            call = batch.once
        for _ in range(0 if is_reported else 2):
            self._begin(provider)
            start = time.perf_counter()
            if call is not None:
                call()
            if provider.on_gpu:
                synchronize()
            seconds = time.perf_counter() - start
            self._world.barrier()
        _, seconds = self._agreed("", seconds)
        if batch is None:
            fitting = math.ceil(self._batch_s / seconds) if seconds else 1
            calls = min(MAX_GRAPH_CALLS, state.repeat or fitting)
            batch = state.enter(contextlib.closing(Batch(provider, state.warmup, self._align, graph_calls=calls)))
        error = ""
        if provider.check is not None or not is_reported:
            self._begin(provider)
            if provider.timer == "graph":
                batch.once()  # the first replay is slow, because the graph goes to the device with it
            start = time.perf_counter()
            batch.once()
            seconds = time.perf_counter() - start
            self._wait(provider)
            error = _wrong(provider)
        error, seconds = self._agreed(error, seconds)
        units = 1
        if state.repeat is not None:
            units = math.ceil(state.repeat / batch.calls_per_unit)
        elif seconds and not is_reported:
            units = max(1, min(MAX_UNITS, math.ceil(self._batch_s / seconds)))
        return batch, units, error

    def _begin(self, provider: Provider) -> None:
        """Spoil the output on every rank, then begin together; all earlier calls have ended on all ranks."""
        if provider.prepare is not None:
            provider.prepare()
        self._wait(provider)

    def _wait(self, provider: Provider) -> None:
        """Wait for this rank's device, then for the other ranks."""
        if provider.on_gpu:
            synchronize()
        self._world.barrier()

    def _agreed(self, error: str, seconds: float) -> tuple[str, float]:
        """Return the first rank's error, and the slowest rank's seconds."""
        everyone = self._world.all_gather_object((error, seconds))
        return _of_all([error for error, _ in everyone]), max(seconds for _, seconds in everyone)

    def _align(self) -> None:
        """Put a barrier of the devices on the stream: behind it they go on within microseconds of each other."""
        if self._ctx is not None and self._ctx.num_ranks > 1:
            self._ctx.device_barrier()


def _wrong(provider: Provider) -> str:
    """Say what is wrong with the data on this rank; empty if nothing is."""
    try:
        answer = None if provider.check is None else provider.check()
    except AssertionError as error:
        return str(error).strip() or "an assertion of the check failed"
    return "" if answer is None or answer else "the data is wrong"


def _of_all(errors: Sequence[str]) -> str:
    """Return the error of the first rank that has one, with the rank where there are several."""
    rank, text = next(((rank, text) for rank, text in enumerate(errors) if text), (0, ""))
    return f"rank {rank}: {text}" if text and len(errors) > 1 else text


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
            numbers = _times(found.times, rounds[provider.name]) | _speeds(state, provider, rounds)
            result = dataclasses.replace(result, **numbers, verified=found.verified, counters=dict(counters))
        targets = tuple(each.judged(result) for each in state.targets.get(provider.name, ()))
        results.append(dataclasses.replace(result, targets=targets))
    return results


def _slowest(times: Iterable[Sequence[float]]) -> list[float]:
    """The slowest rank's time of every round."""
    active = [each for each in times if each]
    if not active:
        raise BenchmarkError("no rank took part: the provider's call is None on all of them")
    return [max(row) for row in zip(*active, strict=True)]


def _times(times: Iterable[Sequence[float]], slowest: Sequence[float]) -> dict[str, Any]:
    local = [median(each) if each else None for each in times]
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

    def ratio(other: str) -> float | None:
        """Speed in relation to another provider; round by round, for what changes slowly hits both."""
        if other not in rounds:
            return None
        return _rounded(median(a / b for a, b in zip(rounds[other], own, strict=True)))

    bus_nbytes = None if state.nbytes is None or state.bus_factor is None else state.nbytes * state.bus_factor
    peers = [p.name for p in state.providers.values() if p.peer and p.name != provider.name and p.name in rounds]
    best = min(peers, key=lambda name: median(rounds[name]), default="")
    return {
        "gb_per_s": per_second(state.nbytes, 1e9),
        "bus_gb_per_s": per_second(bus_nbytes, 1e9),
        "tflop_per_s": per_second(state.flops, 1e12),
        "ratio": ratio(provider.baseline),
        "best_peer": best,
        "ratio_to_best_peer": ratio(best),
    }


def _plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """The values of axes as JSON knows them; others, like dtypes, as text."""
    return {k: v if isinstance(v, bool | int | float | str | None) else str(v) for k, v in params.items()}


def _rounded(number: float) -> float:
    """Six digits are more than any clock here has."""
    return float(f"{number:.6g}")
