"""Timing calls: by this process's clock, by events of the GPU, by replays of a graph, as reported, or one by one."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.bench.state import Provider

    _Call = Callable[[], object]

MAX_GRAPH_CALLS = 20
"""Calls in one graph: enough that the start of a replay does not count, few enough that capturing is quick."""

_CACHE_NBYTES = 256 << 20
"""More than the last cache of any GPU; it is written before each call, so that what the call reads is not there."""

_HEAD_START_CYCLES = 200_000
"""Pause of the device (about 0.1 ms) before the first event, in which the host launches what comes behind it."""

_MODES = {"mean": statistics.fmean, "min": min, "max": max, "median": statistics.median, "all": list}


class Batch:
    """A provider's calls as they are timed; a rank without a call still aligns its GPU.

    A graph is captured here, so kernels must have been compiled.  `align` puts a step on the stream behind which all
    ranks' devices go on together.
    """

    def __init__(self, provider: Provider, warmup: int, align: _Call, *, graph_calls: int) -> None:
        timer, call = provider.timer, provider.call
        self.calls_per_unit = graph_calls if timer == "graph" else 1
        self._call, self._warmup, self._align = call, warmup, align
        self._on_gpu = provider.on_gpu
        self._seconds = {"cpu": _by_clock, "reported": _as_reported}.get(timer, _by_events)
        self._graph: Any = None
        if timer == "graph" and call is not None:
            import torch

            self._warmup = max(1, -(-warmup // graph_calls))  # the first replay uploads the graph
            self._graph = torch.cuda.CUDAGraph()
            # Other threads of this process (watchdogs of communication libraries) may call the driver meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                for _ in range(graph_calls):
                    call()
            self._call = self._graph.replay

    def once(self) -> None:
        """Run the smallest unit once, exactly as it is timed, and wait for it."""
        if self._call is not None:
            self._call()
            if self._on_gpu:
                synchronize()

    def time(self, units: int) -> float:
        """Return the seconds of one call, out of `units` repetitions behind a warm-up; 0 where there is no call."""
        if self._call is not None:
            for _ in range(self._warmup):
                self._call()
        if self._on_gpu:
            self._align()
        return 0.0 if self._call is None else self._seconds(self._call, units) / self.calls_per_unit

    def close(self) -> None:
        """Destroy the graph."""
        if self._graph is not None:
            self._graph.reset()


class SingleCalls:
    """Calls that are timed one by one, in place of a `Batch`, each behind a barrier of the ranks and a preamble.

    On a GPU they find cold caches.
    """

    calls_per_unit = 1

    def __init__(self, call: _Call, barrier: _Call, preamble: _Call, on_gpu: bool, warmup: int = 0) -> None:
        import torch

        self._call, self._barrier, self._preamble, self._warmup = call, barrier, preamble, warmup
        self._cache = torch.empty(_CACHE_NBYTES, dtype=torch.int8, device="cuda") if on_gpu else None

    def once(self) -> float:
        """Call once, and return the seconds.

        The first barrier is for the preamble: it may reset what peers' last calls still write to.
        """
        self._barrier()
        self._preamble()
        if self._cache is not None:
            self._cache.zero_()
        self._barrier()
        return _by_clock(self._call, 1) if self._cache is None else _by_events(self._call, 1, pause=False)

    def time(self, units: int) -> float:
        """Return the mean time of `units` calls in seconds."""
        return statistics.fmean([self.once() for _ in range(self._warmup + units)][self._warmup :])


def do_bench(
    fn: Callable[[], object],
    barrier_fn: Callable[[], object] | None = None,
    preamble_fn: Callable[[], object] | None = None,
    n_warmup: int = 25,
    n_repeat: int = 100,
    quantiles: Sequence[float] | None = None,
    return_mode: str = "mean",
) -> float | list[float]:
    """Return the time of a call in milliseconds.

    Collective where `fn` or `barrier_fn` is: every rank calls it with the same numbers.  Each call is timed alone: by
    events of the GPU around it, or by this process's clock where torch sees no GPU.  Before it come `barrier_fn`,
    behind which the last call is over on all ranks, `preamble_fn`, on a GPU a write of 256 MiB that empties the caches,
    and `barrier_fn` again.  What a rank returns is its own time; the slowest rank's is what counts.

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

    nothing = lambda: None
    barrier = barrier_fn or nothing
    calls = SingleCalls(fn, barrier, preamble_fn or nothing, torch.cuda.is_available())
    times = [calls.once() * 1e3 for _ in range(1 + n_warmup + n_repeat)][1 + n_warmup :]
    barrier()
    if quantiles is not None:
        found = [float(each) for each in numpy.quantile(times, list(quantiles))]
        return found[0] if len(found) == 1 else found
    answer: float | list[float] = _MODES[return_mode](times)  # type: ignore[operator]
    return answer


def warm_clocks(milliseconds: float) -> None:
    """Let this rank's GPU compute, because its clocks are low after a pause."""
    import torch

    x = torch.ones(16 << 20, device="cuda")
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        for _ in range(16):
            x.mul_(1.0)
        synchronize()


def synchronize() -> None:
    """Wait for this rank's GPU."""
    import torch

    torch.cuda.synchronize()


def _by_clock(step: _Call, units: int) -> float:
    repetitions = range(units)
    start = time.perf_counter()
    for _ in repetitions:
        step()
    return (time.perf_counter() - start) / units


def _by_events(step: _Call, units: int, *, pause: bool = True) -> float:
    import torch

    event: Any = torch.cuda.Event  # untyped in torch
    start, end = event(enable_timing=True), event(enable_timing=True)
    if pause:
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(units):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / units


def _as_reported(step: _Call, units: int) -> float:
    """The median of what calls report: programs of their own, or parts of a longer step."""
    seconds = [each for each in (step() for _ in range(units)) if isinstance(each, int | float) and each > 0]
    if len(seconds) < units:
        raise BenchmarkError("timer 'reported': a call has to return its seconds, a number above 0")
    return statistics.median(seconds)
