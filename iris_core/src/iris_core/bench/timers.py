"""Timing a batch of calls: by this process's clock, by events of the GPU, by replays of a graph, or as reported."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Protocol

from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable

GPU_TIMERS = ("events", "graph")
MAX_GRAPH_CALLS = 20
"""Calls in one graph: enough that the start of a replay does not count, few enough that capturing is quick."""

_WARM_BYTES = 64 << 20
_HEAD_START_CYCLES = 200_000
"""The device pauses so long (about 0.1 ms) before the first event, so that the host has launched what comes behind it:
otherwise the time between the event and the first launch would count."""


class Batch(Protocol):
    """A provider's calls as they are timed."""

    calls_per_unit: int
    """Calls in what `time` repeats: 1, or those of a graph."""

    def once(self) -> None:
        """Run the smallest unit once, exactly as it is timed, and wait for it."""

    def time(self, units: int) -> float:
        """Return the seconds of one call, out of `units` repetitions behind a warm-up."""

    def close(self) -> None:
        """Give back what the batch holds."""


class CpuBatch:
    """Calls between two readings of this process's clock."""

    calls_per_unit = 1

    def __init__(self, call: Callable[[], object], warmup: int) -> None:
        self._call, self._warmup = call, warmup

    def once(self) -> None:
        """Call once."""
        self._call()

    def time(self, units: int) -> float:
        """Return the mean time of `units` calls in seconds."""
        call = self._call
        for _ in range(self._warmup):
            call()
        repetitions = range(units)
        start = time.perf_counter()
        for _ in repetitions:
            call()
        return (time.perf_counter() - start) / units

    def close(self) -> None:
        """Nothing to give back."""


class ReportedBatch:
    """Calls that return the seconds they took: programs of their own, or parts of a longer step."""

    calls_per_unit = 1

    def __init__(self, call: Callable[[], object], warmup: int) -> None:
        self._call, self._warmup = call, warmup

    def once(self) -> None:
        """Call once."""
        self._call()

    def time(self, units: int) -> float:
        """Return the median of what `units` calls report.

        Raises:
            BenchmarkError: a call returned something else than a positive number.
        """
        for _ in range(self._warmup):
            self._call()
        seconds = [self._call() for _ in range(units)]
        numbers = [each for each in seconds if isinstance(each, int | float) and each > 0]
        if len(numbers) < len(seconds):
            raise BenchmarkError(f"timer 'reported': a call has to return its seconds, a number above 0; got {seconds}")
        return statistics.median(numbers)

    def close(self) -> None:
        """Nothing to give back."""


class EventBatch:
    """Eager calls between two events on the current stream."""

    calls_per_unit = 1

    def __init__(self, call: Callable[[], object], warmup: int, align: Callable[[], object]) -> None:
        self._call, self._warmup, self._align = call, warmup, align

    def once(self) -> None:
        """Call once and wait for the device."""
        self._call()
        synchronize()

    def time(self, units: int) -> float:
        """Return the mean time of `units` calls in seconds."""
        for _ in range(self._warmup):
            self._call()
        self._align()
        return _between_events(self._call, units)

    def close(self) -> None:
        """Nothing to give back."""


class GraphBatch:
    """Calls in a CUDA graph; what the host does for a call is not part of the time.

    The call is captured here and must have been made before, so that its kernels are compiled.
    """

    def __init__(self, call: Callable[[], object], warmup: int, align: Callable[[], object], calls: int) -> None:
        import torch

        self.calls_per_unit = calls
        self._align = align
        self._warmup = max(1, -(-warmup // calls))  # the first replay uploads the graph
        self._graph: Any = torch.cuda.CUDAGraph()
        # Other threads of this process (watchdogs of communication libraries) may call the driver meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()

    def once(self) -> None:
        """Replay once and wait for the device."""
        self._graph.replay()
        synchronize()

    def time(self, units: int) -> float:
        """Return the mean time of a call in seconds, over `units` replays."""
        for _ in range(self._warmup):
            self._graph.replay()
        self._align()
        return _between_events(self._graph.replay, units) / self.calls_per_unit

    def close(self) -> None:
        """Destroy the graph."""
        self._graph.reset()


class IdleBatch:
    """A rank that takes no part; on a GPU it still joins the step that lets the ranks begin together."""

    calls_per_unit = 1

    def __init__(self, align: Callable[[], object]) -> None:
        self._align = align

    def once(self) -> None:
        """Do nothing."""

    def time(self, units: int) -> float:
        """Begin with the others; returns 0."""
        self._align()
        return 0.0

    def close(self) -> None:
        """Nothing to give back."""


def make_batch(
    timer: str, call: Callable[[], object] | None, *, warmup: int, align: Callable[[], object], graph_calls: int
) -> Batch:
    """Make a batch for a timer.

    Args:
        timer: "cpu", "events", "graph" or "reported".
        call: one call; None for a rank that takes no part.
        warmup: calls before the timed ones.
        align: puts a step on the stream behind which all ranks' devices go on together.
        graph_calls: calls in a graph.
    """
    if call is None:
        return IdleBatch(align if timer in GPU_TIMERS else _nothing)
    if timer == "cpu":
        return CpuBatch(call, warmup)
    if timer == "reported":
        return ReportedBatch(call, warmup)
    if timer == "events":
        return EventBatch(call, warmup, align)
    return GraphBatch(call, warmup, align, graph_calls)


def warm_clocks(milliseconds: float) -> None:
    """Let this rank's GPU compute, because its clocks are low after a pause."""
    import torch

    x = torch.ones(_WARM_BYTES // 4, device="cuda")
    end = time.perf_counter() + milliseconds / 1e3
    while time.perf_counter() < end:
        for _ in range(16):
            x.mul_(1.0)
        synchronize()


def sm_clock_mhz() -> int | None:
    """Return the clock of this rank's GPU now in MHz; None where torch cannot ask (it needs NVML's Python package)."""
    import torch

    try:
        return int(torch.cuda.clock_rate())
    except Exception:  # noqa: BLE001 - a fact for the report; the vendor's errors have no base that torch exports
        return None


def synchronize() -> None:
    """Wait for this rank's GPU."""
    import torch

    torch.cuda.synchronize()


def _between_events(step: Callable[[], object], times: int) -> float:
    import torch

    event: Any = torch.cuda.Event  # untyped in torch
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        step()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / times


def _nothing() -> None:
    """Ranks on CPUs begin together at the barrier of the hosts."""
