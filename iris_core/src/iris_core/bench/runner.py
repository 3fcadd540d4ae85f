"""Runs: declare, call, verify, measure in turn, verify again, gather; on ranks that are started for it.

All ranks make the same exchanges in the same order: a wrong result on one is known to all before any goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import math
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from iris_core.bench.registry import BENCHMARKS, RANKS, Benchmark, RunOptions, check_axes, load
from iris_core.bench.results import Report, Result, describe
from iris_core.bench.state import GRAPH_CALLS, ON_GPU, Provider, SkipPoint, State, warm_clocks
from iris_core.errors import BenchmarkError
from iris_core.world import World, connect, launch

if TYPE_CHECKING:
    from iris_core.api import Iris

DEVICE_TIMEOUT_S = 10.0  # bound of waits inside kernels (IRIS_DEVICE_TIMEOUT), unless the environment has one
LATE = "too late for the limit"  # of a point that would begin near it: what has been measured is kept
MAX_CALLS = 100_000  # bound of the calls in one round, where they take next to nothing


def run(
    benchmarks: Iterable[Benchmark], options: RunOptions, *, name: str = "benchmarks", is_rank: bool = False
) -> Report:
    """Run benchmarks and return their results, under a name.

    Those without ranks run in this process.  For the others ranks are started, which open one context and go through
    all of them; or all call this, where this process `is_rank`.  A provider whose data was wrong has an error in the
    report instead of numbers.

    Raises:
        BenchmarkError: a benchmark is declared wrongly, or the options name an axis that none has.
        RankError: a rank raised; the others were ended.
        PeerLostError: a rank's process ended, by `options.limit_s` for example.
    """
    chosen = list(benchmarks)
    check_axes(chosen, options)
    about_machine, begin = describe(), time.perf_counter()
    about_run = {each: getattr(options, each) for each in ("num_ranks", "quick", "rounds", "batch_ms", "warm_ms")}
    here = Runner(World(), None, options)
    results = [row for each in chosen if not each.ranks for row in here.all_points(each)]
    usual = options.axes.get(RANKS, [options.num_ranks])
    wanted = {each: each.values(options).get(RANKS, usual) for each in chosen if each.ranks}
    numbers = list(dict.fromkeys(itertools.chain(*wanted.values())))
    for how in [dataclasses.replace(options, num_ranks=n, axes={**options.axes, RANKS: [n]}) for n in numbers]:
        call = {each.name: str(each.source) for each in wanted if how.num_ranks in wanted[each]}
        found, facts = run_on_this_rank(call, how) if is_rank else on_ranks(run_on_this_rank, how, call)[0]
        results += found
        about_run |= {**facts, RANKS: numbers if len(numbers) > 1 else how.num_ranks}
    about_run["seconds"] = round(time.perf_counter() - begin, 1)
    order = [each.name for each in chosen]
    return Report(name, about_machine, about_run, tuple(sorted(results, key=lambda row: order.index(row.benchmark))))


def on_ranks(job: Callable[..., Any], options: RunOptions, *arguments: Any, **environ: str) -> list[Any]:
    """Call job(*arguments, options) on new ranks with these variables, and those of the options that are not set."""
    usual = {"IRIS_DEVICE_TIMEOUT": str(DEVICE_TIMEOUT_S), **options.environ}
    environ = {name: value for name, value in usual.items() if name not in os.environ} | environ
    return launch.run(job, options.num_ranks, *arguments, options, environ=environ, torch_distributed=True)


def run_on_this_rank(chosen: Mapping[str, str], options: RunOptions) -> tuple[list[Result], dict[str, Any]]:
    """Run benchmarks, by name with their files, on every rank; return their results, and facts about the run."""
    for source in chosen.values():
        load(source)
    with opened_on_this_rank(options) as (ctx, world):
        runner, device, limit = Runner(world, ctx, options), ctx.device.partition(":")[0], ctx.settings.device_timeout
        results = [row for name in chosen for row in runner.all_points(BENCHMARKS[name])]
        return results, {**ctx.plugin_names, "device": device, "device_timeout_s": limit}


@contextlib.contextmanager
def opened_on_this_rank(options: RunOptions) -> Iterator[tuple[Iris, World]]:
    """Open a context, and a world beside it; a rank that takes longer than the limit prints where it is, and ends."""
    chosen: dict[str, Any] = {"allocator": options.allocator, "backend": options.backend, "device": options.device}
    faulthandler.dump_traceback_later(options.limit_s, exit=True)
    with contextlib.ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        ctx = stack.enter_context(pkgutil.resolve_name(options.context)(options.heap_size, **chosen))
        yield ctx, stack.enter_context(contextlib.closing(connect(None, ctx.settings.barrier_timeout)))


class Runner:
    """Measures benchmarks on this rank, the same ones on all; `ctx` is what they get, None for those without ranks."""

    def __init__(self, world: World, ctx: Iris | None, options: RunOptions) -> None:
        self._world, self._ctx, self._options = world, ctx, options
        self._on_gpu = ctx is not None and ctx.device.startswith("cuda")
        self._until = time.monotonic() + options.limit_s * 0.9

    def all_points(self, benchmark: Benchmark) -> list[Result]:
        """Measure a benchmark at all points of its axes; rank 0 says so on stderr."""
        if self._ctx is None or self._ctx.cur_rank == 0:
            about = (benchmark.function.__doc__ or "").strip().partition("\n")[0]
            print(f"measuring {benchmark.name}: {about}", file=sys.stderr, flush=True)
        return [result for params in benchmark.points(self._options) for result in self.point(benchmark, params)]

    def point(self, benchmark: Benchmark, params: Mapping[str, Any]) -> list[Result]:
        """Measure all providers at one point; the results are the same on every rank but for counters."""
        state = State(benchmark.name, params, self._options, self._on_gpu, self._wait)
        with contextlib.nullcontext() if self._ctx is None else self._ctx.scope(), state.resources:
            self._declare(benchmark, state)
            self._measure(state)
            results = summarize(state, 0 if self._ctx is None else self._world.world_size)
        if self._ctx is not None:
            self._ctx.barrier()  # what the scope freed is free now; waits that timed out are raised here
        return results

    def _declare(self, benchmark: Benchmark, state: State) -> None:
        """Call the benchmark function; a declaration that is wrong or differs between ranks is a `BenchmarkError`."""
        with contextlib.suppress(SkipPoint):
            if any(self._world.all_gather_object(time.monotonic() > self._until)):
                state.skip(f"{LATE} of {self._options.limit_s:g} s")
            benchmark.function(state, self._ctx)
            state.check()
        providers = [(p.name, p.timer, p.operations, p.skipped) for p in state.providers.values()]
        how = state.options
        everyone = self._world.all_gather_object((how.rounds, how.repeat, how.warmup, providers))
        if other := next((rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]), 0):
            text = f"rank 0 has {everyone[0]}, rank {other} has {everyone[other]}"
            where = f"benchmark {state.benchmark!r} at {state.params}"
            raise BenchmarkError(f"{where} is not declared alike on all ranks: {text}")

    def _measure(self, state: State) -> None:
        """Measure every provider once in each round; rounds begin with another one each, so that none has an order."""
        providers = [each for each in state.providers.values() if not each.skipped]
        for each in providers:
            self._first_calls(each, state)
        right = [each for each in providers if not each.error]
        if any(each.timer in ON_GPU for each in right):
            warm_clocks(self._options.warm_ms)
        times: dict[str, list[float]] = {each.name: [] for each in right}
        for number in range(state.options.rounds):
            first = number % max(1, len(right))
            for each in right[first:] + right[:first]:
                seconds = self._time(each, state.options.warmup)
                times[each.name] += [seconds / each.operations] * (each.call is not None)
                if number == state.options.rounds - 1:
                    self._verify(each)
        everyone = self._world.all_gather_object(times)
        for each in right:
            each.times = [times[each.name] for times in everyone]

    def _time(self, provider: Provider, warmup: int) -> float:
        """Spoil the output on every rank, begin together, and return the seconds of a call; all have ended then."""
        if provider.prepare is not None:
            provider.prepare()
        self._wait()
        seconds = provider.time(warmup, self._align)
        self._wait()
        return seconds

    def _once(self, provider: Provider) -> float:
        """Call a provider as it is timed, and return the slowest rank's seconds."""
        return float(max(self._world.all_gather_object(self._time(provider, 0)))) or 1e-9  # a clock may have no less

    def _first_calls(self, provider: Provider, state: State) -> None:
        """Call a provider eagerly, so that its kernels are compiled; then as it will be timed, and check its data."""
        batch_s, repeat, is_reported = self._options.batch_ms / 1e3, state.options.repeat, provider.timer == "reported"
        if not is_reported:  # that may take seconds: no call only to see how many
            self._once(provider)
            if provider.timer == "graph":
                seconds = min(self._once(provider) for _ in range(2))  # in one, Python may collect garbage for long
                self._capture(provider, state, repeat or math.ceil(batch_s / seconds))
        if provider.check is not None or not is_reported:
            seconds = self._once(provider)
            self._verify(provider)
        calls = repeat or (1 if is_reported else min(MAX_CALLS, batch_s / seconds))
        provider.units = math.ceil(calls / provider.calls_per_unit)

    def _capture(self, provider: Provider, state: State, most: int) -> None:
        """Capture a provider's calls in graphs, `most` at most, and keep to the one whose calls are the fastest."""
        tried: list[tuple[float, int, Any, Any]] = []
        for calls in sorted({min(most, each) for each in GRAPH_CALLS}):
            provider.capture(calls, state.resources)
            provider.units = math.ceil(most / calls)
            tried.append((self._once(provider), calls, provider.graph, provider.call))
        _, provider.calls_per_unit, provider.graph, provider.call = min(tried, key=lambda each: each[0])

    def _verify(self, provider: Provider) -> None:
        """Check the data on all ranks; the error is that of the first one where something is wrong."""
        everyone: list[str | None] = self._world.all_gather_object(provider.verdict())
        rank, text = next(((rank, text) for rank, text in enumerate(everyone) if text), (0, ""))
        provider.error = f"rank {rank}: {text}" if text and len(everyone) > 1 else text
        provider.verified = not text and "" in everyone

    def _wait(self) -> None:
        """Wait for this rank's device, then for the other ranks."""
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()
        self._world.barrier()

    def _align(self) -> None:
        """Put a barrier of the devices on the stream: after it they go on within microseconds of each other."""
        if self._ctx is not None and self._ctx.num_ranks > 1:
            (self._ctx.device_barrier if self._ctx.num_nodes == 1 else self._ctx.ccl.barrier)()


