"""Measure algorithms at the first call of a kind, on the call's own tensors, on all members of the group together."""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any

import torch

from iris_core.dispatch.choice import CLEARLY, Choice, Chooser, Launch, entry_for, size_of
from iris_core.dispatch.members import Members
from iris_core.dispatch.requests import POINT_TO_POINT, TORCH
from iris_core.errors import (
    CollectiveTimeoutError,
    DeviceError,
    HeapClosedError,
    IrisError,
    PeerLostError,
    RankMismatchError,
)
from iris_core.heap.heap import SymmetricHeap
from iris_core.logs import logger
from iris_core.types import DeviceType
from iris_core.world import World

_ROUNDS = 6
_ROUND_S, _MOST_CALLS = 1e-3, 100  # of one algorithm's calls, but one call at least
_LIMIT_S = 0.15  # of measured calls, after which no round is begun
_NEAR = 1.25  # algorithms that took up to this many times as long as the best are measured again
_DROPPED_AFTER = 2  # rounds: a single call, as in the first, says little of a short kernel; then graphs are measured
_CLOSE, _CLOSE_AFTER = 1.1, 3  # after that many rounds only these go on: single rounds differ by 5 %
_CYCLES_PER_S, _MOST_SLEEP_S = 2e9, 5e-3
_HOST_MARGIN, _HOST_LATE_S = 3.0, 1e-4  # of what the host needs for its launches: it may be kept from them
_LAUNCHED, _REFUSED, _BROKEN = range(3)


