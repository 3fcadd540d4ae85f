"""Timing calls: by this process's clock, by events of the GPU, by replays of a graph, as reported, or one by one."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    _Call = Callable[[], object]

TIMERS = ("cpu", "events", "graph", "reported")
ON_GPU = ("events", "graph")

MAX_GRAPH_CALLS = 20
"""Calls in one graph: enough that the start of a replay does not count, few enough that capturing is quick."""

_CACHE_NBYTES = 256 << 20
"""More than the last cache of any GPU; it is written before each call, so that what the call reads is not there."""

_HEAD_START_CYCLES = 200_000
"""Pause of the device (about 0.1 ms) before the first event, in which the host launches what follows it."""

_MODES: dict[str, Any] = {
    "mean": statistics.fmean, "min": min, "max": max, "median": statistics.median, "all": list,
}  # fmt: skip


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

    @property
    def on_gpu(self) -> bool:
        """Whether its calls are timed on the GPU."""
        return self.timer in ON_GPU

    def capture(self, calls: int) -> None:
        """Time replays of a graph of `calls` calls from now on; kernels must have been compiled."""
        import torch

        self.calls_per_unit = calls
        if self.call is not None:
            self.graph = torch.cuda.CUDAGraph()
            # Other threads of this process (watchdogs of communication libraries) may call the driver meanwhile.
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                for _ in range(calls):
                    self.call()
            self.captured, self.call = self.call, self.graph.replay

    def time(self, warmup: int, align: _Call) -> float:
        """Return the seconds of one call, out of a round's after `warmup` ones; 0 where there is no call.

        `align` puts a step on the stream after which all ranks' devices go on together, also of idle ranks.
        """
        if self.graph is not None:
            warmup = max(1, -(-warmup // self.calls_per_unit))  # the first replay uploads the graph
        if self.call is not None:
            for _ in range(warmup):
                self.call()
        if self.on_gpu:
            align()
        if self.call is None:
            return 0.0
        from iris_core.dispatch.first_calls import seconds_by_clock, seconds_by_events

        if self.on_gpu:
            import torch

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


def cold_call(call: _Call, barrier: _Call, preamble: _Call, on_gpu: bool) -> Callable[[], float]:
    """Return a function that makes one call, after the preamble and with cold caches, and returns its seconds."""
    import torch

    from iris_core.dispatch.first_calls import seconds_by_clock, seconds_by_events

    cache = torch.empty(_CACHE_NBYTES if on_gpu else 0, dtype=torch.int8, device="cuda" if on_gpu else "cpu")

    def once() -> float:
        barrier()  # the preamble may reset what peers' last calls still write to
        preamble()
        cache.zero_()
        barrier()
        return seconds_by_events(call, 1) if on_gpu else seconds_by_clock(call, 1)

    return once


def do_bench(
    fn: Callable[[], object],
    barrier_fn: Callable[[], object] | None = None,
    preamble_fn: Callable[[], object] | None = None,
    n_warmup: int = 25,
    n_repeat: int = 100,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> float | list[float]:
    """Return the time of a call in milliseconds, on this rank; the slowest rank's is what counts.

    Collective where `fn` or `barrier_fn` is: every rank calls it with the same numbers.  Each call is timed alone: by
    events of the GPU around it, or by this process's clock where torch sees no GPU.  Before it come `barrier_fn`,
    after which the last call is over on all ranks, `preamble_fn`, on a GPU a write of 256 MiB that empties the caches,
    and `barrier_fn` again.

    Args:
        fn: one call.
        barrier_fn: lets the ranks begin together, such as `ctx.barrier`; nothing if None.
        preamble_fn: untimed preparation of each call, such as zeroing what peers add to; nothing if None.
        n_warmup: calls before those that are timed, beside a first one that compiles.
        n_repeat: timed calls.
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
    """The median of what calls report: programs of their own, or parts of a longer step."""
    seconds = [each for each in (step() for _ in range(units)) if isinstance(each, int | float) and each > 0]
    if len(seconds) < units:
        raise BenchmarkError("timer 'reported': a call has to return its seconds, a number above 0")
    return statistics.median(seconds)