def summarize(state: State, num_ranks: int) -> list[Result]:
    """Make the results of one point, from the slowest rank's time of each round."""
    results, good = [], [each for each in state.providers.values() if not each.error and not each.skipped]
    rounds = {each.name: [max(row) for row in zip(*filter(None, each.times), strict=True)] for each in good}
    if not all(rounds.values()):
        raise BenchmarkError("no rank took part: the provider's call is None on all of them")
    # the values of axes as JSON knows them; others, like dtypes, as text
    params = {k: v if isinstance(v, bool | int | float | str | None) else str(v) for k, v in state.params.items()}
    counters = {name: float(v() if callable(v) else v) for name, v in state.counters.items() if good}
    for each in state.providers.values():
        numbers = _numbers(state, each, rounds) | {"counters": counters} if each.name in rounds else {}
        targets = tuple(target.judged(numbers.get(target.metric)) for target in state.targets.get(each.name, ()))
        results.append(Result(
            state.benchmark, each.name, params, num_ranks, each.timer, nbytes=state.nbytes, flops=state.flops,
            baseline=each.baseline, error=each.error, skipped=each.skipped, targets=targets, verified=each.verified,
            calls=0 if each.skipped else each.units * each.calls_per_unit, **numbers,
        ))  # fmt: skip
    return results


