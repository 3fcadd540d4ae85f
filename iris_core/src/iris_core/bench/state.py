"""The declaration of a benchmark at one point of its axes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from iris_core.bench.results import METRICS, Target
from iris_core.bench.timers import ON_GPU, TIMERS, Provider, cold_call
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from iris_core.bench.registry import RunOptions

T = TypeVar("T")


class SkipPoint(Exception):
    """Raised by `State.skip`; not an error."""


class State:
    """One point of a benchmark: read the axes, say how much work a call is, declare the providers.

    Nothing is measured before the benchmark function has returned: then all providers are there, and are taken in turn.
    Numbers out of range, and names that are taken or unknown, are a `BenchmarkError`.
    """

    def __init__(
        self,
        benchmark: str,
        params: Mapping[str, Any],
        options: RunOptions,
        on_gpu: bool,
        barrier: Callable[[], object],
    ) -> None:
        self.benchmark, self.params, self.on_gpu = benchmark, dict(params), on_gpu
        self.rounds, self.warmup, self.repeat = options.rounds, options.warmup, options.repeat
        self.nbytes: int | None = None
        self.bus_factor: float | None = None
        self.flops: float | None = None
        self.counters: dict[str, float | Callable[[], float]] = {}
        self.providers: dict[str, Provider] = {}
        self.targets: dict[str, list[Target]] = {}
        self.resources = contextlib.ExitStack()
        self._timer, self._barrier = "events" if on_gpu else "cpu", barrier

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

        `bus_factor` is how many bytes must leave a rank for each of them, in the best algorithm without multicast (2 (n
        - 1) / n for an all_reduce): it gives the bus bandwidth of NCCL's tests, which compares with that of the links.
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
        self.warmup = _at_least(0, "set_warmup", calls)

    def set_repeat(self, calls: int) -> None:
        """Set how many calls are timed together in each round; by default as many as `RunOptions.batch_ms` holds."""
        self.repeat = _at_least(1, "set_repeat", calls)

    def set_rounds(self, rounds: int) -> None:
        """Set in how many rounds each provider is measured; the result is the median over them."""
        self.rounds = _at_least(1, "set_rounds", rounds)

    def set_timer(self, timer: str) -> None:
        """Set the timer of the providers that follow.

        Args:
            timer: "cpu": this process's clock around the calls (default on the CPU).
                "events": events of the GPU around eager calls (default on GPUs).
                "graph": events around replays of a CUDA graph that holds the calls.
                "reported": each call returns the seconds that it took.
        """
        if timer not in TIMERS:
            raise BenchmarkError(f"no timer is called {timer!r}; there are: {', '.join(TIMERS)}")
        if timer in ON_GPU and not self.on_gpu:
            raise BenchmarkError(f"timer {timer!r} needs a GPU, and this rank computes on the CPU; see state.on_gpu")
        self._timer = timer

    def provider(
        self,
        name: str,
        call: Callable[[], object] | None,
        *,
        check: Callable[[], object] | None,
        prepare: Callable[[], object] | None = None,
        baseline: str = "",
        peer: bool = False,
        operations: int = 1,
    ) -> None:
        """Declare an implementation of the operation.

        Args:
            name: of the provider.
            call: one call; None on a rank that takes no part.
            check: says whether the data on this rank is right, by its truth or by raising AssertionError; None says
                nothing, as torch.testing.assert_close does.  Required, so that leaving it out is a decision.
            prepare: called on every rank before the calls of each round, untimed: spoil the output, so that a provider
                that does nothing is found out.
            baseline: another provider; the result has this one's speed in relation to it.
            peer: whether the others are compared with this one: each result has its speed in relation to the fastest
                peer (itself left out).
            operations: operations that one call does; times are per operation.
        """
        _at_least(1, "operations", operations)
        self._add(Provider(name, self._timer, call, prepare, check, baseline, peer, operations))

    def exec(
        self,
        fn: Callable[[], object],
        preamble_fn: Callable[[], object] | None = None,
        *,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Declare the only provider; its name is "default", and `check` is as in `provider`.

        With a `preamble_fn`, calls are timed one by one with cold caches, as `do_bench` does, and have the timer
        "reported".  It precedes every call, untimed, on every rank: when the last call is over on all of them; and the
        next call begins when all have done it.
        """
        timer = self._timer
        if preamble_fn is not None:
            fn, timer = cold_call(fn, self._barrier, preamble_fn, self.on_gpu), "reported"
        self._add(Provider("default", timer, fn, check=check))

    def skip(self, reason: str) -> NoReturn:
        """Leave this point out; the results say why.  Collective: every rank skips it."""
        self.providers = {"": Provider("", "", skipped=reason)}
        raise SkipPoint(reason)

    def skip_provider(self, name: str, reason: str) -> None:
        """Leave one provider out at this point; the results say why.  Collective: every rank skips it."""
        self._add(Provider(name, self._timer, skipped=reason))

    def target(
        self, provider: str, metric: str, *, at_least: float | None = None, at_most: float | None = None
    ) -> None:
        """Set a bound for a provider's result; the results say whether it was reached.

        The metric is "time_us", "gb_per_s", "bus_gb_per_s", "tflop_per_s", "ratio", "ratio_to_best_peer" or "skew_pct".
        """
        if metric not in METRICS:
            raise BenchmarkError(f"no metric is called {metric!r}; there are: {', '.join(METRICS)}")
        bound = at_least if at_most is None else at_most
        if bound is None or (at_least is not None and at_most is not None):
            raise BenchmarkError(f"target for {metric}: give either at_least or at_most")
        self.targets.setdefault(provider, []).append(Target(metric, float(bound), at_most is None))

    def enter(self, manager: contextlib.AbstractContextManager[T]) -> T:
        """Enter a context manager and leave it when this point has been measured."""
        return self.resources.enter_context(manager)

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