@dataclass
class FirstCalls:
    """First calls of a kind for which no measured point is near: algorithms are measured for them (IRIS_TUNE, `mode`).

    `bind` makes the bound launch of a request, on all members or on none; `chooser` returns the algorithms for a
    request.  While first calls are measured, half of the heap is left to users.
    """

    mode: str
    members: Members
    bind: Callable[..., Any]
    chooser: Callable[[Any], Chooser]
    heap: SymmetricHeap

    def serve(self, request: Any, call: Any, shared: dict[str, str], scratch: Any) -> Any:
        """Return the fastest launch for a call, measured on its tensors; None if nothing is measured for it.

        Nothing is measured if a measured point is near for the group's first member, whose choice then counts for all:
        members may have read their tables at different times.  A point that lacks a plugin's algorithm is not near.

        Collective: every member calls it with its first call of a kind.  The output's values are lost.
        """
        ranks, config = request.members, call.config
        is_alone = len(ranks) == 1 or call.op in POINT_TO_POINT or size_of(request) is None
        if is_alone or self.members.knows(ranks, shared):
            return None
        try:
            if config is not None and config.named(call.op)[0] is not None:
                return None
            chooser, few = self.chooser(request), self.mode == "first"
            found = chooser.tables.nearest(request)
            chosen = chooser.choose(request, config)
            launches = chooser.contenders(request, config, few=few)
        except Exception as error:  # noqa: BLE001 - of a plugin, of any kind; raised again, on all members
            self.members.refuse(ranks, call.op, shared, error)
        is_free = not request.options["config"]  # tables have what algorithms took by themselves
        listed = {each.algorithm for each in found.entries}
        is_compared = all(name in listed or chooser.is_ours(request, name) for name, _ in launches)
        is_near = few and is_free and found.is_near and found.entries[0].measured and is_compared
        rows = self.members.gather(ranks, shared, {"near": is_near, "chosen": chosen, "launches": launches})
        common = _common([row["launches"] for row in rows])
        if not rows[0]["near"] and len(common) > 1 and (best := self._measure(request, call, shared, common, scratch)):
            return best
        self.members.remember(request, shared, config, Choice(*rows[0]["chosen"]))
        return None

    def _measure(
        self, request: Any, call: Any, shared: dict[str, str], launches: Sequence[Launch], scratch: Any
    ) -> Any:
        """Return the fastest launch, and leave the input as it was; None if none can be measured.  Collective."""
        saved: torch.Tensor | None = None
        if is_in_place := bool(request.options.get("in_place")):  # where there is a root, on that one only
            with contextlib.suppress(torch.OutOfMemoryError):
                saved = call.tensors[1].clone()
        world = self.members.world.subworld(tuple(sorted(request.members)))
        if not all(ok for (ok,) in world.all_gather_ints([saved is not None or not is_in_place])):
            return None
        if self.mode == "first":
            self.heap.spare_nbytes = self.heap.stats().largest_free // 2
        chooser = self.chooser(request)
        try:
            times = self._times(request, call, launches, scratch, world)
            if times and self.mode == "exhaustive":  # the launches that the best offer, too
                names = [name for (seconds, _), (name, _), _ in times if seconds <= _NEAR * times[0][0][0]]
                offered = [(name, given) for name in names for given in chooser.tunings(request, name) if given]
                launches = _common(world.all_gather_object(offered))
                times += self._times(request, call, launches, scratch, world)
        finally:
            self.heap.spare_nbytes = 0
            if saved is not None:
                call.tensors[1].copy_(saved)
        if not times:
            return None
        times.sort(key=itemgetter(0))
        first = times[0]
        (seconds, _), (name, given), best = min(times, key=lambda each: max(each[0]))
        in_graphs = first[1] if first[0][0] < CLEARLY * seconds else None
        if in_graphs is not None:
            best.let_capture(first[2])
        chosen = Choice(name, given, "measured here as the fastest", in_graphs)
        self.members.remember(request, shared, call.config, chosen)
        if request.options["layout"] == TORCH and not request.options["config"]:  # tables say nothing of others
            entries = [
                entry_for(request, name, seconds, config=given, host_seconds=host_s)
                for (seconds, host_s), (name, given), _ in times
            ]
            chooser.tables.add(entries, write=request.rank == 0)
        if request.rank == 0:
            listed = ", ".join(f"{label(*launch)} {seconds * 1e6:.1f} us" for (seconds, _), launch, _ in times)
            logger.info("%s: measured: %s", best.description, listed)
        return best

    def _times(
        self, request: Any, call: Any, launches: Sequence[Launch], scratch: Any, world: World
    ) -> list[tuple[tuple[float, float], Launch, Any]]:
        """Bind and measure launches: (what `measure` says, launch, what was bound), the fastest first.

        All are bound before the first one is called: kernels compile beside each other from then on.  Those that cannot
        serve the call are left out, on all members.

        Collective: every member calls it with the same launches.
        """
        bounds: list[tuple[Launch, Any]] = []
        for name, given in launches:
            try:
                bounds.append(((name, given), self.bind((name, given), request, call.config, scratch)))
            except (CollectiveTimeoutError, DeviceError, HeapClosedError, PeerLostError, RankMismatchError):
                raise
            except IrisError as error:  # on all members, whatever one of them could not prepare
                logger.debug("%s: %s is not measured: %s", call.op, name, error)
        found: list[tuple[Launch, Any]] = []
        for launch, bound in bounds:
            failure: Exception | None = None
            try:
                bound.try_run(*call.tensors)
            except Exception as error:  # noqa: BLE001 - compilers and drivers have many ways to say what is missing
                failure = error
            own = _LAUNCHED if failure is None else _BROKEN if isinstance(failure, DeviceError) else _REFUSED
            states = {each for (each,) in world.all_gather_ints([own])}
            if states == {_LAUNCHED}:
                found.append((launch, bound))
            elif states != {_REFUSED}:  # members wait in a kernel, or have given up to wait, for those that refused
                raise failure or DeviceError(f"{call.op}: {launch[0]!r} could not be launched on all members")
        runs, captures = ([partial(run, *call.tensors) for run in each] for each in (
            [bound.try_run for _, bound in found], [bound.sample for _, bound in found]))  # fmt: skip
        seconds = measure(runs, world, captures=captures if request.target.type is not DeviceType.CPU else None)
        times = ((each, *bound) for each, bound in zip(seconds, found, strict=True))
        return sorted(times, key=itemgetter(0))


