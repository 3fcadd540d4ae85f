"""Timing calls one by one, each behind a barrier and with cold caches; `do_bench` without declaring a benchmark."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from iris_core.bench.timers import synchronize
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CACHE_NBYTES = 256 << 20
"""More than the last cache of any GPU; it is written before each call, so that what the call reads is not there."""

_MODES: dict[str, Callable[[list[float]], float]] = {
    "mean": statistics.fmean,
    "min": min,
    "max": max,
    "median": statistics.median,
}


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
    if return_mode not in (*_MODES, "all"):
        raise BenchmarkError(f"return_mode={return_mode!r}: there are {', '.join(_MODES)} and all")
    if n_warmup < 0 or n_repeat < 1:
        raise BenchmarkError(f"n_warmup={n_warmup}, n_repeat={n_repeat}: needs 0 or more, and 1 or more")
    if quantiles is not None and not all(0 <= each <= 1 for each in quantiles):
        raise BenchmarkError(f"quantiles={list(quantiles)}: each must lie between 0 and 1")
    import torch

    barrier = barrier_fn or _nothing
    calls = SingleCalls(fn, barrier, preamble_fn or _nothing, on_gpu=torch.cuda.is_available())
    times = [calls.milliseconds() for _ in range(1 + n_warmup + n_repeat)][1 + n_warmup :]
    barrier()
    if quantiles is not None:
        found = [_quantile(times, each) for each in quantiles]
        return found[0] if len(found) == 1 else found
    return times if return_mode == "all" else _MODES[return_mode](times)


class SingleCalls:
    """Calls with a preparation of their own; a `Batch`.  Collective where the barrier is.

    Args:
        fn: one call.
        barrier: lets the ranks begin together.
        preamble: untimed preparation of each call.
        warmup: calls before those that `time` times.
        on_gpu: whether to time by events of this rank's GPU, with cold caches, or by this process's clock.
    """

    calls_per_unit = 1

    def __init__(
        self,
        fn: Callable[[], object],
        barrier: Callable[[], object],
        preamble: Callable[[], object],
        *,
        warmup: int = 0,
        on_gpu: bool,
    ) -> None:
        import torch

        self._fn, self._barrier, self._preamble, self._warmup = fn, barrier, preamble, warmup
        self._cache = torch.empty(_CACHE_NBYTES, dtype=torch.int8, device="cuda") if on_gpu else None

    def milliseconds(self) -> float:
        """Return the time of one call.

        The first barrier is for the preamble: it may reset what peers' last calls still write to.
        """
        self._barrier()
        self._preamble()
        if self._cache is not None:
            self._cache.zero_()
        self._barrier()
        return _on_cpu(self._fn) if self._cache is None else _on_gpu(self._fn)

    def once(self) -> None:
        """Call once, and wait for it."""
        self.milliseconds()

    def time(self, units: int) -> float:
        """Return the mean time of `units` calls in seconds."""
        for _ in range(self._warmup):
            self.milliseconds()
        return statistics.fmean(self.milliseconds() for _ in range(units)) / 1e3

    def close(self) -> None:
        """Give back the memory that empties the caches."""
        self._cache = None


def _on_gpu(fn: Callable[[], object]) -> float:
    import torch

    event: Any = torch.cuda.Event  # untyped in torch
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    fn()
    end.record()
    synchronize()
    return float(start.elapsed_time(end))


def _on_cpu(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e3


def _quantile(times: Sequence[float], quantile: float) -> float:
    """By linear interpolation between the two nearest times."""
    ordered = sorted(times)
    place = quantile * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _nothing() -> None:
    """Where nobody has to be waited for, or nothing to be prepared."""
