"""The declaration of a benchmark at one point of its axes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from iris_core.bench.results import Target
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

TIMERS = ("cpu", "events", "graph", "reported")
_ON_GPU = ("events", "graph")
T = TypeVar("T")


class SkipPoint(Exception):
    """Raised by `State.skip`; not an error."""


@dataclass(frozen=True)
class Provider:
    """One implementation of what is measured; see `State.provider` and, for `before`, `State.exec`."""

    name: str
    timer: str
    call: Callable[[], object] | None = None
    prepare: Callable[[], object] | None = None
    check: Callable[[], object] | None = None
    baseline: str = ""
    peer: bool = False
    operations: int = 1
    skipped: str = ""
    before: Callable[[], object] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether its calls are timed on the GPU."""
        return self.timer in _ON_GPU


class State:
    """One point of a benchmark: read the axes, say how much work a call is, declare the providers.

    Nothing is measured before the benchmark function has returned: then all providers are there, and are taken in turn.
    Numbers out of range, and names that are taken or unknown, are a `BenchmarkError`.
    """

    def __init__(self, benchmark: str, params: Mapping[str, Any], *, on_gpu: bool, rounds: int) -> None:
        self.benchmark = benchmark
        self.params = dict(params)
        self.on_gpu = on_gpu
        self.rounds = rounds
        self.warmup = 1
        self.repeat: int | None = None
        self.nbytes: int | None = None
        self.bus_factor: float | None = None
        self.flops: float | None = None
        self.counters: dict[str, float | Callable[[], float]] = {}
        self.providers: dict[str, Provider] = {}
        self.targets: dict[str, list[Target]] = {}
        self._timer = "events" if on_gpu else "cpu"
        self._cleanup = contextlib.ExitStack()

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
        self.nbytes = int(_positive("set_bytes", nbytes))
        self.bus_factor = None if bus_factor is None else float(_positive("set_bytes", bus_factor))

    def set_flops(self, flops: float) -> None:
        """Set the floating-point operations of one operation, per rank; gives TFLOP/s."""
        self.flops = float(_positive("set_flops", flops))

    def add_counter(self, name: str, value: float | Callable[[], float]) -> None:
        """Add a number to the results of this point, or a function that is called in the end; rank 0's counts."""
        if name in self.counters:
            raise BenchmarkError(f"benchmark {self.benchmark!r} adds counter {name!r} twice")
        self.counters[name] = value

    def set_warmup(self, calls: int) -> None:
        """Set how many calls precede the timed ones in each round (1 by default)."""
        if calls < 0:
            raise BenchmarkError(f"set_warmup({calls}): needs 0 or more")
        self.warmup = calls

    def set_repeat(self, calls: int) -> None:
        """Set how many calls are timed together in each round; by default as many as `RunOptions.batch_ms` holds."""
        self.repeat = int(_positive("set_repeat", calls))

    def set_rounds(self, rounds: int) -> None:
        """Set in how many rounds each provider is measured; the result is the median over them."""
        self.rounds = int(_positive("set_rounds", rounds))

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
        if timer in _ON_GPU and not self.on_gpu:
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
        operations = int(_positive("operations", operations))
        self._add(Provider(name, self._timer, call, prepare, check, baseline, peer, operations))

    def exec(
        self,
        fn: Callable[[], object],
        preamble_fn: Callable[[], object] | None = None,
        *,
        check: Callable[[], object] | None = None,
    ) -> None:
        """Declare the only provider; its name is "default".

        With a `preamble_fn`, calls are timed one by one with cold caches, as `do_bench` does (timers "cpu" and
        "events").  It precedes every call, untimed, on every rank: when the last call is over on all of them; and the
        next call begins when all have done it.  `check` is as in `provider`.
        """
        if preamble_fn is not None and self._timer not in ("cpu", "events"):
            raise BenchmarkError(f"timer {self._timer!r} takes many calls together: a preamble_fn needs cpu or events")
        self._add(Provider("default", self._timer, fn, check=check, before=preamble_fn))

    def skip(self, reason: str) -> NoReturn:
        """Leave this point out; the results say why.  Collective: every rank skips it."""
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
        self.targets.setdefault(provider, []).append(Target.make(metric, at_least=at_least, at_most=at_most))

    def enter(self, manager: contextlib.AbstractContextManager[T]) -> T:
        """Enter a context manager and leave it when this point has been measured."""
        return self._cleanup.enter_context(manager)

    def close(self) -> None:
        """Leave what `enter` entered; forget the providers and what they hold."""
        self.providers.clear()
        self.counters.clear()
        self._cleanup.close()

    def check(self) -> None:
        """Refuse a declaration without providers, and baselines and targets of others than these."""
        if not self.providers:
            raise BenchmarkError(f"benchmark {self.benchmark!r} declared no provider at {self.params}")
        named = {each.baseline: "a baseline" for each in self.providers.values() if each.baseline}
        named |= dict.fromkeys(self.targets, "a target")
        for name, what in named.items():
            if name not in self.providers:
                names = ", ".join(self.providers)
                raise BenchmarkError(f"{what} of {self.benchmark!r} names provider {name!r}; there are: {names}")

    def _add(self, provider: Provider) -> None:
        if provider.name in self.providers:
            raise BenchmarkError(f"benchmark {self.benchmark!r} has two providers {provider.name!r}")
        self.providers[provider.name] = provider


def _positive(what: str, value: float) -> float:
    if value <= 0:
        raise BenchmarkError(f"{what}: needs a number above 0, not {value}")
    return value
