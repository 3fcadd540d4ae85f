"""Measure algorithms at the first call of a kind, on the call's own tensors, on all members of the group together."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from iris_core.device.timers import NEAR, measure
from iris_core.dispatch.choice import CLEARLY, Choice, Chooser, Launch, entry_for, size_of
from iris_core.dispatch.members import Members
from iris_core.dispatch.requests import ALIGNMENT_NBYTES, POINT_TO_POINT, TORCH
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
from iris_core.types import DeviceType, FusedRequest
from iris_core.world import World

_LAUNCHED, _REFUSED, _BROKEN = range(3)


@dataclass
class FirstCalls:
    """First calls of a kind for which no measured point is near: algorithms are measured for them (IRIS_TUNE, `mode`).

    `bind` makes the bound launch of a request, on all members or on none; `chooser` returns the algorithms for a
    request, `order` the order of a group's calls.  What is measured takes half of the heap at most, in all.
    """

    mode: str
    members: Members
    bind: Callable[..., Any]
    chooser: Callable[[Any], Chooser]
    order: Callable[[tuple[int, ...]], Any]
    heap: SymmetricHeap
    seconds: float = 0.0  # that the last kind was measured for, beside compiling and binding
    taken_nbytes: int = 0  # of the heap, by all kinds

    def serve(self, request: Any, call: Any, shared: dict[str, str], scratch: Any) -> Any:
        """Return the fastest launch for a call, measured on its tensors; None if nothing is measured for it.

        Nothing is measured if a measured point is near for the group's first member, whose choice then counts for all:
        members may have read their tables at different times.  A point that lacks a plugin's algorithm is not near.
        Nor is one of another size, where the two fastest took nearly as long.

        Collective: every member calls it with its first call of a kind.  The output's values are lost.
        """
        ranks, config = request.members, call.config
        is_alone = len(ranks) == 1 or call.op in POINT_TO_POINT or size_of(request) is None
        if is_alone or self.members.earlier(request, shared, config)[1] is not None:
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
        is_near = few and is_free and is_compared and found.decides({name for name, _ in launches})
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
        saved, run = None, self.order(request.members).run  # after calls that are under way
        if is_in_place := bool(request.options.get("in_place")):  # where there is a root, on that one only
            with contextlib.suppress(torch.OutOfMemoryError):
                saved = run(call.tensors[1].detach().clone)
        world = self.members.world.subworld(tuple(sorted(request.members)))
        if not all(ok for (ok,) in world.all_gather_ints([saved is not None or not is_in_place])):
            return None
        free = self.heap.stats().largest_free
        if self.mode == "first":
            self.heap.spare_nbytes = max(1, free - min(free // 2, self.heap.nbytes // 2 - self.taken_nbytes))
        chooser, self.seconds = self.chooser(request), 0.0
        try:
            times = self._times(request, call, launches, scratch, world)
            if times and self.mode == "exhaustive":  # the launches that the best offer, too
                names = [name for (seconds, _), (name, _), _ in times if seconds <= NEAR * times[0][0][0]]
                offered = [(name, given) for name in names for given in chooser.tunings(request, name) if given]
                launches = _common(world.all_gather_object(offered))
                times += self._times(request, call, launches, scratch, world)
        finally:
            self.heap.spare_nbytes = 0
            self.taken_nbytes += max(0, free - self.heap.stats().largest_free)
            if saved is not None:
                with torch.inference_mode():  # or tensors made in that mode could not be written
                    run(call.tensors[1].copy_, saved)
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
        if _is_usual(request, call) and not chooser.promises(request):  # else fewer can serve it than others
            entries = [entry_for(request, *launch, *both) for both, launch, _ in times]
            chooser.tables.add(entries, write=request.rank == 0)
        if request.rank == 0:
            listed = ", ".join(f"{label(*launch)} {seconds * 1e6:.1f} us" for (seconds, _), launch, _ in times)
            logger.info("%s: measured in %.0f ms: %s", best.description, self.seconds * 1e3, listed)
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
            except (IrisError, TypeError) as error:  # on all members, whatever one of them could not prepare
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
        runs, captures = [partial(bound.try_run, *call.tensors) for _, bound in found], None
        if request.target.type is not DeviceType.CPU:
            captures = [partial(bound.sample, *call.tensors) for _, bound in found]
        begin = time.perf_counter()
        seconds = measure(runs, world, captures=captures, hurries=self.mode == "first")
        self.seconds += time.perf_counter() - begin
        times = ((each, *bound) for each, bound in zip(seconds, found, strict=True) if each[0] < math.inf)
        return sorted(times, key=itemgetter(0))


def _is_usual(request: Any, call: Any) -> bool:
    """Whether tables may speak of a call: of dense, aligned tensors that are added up, if at all, without a config."""
    options, config = request.options, call.config
    if options["layout"] != TORCH or options.get("reduction", "sum") != "sum":
        return False
    if options["config"] or options.get("same_place") or (config is not None and config.use_gluon):
        return False
    tensors = [each for each in call.tensors if isinstance(each, torch.Tensor)]
    if isinstance(request, FusedRequest):  # whose matrices may be transposed, with gaps between their rows
        steps = [step * each.element_size() for each in tensors for step in each.stride() if step > 1]
        is_dense = all(1 in each.stride() for each in tensors) and not any(step % ALIGNMENT_NBYTES for step in steps)
    else:
        is_dense = all(each.is_contiguous() for each in tensors)
    return is_dense and not any(each.data_ptr() % ALIGNMENT_NBYTES for each in tensors)


def _common(offered: Sequence[Sequence[Any]]) -> list[Launch]:
    """Return the launches that all members offer, in the order of the first one."""
    others = [[list(each) for each in launches] for launches in offered[1:]]
    return [(name, given) for name, given in offered[0] if all([name, given] in each for each in others)]


def label(name: str, given: Mapping[str, Any]) -> str:
    """Return an algorithm and its config, for people."""
    return " ".join([name, *(f"{field}={value}" for field, value in given.items())])
