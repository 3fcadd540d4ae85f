"""The declaration of a benchmark at one point of its axes, and how calls are timed."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from iris_core.bench.registry import RunOptions
from iris_core.bench.results import METRICS, Target
from iris_core.errors import BenchmarkError

_Call = Callable[[], object]

TIMERS = ("cpu", "events", "graph", "reported")
ON_GPU = ("events", "graph")

# Calls in one graph: there is a pause between replays, and in long ones between NCCL's kernels, where no others are.
GRAPH_CALLS = (5, 20, 100)
# More than the last cache of any GPU; it is written before each call, so that what the call reads is not there.
_CACHE_NBYTES = 256 << 20
# Pause of the device (about 0.1 ms) before the first event, in which the host launches what follows it.
_HEAD_START_CYCLES = 200_000

_MODES: dict[str, Any] = {"mean": statistics.fmean, "min": min, "max": max, "median": statistics.median, "all": list}


@dataclass
class Provider:
    """One implementation of what is measured (see `State.provider`), how its calls are timed, and what came of it."""

    name: str
    timer: str
    call: _Call | None = None  # or a replay of the graph that holds `calls_per_unit` of them
    prepare: _Call | None = None
    check: _Call | None = None
    baseline: str = ""
    peer: bool = False
    operations: int = 1
    skipped: str = ""
    units: int = 1  # repetitions of the call in each round
    calls_per_unit: int = 1
    times: list[list[float]] = field(default_factory=list)  # of each rank, of one operation, in s; none of an idle rank
    verified: bool = False
    error: str = ""
    graph: Any = None
    captured: _Call | None = None  # the call in the graph, which alone may keep memory that replays use

    def capture(self, calls: int, resources: contextlib.ExitStack) -> None:
        """Time replays of a graph of `calls` calls from now on, a resource; kernels must have been compiled."""
        import torch

        self.calls_per_unit = calls
        if self.call is not None:
            self.graph, self.captured = torch.cuda.CUDAGraph(), self.captured or self.call
            # Other threads of this process (watchdogs of communication libraries) may call the driver meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                for _ in range(calls):
                    self.captured()
            self.call = self.graph.replay
            resources.callback(self.graph.reset)

    def time(self, warmup: int, align: _Call) -> float:
        """Return the seconds of one call, out of a round's after `warmup` ones; 0 where there is no call.

        `align` puts a step on the stream after which all ranks' devices go on together, also of idle ranks.
        """
        import torch

        from iris_core.device.timers import seconds_by_clock, seconds_by_events

        warmup = max(self.graph is not None, -(-warmup // self.calls_per_unit))  # the first replay uploads the graph
        if self.call is not None:
            for _ in range(warmup):
                self.call()
        if self.timer in ON_GPU:
            align()
        if self.call is None:
            return 0.0
        if self.timer in ON_GPU:
            torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        seconds = {"cpu": seconds_by_clock, "reported": _as_reported}.get(self.timer, seconds_by_events)
        return seconds(self.call, self.units) / self.calls_per_unit

    def verdict(self) -> str | None:
        """Say what is wrong with the data on this rank; empty if nothing is, None if there is no check."""
        if self.check is None:
            return None
        try:
            answer = self.check()
        except AssertionError as error:
            return str(error).strip() or "an assertion of the check failed"
        return "" if answer is None or answer else "the data is wrong"


class SkipPoint(Exception):
    """Raised by `State.skip`; not an error."""


@dataclass(eq=False)
class State:
    """One point of a benchmark: read the axes, say how much work a call is, declare the providers.

    All is measured once the function has returned; wrong numbers, names taken or unknown are a `BenchmarkError`.
    """

    benchmark: str
    params: Mapping[str, Any]
    options: RunOptions
    on_gpu: bool
    barrier: Callable[[], object]
    timer: str = field(init=False)  # of the providers that follow
    nbytes: int | None = None
    bus_factor: float | None = None
    flops: float | None = None
    counters: dict[str, float | Callable[[], float]] = field(default_factory=dict)
    providers: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, list[Target]] = field(default_factory=dict)
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  #: left when all is measured

    def __post_init__(self) -> None:
        self.timer = "events" if self.on_gpu else "cpu"

    def __getitem__(self, name: str) -> Any:
        """Return the value of an axis."""
        if name not in self.params:
            axes = ", ".join(self.params) or "none"
            raise BenchmarkError(f"benchmark {self.benchmark!r} has no axis {name!r}; it has: {axes}")
        return self.params[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an axis, or `default` if the benchmark has none of that name."""
        return self.params.get(name, default)

    def set_bytes(self, nbytes: int, *, bus_factor: float | None = None) -> None:
        """Set the bytes that one operation moves, per rank; gives GB/s.

        `bus_factor`: bytes that must leave a rank for each of them, in the best algorithm without multicast (2 (n - 1)
        / n for an all_reduce); gives the bus bandwidth of NCCL's tests, which compares with that of the links.
        """
        self.nbytes = _at_least(1, "set_bytes", nbytes)
        self.bus_factor = bus_factor

    def set_flops(self, flops: float) -> None:
        """Set the floating-point operations of one operation, per rank; gives TFLOP/s."""
        self.flops = float(_at_least(1, "set_flops", flops))

    def add_counter(self, name: str, value: float | Callable[[], float]) -> None:
        """Add a number to the results of this point, or a function that is called in the end; rank 0's counts."""
        if name in self.counters:
            raise BenchmarkError(f"benchmark {self.benchmark!r} adds counter {name!r} twice")
        self.counters[name] = value

    def set_warmup(self, calls: int) -> None:
        """Set how many calls precede the timed ones in each round (1 by default)."""
        self.options = dataclasses.replace(self.options, warmup=calls)

    def set_repeat(self, calls: int) -> None:
        """Set how many calls are timed together in each round; by default as many as `RunOptions.batch_ms` holds."""
        self.options = dataclasses.replace(self.options, repeat=calls)

    def set_rounds(self, rounds: int) -> None:
        """Set in how many rounds each provider is measured; the result is the median over them."""
        self.options = dataclasses.replace(self.options, rounds=rounds)

    def set_timer(self, timer: str) -> None:
        """Set the timer of the providers that follow: "events" or "graph" (GPUs), "cpu", "reported": see the guide."""
        if timer not in TIMERS:
            raise BenchmarkError(f"no timer is called {timer!r}; there are: {', '.join(TIMERS)}")
        if timer in ON_GPU and not self.on_gpu:
            raise BenchmarkError(f"timer {timer!r} needs a GPU, and this rank computes on the CPU; see state.on_gpu")
        self.timer = timer

    def provider(
        self, name: str, call: Callable[[], object] | None, *, check: Callable[[], object] | None,
        prepare: Callable[[], object] | None = None, baseline: str = "", peer: bool = False, operations: int = 1,
    ) -> None:  # fmt: skip
        """Declare an implementation of the operation.

        Args:
            name: of the provider.
            call: one call; None on a rank that takes no part.
            check: says whether the data on this rank is right, by its truth or by raising AssertionError; None says
                nothing, as torch.testing.assert_close does.  Required, so that leaving it out is a decision.
            prepare: called on every rank before the calls of each round, untimed: spoils the output, which shows a
                provider that does nothing.
            baseline: another provider; the result has this one's speed in relation to it.
            peer: whether the results of others have their speed in relation to this one, if it is the fastest peer.
            operations: operations that one call does; times are per operation.
        """
        _at_least(1, "operations", operations)
        self._add(Provider(name, self.timer, call, prepare, check, baseline, peer, operations))

    def exec(
        self, fn: Callable[[], object], preamble_fn: Callable[[], object] | None = None, *,
        check: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        """Declare the only provider; its name is "default", and `check` is as in `provider`.

        With a `preamble_fn`, calls are timed one by one as `do_bench` does, and have the timer "reported".
        """
        timer = self.timer
        if preamble_fn is not None:
            fn, timer = cold_call(fn, self.barrier, preamble_fn, self.on_gpu), "reported"
        self._add(Provider("default", timer, fn, check=check))

    def skip(self, reason: str) -> NoReturn:
        """Leave this point out; the results say why.  Collective: every rank skips it."""
        self.providers = {"": Provider("", "", skipped=reason)}
        raise SkipPoint(reason)

    def skip_provider(self, name: str, reason: str) -> None:
        """Leave one provider out at this point; the results say why.  Collective: every rank skips it."""
        self._add(Provider(name, self.timer, skipped=reason))

    def target(
        self, provider: str, metric: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Set a bound for a provider's result, a metric of `METRICS`; the results say whether it was reached."""
        if metric not in METRICS:
            raise BenchmarkError(f"no metric is called {metric!r}; there are: {', '.join(METRICS)}")
        if len(given := [each for each in (at_least, at_most) if each is not None]) != 1:
            raise BenchmarkError(f"target for {metric}: give either at_least or at_most")
        self.targets.setdefault(provider, []).append(Target(metric, float(given[0]), at_most is None))

    def check(self) -> None:
        """Refuse a declaration without providers, and baselines and targets of others than these."""
        if not self.providers:
            raise BenchmarkError(f"benchmark {self.benchmark!r} declared no provider at {self.params}")
        named = {each.baseline: "a baseline" for each in self.providers.values() if each.baseline}
        named |= dict.fromkeys(self.targets, "a target")
        for name in named.keys() - self.providers.keys():
            names = ", ".join(self.providers)
            raise BenchmarkError(f"{named[name]} of {self.benchmark!r} names provider {name!r}; there are: {names}")

    def _add(self, provider: Provider) -> None:
        if provider.name in self.providers:
            raise BenchmarkError(f"benchmark {self.benchmark!r} has two providers {provider.name!r}")
        self.providers[provider.name] = provider


def _at_least(least: int, what: str, value: Any) -> Any:
    if value < least:
        raise BenchmarkError(f"{what}: needs {least} or more, not {value}")
    return value


# -- timing -----------------------------------------------------------------------------------------------------------
def cold_call(call: _Call, barrier: _Call, preamble: _Call, on_gpu: bool) -> Callable[[], float]:
    """Return a function that makes one call, after the preamble and with cold caches, and returns its seconds."""
    import torch

    from iris_core.device.timers import seconds_by_clock, seconds_by_events

    cache = torch.empty(_CACHE_NBYTES if on_gpu else 0, dtype=torch.int8, device="cuda" if on_gpu else "cpu")

    def once() -> float:
        barrier()  # the preamble may reset what peers' last calls still write to
        preamble()
        cache.zero_()
        barrier()
        return seconds_by_events(call, 1) if on_gpu else seconds_by_clock(call, 1)

    return once


def do_bench(
    fn: Callable[[], object], barrier_fn: Callable[[], object] | None = None,
    preamble_fn: Callable[[], object] | None = None, n_warmup: int = 25, n_repeat: int = 100,
    quantiles: Sequence[float] | None = None, return_mode: str = "mean",
) -> float | list[float]:  # fmt: skip
    """Return the time of a call in milliseconds, on this rank; the slowest rank's is what counts.

    Collective where `fn` or `barrier_fn` is: every rank calls it with the same numbers.  Each call is timed alone: by
    events of the GPU around it, or by this process's clock where torch sees no GPU.  Before it come `barrier_fn`,
    after which the last call is over on all ranks, `preamble_fn`, on a GPU a write of 256 MiB that empties the caches,
    and `barrier_fn` again.

    Args:
        fn: one call.
        barrier_fn: lets the ranks begin together, such as `ctx.barrier`.
        preamble_fn: untimed preparation of each call, such as zeroing what peers add to.
        n_warmup, n_repeat: calls before those that are timed, beside a first one that compiles; timed calls.
        quantiles: of the times, each from 0 to 1; a list of them is returned then, or a number for a single one.
        return_mode: "mean", "min", "max" or "median" of the times; "all" for a list of them.

    Raises:
        BenchmarkError: (a ValueError) a number is out of range, or there is no such mode.

    Example:
        >>> from iris_core.bench import do_bench
        >>> do_bench(lambda: sum(range(1000)), n_warmup=1, n_repeat=5, return_mode="min") < 100
        True
    """
    if return_mode not in _MODES:
        raise BenchmarkError(f"return_mode={return_mode!r}: there are {', '.join(_MODES)}")
    if n_warmup < 0 or n_repeat < 1:
        raise BenchmarkError(f"n_warmup={n_warmup}, n_repeat={n_repeat}: needs 0 or more, and 1 or more")
    if quantiles is not None and not all(0 <= each <= 1 for each in quantiles):
        raise BenchmarkError(f"quantiles={list(quantiles)}: each must lie between 0 and 1")
    import numpy
    import torch

    barrier = barrier_fn or (lambda: None)
    call = cold_call(fn, barrier, preamble_fn or (lambda: None), torch.cuda.is_available())
    times = [call() * 1e3 for _ in range(1 + n_warmup + n_repeat)][1 + n_warmup :]
    barrier()
    found = _MODES[return_mode](times) if quantiles is None else numpy.quantile(times, list(quantiles)).tolist()
    return found[0] if quantiles is not None and len(found) == 1 else found  # type: ignore[no-any-return]


def warm_clocks(milliseconds: float) -> None:
    """Let this rank's GPU compute, because its clocks are low after a pause."""
    import torch

    x = torch.ones(16 << 20, device="cuda")
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        for _ in range(16):
            x.mul_(1.0)
        torch.cuda.synchronize()


def _as_reported(step: _Call, units: int) -> float:
    """Return the median of what calls report: programs of their own, or parts of a longer step."""
    seconds = [each for each in (step() for _ in range(units)) if isinstance(each, int | float) and each > 0]
    if len(seconds) < units:
        raise BenchmarkError("timer 'reported': a call has to return its seconds, a number above 0")
    return statistics.median(seconds)