def _common(offered: Sequence[Sequence[Any]]) -> list[Launch]:
    """Return the launches that all members offer, in the order of the first one."""
    others = [[list(each) for each in launches] for launches in offered[1:]]
    return [(name, given) for name, given in offered[0] if all([name, given] in each for each in others)]


def label(name: str, given: Mapping[str, Any]) -> str:
    """Return an algorithm and its config, for people."""
    return " ".join([name, *(f"{field}={value}" for field, value in given.items())])


def measure(
    launches: Sequence[Callable[[], object]], world: World, *, captures: Sequence[Callable[[], object]] | None
) -> list[tuple[float, float]]:
    """Return how long one call of each launch takes: seconds, and seconds of the CPU until it is launched.

    Both are the least of some rounds, of the slowest member.  On a GPU, `captures` are the same launches for a stream
    that is captured: events take the times, at last those of graphs, which the fastest ones are captured into.  On a
    CPU there are none, and the second ones are 0.

    Collective: every member calls it with the same launches in the same order, each of which it has called before, and
    gets the same numbers, none for no launches.  They launch on the current stream.
    """
    if not launches:
        return []
    takes = [partial(_cpu_seconds if captures is None else _gpu_seconds, launch) for launch in launches]
    best, host = [math.inf] * len(launches), [math.inf] * len(launches)
    spent = 0.0
    for number in range(_ROUNDS):
        bound = (_NEAR if number < _CLOSE_AFTER else _CLOSE) * min(best)
        again = [place for place, seconds in enumerate(best) if number < _DROPPED_AFTER or seconds <= bound]
        if number and (len(again) == 1 or spent > _LIMIT_S):
            break
        calls = [1 if number == 0 else _calls(best[place], host[place]) for place in again]
        if captures is not None and number == _DROPPED_AFTER:
            graphs = [_captured(captures[place], count) for place, count in zip(again, calls, strict=True)]
            everyone = zip(*world.all_gather_ints([int(graph is not None) for graph in graphs]), strict=True)
            for place, graph, count, ok in zip(again, graphs, calls, map(all, everyone), strict=True):
                if ok and graph is not None:
                    takes[place] = partial(_graph_seconds, graph, count, best[place], host[place])
                    best[place] = math.inf
        own = [int(seconds * 1e9) for place, count in zip(again, calls, strict=True) for seconds in takes[place](count)]
        slowest = [max(everyone) / 1e9 for everyone in zip(*world.all_gather_ints(own), strict=True)]
        for place, count, seconds, host_s in zip(again, calls, slowest[::2], slowest[1::2], strict=True):
            best[place], host[place] = min(best[place], max(1e-9, seconds)), min(host[place], host_s)
            spent += (count + 1) * best[place]
    return list(zip(best, host, strict=True))


def _calls(seconds: float, host_s: float) -> int:
    """Return how many calls a round has: with one before them, no more than the host launches while the device sleeps.

    All members have the same, for both numbers are of all.
    """
    launched = math.inf if host_s == 0 else _MOST_SLEEP_S / (_HOST_MARGIN * host_s) - 1
    return max(1, int(min(_MOST_CALLS, _ROUND_S / seconds, launched)))


def _cpu_seconds(launch: Callable[[], object], calls: int) -> tuple[float, float]:
    launch()  # the members begin together
    return seconds_by_clock(launch, calls), 0.0


def _gpu_seconds(launch: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return the seconds between two events on the current stream, and the time in which the host launches, apart.

    The device sleeps until all calls are launched.  The first one after that is not timed: in it the members wait for
    the one that began last.  The host's time is that of calls one after the other: a single one takes it twice as long.
    """
    first_s, launched = seconds_by_clock(launch, 1), list[float]()
    sleep_s = min(_HOST_MARGIN * first_s * (calls + 1) + _HOST_LATE_S, _MOST_SLEEP_S)
    torch.cuda._sleep(int(sleep_s * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
    launch()
    seconds = seconds_by_events(lambda: launched.append(seconds_by_clock(launch, calls)), 1) / calls
    return seconds, min(first_s, *launched)


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