def _numbers(state: State, provider: Provider, rounds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    own = rounds[provider.name]
    local = [median(each) * 1e6 if each else None for each in provider.times]
    active = [each for each in local if each is not None]
    peers = [p.name for p in state.providers.values() if p.peer and p.name != provider.name and p.name in rounds]
    best = min(peers, key=lambda name: median(rounds[name]), default="")
    # speed in relation to others; round by round, for what changes slowly hits both
    others = rounds.keys() & {provider.baseline, best}
    ratios = {other: median(a / b for a, b in zip(rounds[other], own, strict=True)) for other in others}
    gb_per_s = state.nbytes and state.nbytes / median(own) / 1e9
    numbers = {
        "time_us": median(own) * 1e6, "min_us": min(active), "gb_per_s": gb_per_s,
        "skew_pct": (1 - min(active) / max(active)) * 100 if len(active) > 1 else None,
        "bus_gb_per_s": gb_per_s and state.bus_factor and gb_per_s * state.bus_factor,
        "tflop_per_s": state.flops and state.flops / median(own) / 1e12,
        "ratio": ratios.get(provider.baseline), "ratio_to_best_peer": ratios.get(best),
    }  # fmt: skip
    series = {"local_us": tuple(map(_rounded, local)), "rounds_us": tuple(_rounded(each * 1e6) for each in own)}
    return {name: _rounded(number) for name, number in numbers.items()} | series | {"best_peer": best}


def _rounded(number: float | None) -> float | None:
    """Six digits are more than any clock here has."""
    return None if number is None else float(f"{number:.6g}")
