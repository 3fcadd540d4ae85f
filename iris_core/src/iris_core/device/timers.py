"""How long launches take: on the host, between events, in graphs; of several ranks, by the slowest one."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from iris_core.logs import logger
from iris_core.world import World

_ROUNDS = 6
_ROUND_S, _MOST_CALLS = 1e-3, 100  # of one algorithm's calls, but one call at least
_GRAPH_S = 1e-4  # of calls in a graph: in one of many NCCL's kernels pause for 5 us, unless others lie between
_LIMIT_S = 0.15  # of measured calls, after which no round is begun
NEAR = 1.25  # algorithms that took up to this many times as long as the best are measured again
_DROPPED_AFTER = 2  # rounds: a single call, as in the first, says little of a short kernel; then graphs are measured
_CLOSE, _CLOSE_AFTER = 1.1, 3  # after that many rounds only these go on: single rounds differ by 5 %
_CYCLES_PER_S, _MOST_SLEEP_S = 2e9, 5e-3
_HOST_MARGIN, _HOST_LATE_S = 3.0, 1e-4  # of what the host needs for its launches: it may be kept from them
_LATE, _MOST_S = math.inf, 1e6  # of a round in which the device waited for a host; what members exchange
_Launches = Sequence[Callable[[], object]]


def measure(
    launches: _Launches, world: World, *, captures: _Launches | None, hurries: bool = False
) -> list[tuple[float, float]]:
    """Return how long one call of each launch takes: seconds, and seconds of the CPU until it is launched.

    Both are the least of some rounds, of the slowest member; on a GPU the first by events, at last in graphs into which
    the fastest `captures` go, the same launches for a stream that is captured.  On a CPU there are none, and the second
    numbers are 0.  Launches that were late in all rounds, or, if it `hurries`, have no time left, have infinite ones.

    Collective: every member calls it with the same launches in the same order, each of which it has called before, on
    its current stream, and gets the same numbers, none for no launches.
    """
    if not launches:
        return []
    takes = [partial(_cpu_seconds if captures is None else _gpu_seconds, launch) for launch in launches]
    best, host, spent = [math.inf] * len(launches), [math.inf] * len(launches), 0.0
    for number in range(_ROUNDS):
        bound = (NEAR if number < _CLOSE_AFTER else _CLOSE) * min(best)
        again = [i for i, seconds in enumerate(best) if number < _DROPPED_AFTER or seconds <= bound or seconds == _LATE]
        if number and (len(again) == 1 or spent > _LIMIT_S):
            break
        calls = [1 if number == 0 else _calls(best[place], host[place]) for place in again]
        if captures is not None and number == _DROPPED_AFTER:
            held = [max(1, min(count, int(_GRAPH_S / best[place]))) for place, count in zip(again, calls, strict=True)]
            graphs = _captured_by_all([captures[place] for place in again], held, world)
            for place, count, graph in zip(again, held, graphs, strict=True):
                if graph is not None:
                    takes[place] = partial(_graph_seconds, graph, count, best[place], host[place])
                    best[place] = math.inf
        timed = list(zip(again, calls, strict=True))
        for part in [[each] for each in timed] if hurries and number == 0 else [timed]:  # single calls may take long
            if spent > _LIMIT_S:
                break
            own = [int(min(seconds, _MOST_S) * 1e9) for place, count in part for seconds in takes[place](count)]
            slowest = [max(everyone) / 1e9 for everyone in zip(*world.all_gather_ints(own), strict=True)]
            for (place, count), seconds, host_s in zip(part, slowest[::2], slowest[1::2], strict=True):
                seconds = max(1e-9, seconds) if seconds < _MOST_S else _LATE
                best[place], host[place] = min(best[place], seconds), min(host[place], host_s)
                spent += (count + 1) * best[place] if best[place] < _LATE else _MOST_SLEEP_S
    return list(zip(best, host, strict=True))


def _calls(seconds: float, host_s: float) -> int:
    """Return how many calls a round has, the same on all members: the device sleeps until one more is launched."""
    launched = math.inf if host_s == 0 else _MOST_SLEEP_S / (_HOST_MARGIN * host_s) - 1
    return max(1, int(min(_MOST_CALLS, _ROUND_S / seconds, launched)))


def _cpu_seconds(launch: Callable[[], object], calls: int) -> tuple[float, float]:
    launch()  # the members begin together
    return seconds_by_clock(launch, calls), 0.0


def _gpu_seconds(launch: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return the seconds between two events on the current stream, and the time in which the host launches, apart.

    The device sleeps until all calls are launched; where the host takes longer than expected, they are `_LATE`.  The
    first call after that is not timed: in it the members wait for the one that began last.  The host's time is that of
    calls one after the other: a single one takes it twice as long.
    """
    first_s, launched = seconds_by_clock(launch, 1), list[float]()
    expected_s = _HOST_MARGIN * first_s * (calls + 1) + _HOST_LATE_S
    begin = time.perf_counter()
    torch.cuda._sleep(int(min(expected_s, _MOST_SLEEP_S) * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
    launch()
    timed = lambda: launched.extend([seconds_by_clock(launch, calls), time.perf_counter() - begin])
    seconds = seconds_by_events(timed, 1) / calls
    return seconds if launched[1] < expected_s else _LATE, min(first_s, launched[0])


def _captured_by_all(launches: _Launches, calls: Sequence[int], world: World) -> list[Any]:
    """Return a graph of each launch's calls, None for those that a member cannot capture.  Collective."""
    graphs = [_captured(launch, count) for launch, count in zip(launches, calls, strict=True)]
    everyone = zip(*world.all_gather_ints([int(graph is not None) for graph in graphs]), strict=True)
    return [graph if all(ok) else None for graph, ok in zip(graphs, everyone, strict=True)]


def _captured(launch: Callable[[], object], calls: int) -> Any:
    """Return a graph of calls, or None if they cannot be captured."""
    current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    side = _capture_stream(current.device_index)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        launch()  # cuBLAS takes memory for the stream here, or it would be the graph's
        current.wait_stream(side)
        try:
            with warnings.catch_warnings(action="ignore"):  # the graph is empty, where nothing could be captured
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for _ in range(calls):
                        launch()
                finally:
                    graph.capture_end()
        except Exception as error:  # noqa: BLE001 - drivers and engines have many ways to refuse a capture
            logger.debug("not measured in a graph: %s", error)
            return None
    return graph


@cache
def _capture_stream(index: int) -> Any:
    """Return the stream on which a GPU's launches are captured, always the same: cuBLAS keeps memory for each."""
    return torch.cuda.Stream(index)  # type: ignore[no-untyped-call]


def _graph_seconds(graph: Any, calls: int, seconds: float, host_s: float, _: int) -> tuple[float, float]:
    """Return the seconds of one of a graph's calls, in replays for one round; what else is known goes through."""
    replays = max(1, int(_ROUND_S / (calls * seconds)))
    return _gpu_seconds(graph.replay, replays)[0] / calls, host_s


def seconds_by_clock(launch: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call by this process's clock."""
    repetitions = range(calls)
    begin = time.perf_counter()
    for _ in repetitions:
        launch()
    return (time.perf_counter() - begin) / calls


def seconds_by_events(launch: Callable[[], object], calls: int) -> float:
    """Return the seconds of one call between two events on the current stream, for which it waits."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        launch()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls
