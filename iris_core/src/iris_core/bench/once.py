"""Timing one function, without declaring a benchmark: each call for itself, behind a barrier, with cold caches."""

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
    events of the GPU around it, or by this process's clock where torch sees no GPU.  Before it come `preamble_fn`,
    `barrier_fn`, on a GPU a write of 256 MiB that empties the caches, and `barrier_fn` again.  What a rank returns is
    its own time; the slowest rank's is what counts.

    Args:
        fn: one call.
        barrier_fn: lets the ranks begin together, such as `ctx.barrier`; nothing if None.
        preamble_fn: untimed preparation of each call; nothing if None.
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
    times = _times(fn, barrier_fn or _nothing, preamble_fn or _nothing, n_warmup, n_repeat)
    if quantiles is not None:
        found = [_quantile(times, each) for each in quantiles]
        return found[0] if len(found) == 1 else found
    return times if return_mode == "all" else _MODES[return_mode](times)


def _times(
    fn: Callable[[], object],
    barrier: Callable[[], object],
    preamble: Callable[[], object],
    warmup: int,
    repeat: int,
) -> list[float]:
    """Milliseconds of each call."""
    import torch

    on_gpu = torch.cuda.is_available()
    cache = torch.empty(_CACHE_NBYTES, dtype=torch.int8, device="cuda") if on_gpu else None
    times = []
    for turn in range(1 + warmup + repeat):
        preamble()
        barrier()
        if cache is not None:
            cache.zero_()
        barrier()
        elapsed = _on_gpu(fn) if on_gpu else _on_cpu(fn)
        if turn > warmup:
            times.append(elapsed())
    barrier()
    return times


def _on_gpu(fn: Callable[[], object]) -> Callable[[], float]:
    import torch

    event: Any = torch.cuda.Event  # untyped in torch
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    fn()
    end.record()

    def elapsed() -> float:
        synchronize()
        return float(start.elapsed_time(end))

    return elapsed


def _on_cpu(fn: Callable[[], object]) -> Callable[[], float]:
    start = time.perf_counter()
    fn()
    milliseconds = (time.perf_counter() - start) * 1e3
    return lambda: milliseconds


def _quantile(times: Sequence[float], quantile: float) -> float:
    """By linear interpolation between the two nearest times."""
    ordered = sorted(times)
    place = quantile * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _nothing() -> None:
    """Where nobody has to be waited for, or nothing to be prepared."""
