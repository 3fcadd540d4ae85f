"""From a call of `ctx.ccl` or `ctx.ops` to a launch that can be repeated: request, agreement, choice, plan.

This is the slow path.  It may exchange between the members' hosts, so its decisions may depend only on facts that are
equal on all members.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from iris_core.device.barrier import DeviceBarriers
from iris_core.device.launch_order import Begun, DeviceOrder
from iris_core.device.reports import KernelReports, Meaning, Report
from iris_core.dispatch import choice
from iris_core.dispatch.choice import Explanation
from iris_core.dispatch.config import Config, FusedConfig, LaunchConfig
from iris_core.dispatch.first_calls import FirstCalls
from iris_core.dispatch.members import Members, layout_of, prepare_alike
from iris_core.dispatch.products import FusedCall, NormCall
from iris_core.dispatch.requests import (
    POINT_TO_POINT,
    CollectiveCall,
    Here,
    Request,
    config_text,
    is_empty,
    shared_facts,
)
from iris_core.dispatch.team import Host, Scratch, Team, control_nbytes
from iris_core.dispatch.traced import BINDERS
from iris_core.errors import HeapClosedError, HeapError, UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.heap.streams import HostStream, HostStreams, HostWork
from iris_core.protocols import CallCache, Context, Work
from iris_core.registry import MAY_BE_WATCHED, notify
from iris_core.types import DeviceType, FusedRequest, Group, OperationRequest
from iris_core.world import World

Call = CollectiveCall | FusedCall | NormCall
Order = HostStream | DeviceOrder


GENERATION = 512
"""Launches of a generation; there are two, so at least this number of recent launches is kept."""

CLOSED = "this Iris context is closed; open a new one"


class Bound:
    """A call that can be launched: algorithm, plan, the request that this was prepared for, and where it runs."""

    workspace: Any = None  # of `ctx.ops`: what a call returns
    reach: tuple[int, ...] = ()  # of `ctx.ops`: bytes of each tensor, from the first element to the end of the last one

    def __init__(
        self, algorithm: Any, plan: Any, order: Order, team: Team, context: weakref.ref[Context], request: Request
    ) -> None:
        self.algorithm: str = algorithm.name
        self.plan, self.request, self.op, self.mark = plan, request, request.op, order.mark
        self._algorithm, self._order, self._team, self._context = algorithm, order, team, context
        self._reports = team.reports
        self._memory: Any = getattr(plan, "memory", None)
        self._in_graphs: Bound | None = None
        on_gpu = self._memory is not None and self._memory.device.type != "cpu"
        self._set_launch(self._launch_or_capture if on_gpu else algorithm.launch)

    def _set_launch(self, launch: Callable[..., Any]) -> None:
        self._launch = launch
        self._run = partial(self._order.run, launch, self.plan)

    @property
    def description(self) -> str:
        """The operation, what it works on, and the algorithm."""
        request = self.request
        return f"{self.op} {' x '.join(map(str, (*request.shape, request.dtype)))} ({self.algorithm})"

    def run(self, *tensors: Any) -> None:
        """Launch on the current stream.  Tensors are those that the algorithm's `launch` takes."""
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new()
        if "iris_collective" in MAY_BE_WATCHED:
            self._notify()
        self._team.latest = self
        work = self._run(*tensors)
        if work is not None:
            work.wait()

    def run_async(self, *tensors: Any) -> Work:
        """Launch beside the current stream, and return a handle."""
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new()
        if "iris_collective" in MAY_BE_WATCHED:
            self._notify()
        self._team.latest = self
        return self._order.run_async(self.op, self._launch, self.plan, *tensors)

    def try_run(self, *tensors: Any) -> None:
        """Launch on the current stream, in the team's order; a failure is the caller's to report."""
        work = self._run(*tensors)
        if work is not None:
            work.wait()

    def launch(self, *tensors: Any) -> None:
        """Launch on the current stream, as a part of a call whose turn in the team's order it is already."""
        work = self._launch(self.plan, *tensors)
        if work is not None:
            work.wait()

    def sample(self, *tensors: Any) -> None:
        """Launch on the current stream, beside the team's order; of a graph that captures it, nothing is held."""
        work = self._algorithm.launch(self.plan, *tensors)
        if work is not None:
            work.wait()

    def begin(self, *tensors: Any) -> Work:
        """Begin like `launch`; the current stream goes on before the end, for which the handle's `wait` waits.

        What other algorithms than those with `begin` launch is over, or is on the stream.
        """
        work = getattr(self._algorithm, "begin", self._launch)(self.plan, *tensors)
        return Begun() if work is None else work

    def let_capture(self, other: Bound) -> None:
        """Use another algorithm while a graph is captured: one that takes less device time and more CPU time."""
        if not isinstance(self._order, HostStream):  # the CPU captures nothing, and cannot be asked
            self._in_graphs = other
            self._set_launch(self._launch_or_capture)

    def _launch_or_capture(self, plan: Any, *tensors: Any, **options: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            if (other := self._in_graphs) is not None:
                return other._launch(other.plan, *tensors, **options)
            self._team.hold(self._memory)
        return self._algorithm.launch(plan, *tensors, **options)

    @property
    def droppable(self) -> bool:
        """Whether it can be dropped and made again: graphs that captured it need nothing of it, or that is held."""
        if self._in_graphs is not None and not self._in_graphs.droppable:
            return False
        return isinstance(self.request, OperationRequest) or getattr(self._algorithm, "drops_plans", False)

    def _notify(self) -> None:
        which: dict[str, Any] = {"op": self.op, "algorithm": self.algorithm, "nbytes": self.request.nbytes}
        notify("iris_collective", context=self._context(), **which)


class Launches(dict[Any, Any]):
    """Bound calls by key, with `scratch`, the local memory of their plans, and `front`, a `CallCache` of recent ones.

    An LRU cache, approximated by two generations, so that a hit is one lookup in a dict.  When the young generation is
    full, it becomes the `old` one, and the rest of that is dropped; an old entry that is used moves to the young ones.
    Entries that cannot be dropped stay.
    """

    def __init__(self, front: CallCache | None = None) -> None:
        super().__init__()
        self.front = front
        self.scratch: Scratch = {}
        self.old: dict[Any, Any] = {}
        self._dropped: deque[tuple[Any, Bound]] = deque()
        self._lock = threading.Lock()

    def keep(self, key: Any, launch: Any) -> None:
        """Add a launch to the young generation; what is dropped stays until the device is done with its memory."""
        with self._lock:  # of threads that call with different groups
            is_full = len(self) >= GENERATION
            young = {key: each for key, each in self.items() if each.droppable} if is_full else {}
            if len(young) >= GENERATION:
                self._dropped.extend((event, each) for each in self.old.values() if (event := each.mark()))
                self.old = young
                for name in young:
                    del self[name]
                if self.front is not None:
                    self.front.clear()  # what is used again becomes young
            self[key] = launch
            while self._dropped and self._dropped[0][0].query():
                self._dropped.popleft()

    def clear(self) -> None:
        """Drop all; the memory stays."""
        super().clear()
        self.old.clear()
        if self.front is not None:
            self.front.clear()


class Binder:
    """The engine of `ctx.ccl` and `ctx.ops` in one context.

    Collective: every rank makes it, of the parts that `iris_core.open_context` has opened, while the context is opened:
    no group has anything of the system area yet.
    """

    def __init__(self, context: Context, opened: Any, providers: Any) -> None:
        heap: SymmetricHeap = opened.heap
        self._opened = opened
        world: World = opened.world
        self.context, self.heap, self._world = weakref.ref(context), heap, world
        self.name = f"binder {id(self)}"  # for compiled code
        BINDERS[self.name] = self
        self._reports: KernelReports = opened.reports
        self._barriers: DeviceBarriers = opened.device_barriers
        self.providers = providers
        self.rank, self.target = world.rank, context.target
        own = heap.heap_bases[world.rank]
        on_cpu = self.target.type is DeviceType.CPU
        self.gpu: int | None = None if on_cpu else self.target.index
        make = getattr(opened.backend, "call_cache", lambda *_, **__: None)
        caches = (make(own, own + heap.nbytes, skips_float32) for skips_float32 in (False, False, *[not on_cpu] * 2))
        self.bound, self.bound_anywhere, self.fused, self.fused_anywhere = self.launches = [*map(Launches, caches)]
        self.fused_anywhere.scratch = self.fused.scratch
        self.copies: dict[Any, torch.Tensor | None] = {}  # of `Anywhere`
        self.held: dict[int, Bound] = {}  # those of `ctx.ops` that graphs know
        self.workspaces: weakref.WeakSet[Any] = weakref.WeakSet()  # of callers of `ctx.ops`
        limit = context.settings.ccl_workspace
        usual = 32 << 20 if on_cpu else 256 << 20
        self._limit_nbytes = usual if limit is None else int(limit)
        self.members = Members(world)
        self._spaces = {world.name: self.members}
        self._binding = threading.RLock()
        self._local = threading.local()  # the space in which a thread prepares
        self._orders: dict[tuple[Any, ...], Order] = {}
        self._choosers: dict[bool, choice.Chooser] = {}
        mode = context.settings.tune or ("off" if on_cpu else "first")
        parts = self.members, self._serve_by, self._algorithms, self.order, heap
        self._first = None if mode == "off" else FirstCalls(mode, *parts)
        self._closed = ""  # or why
        processors = min(each for (each,) in world.all_gather_ints([1 if on_cpu else context.get_cu_count()]))
        nodes = {rank: node for node, ranks in enumerate(world.nodes) for rank in ranks} if world.spans_nodes else {}
        where = (own, own + heap.nbytes), processors, tuple(nodes[rank] for rank in sorted(nodes))
        self.here = Here(self.rank, world.world_size, self.target, *where, multicast=heap.multicast_base != 0)
        area = heap.system_area
        sizes = control_nbytes(world.world_size, area.nbytes), area.nbytes // 8
        self._reserved = tuple(area.region(area.reserve_at_opening(nbytes), nbytes) for nbytes in sizes)
        providers.open_messages(world)

    # -- the slow path ------------------------------------------------------------------------------------------------
    def bind(self, call: Call, key: Any, holder: Any = None, here: Here | None = None) -> Bound:
        """Return the bound launch of a call, and keep it under its key, if it can have one.

        Collective: every member of the group calls it with its first call of a kind; if one refuses then, all do.
        `holder` returns the `Launches` that keep it, by default the context's; `here` may be without a heap.  Threads
        that come at the same time take turns, and the later ones find what the first one has bound.
        """
        members, here = self.members_of(call.group), here or self.here
        request: Any = None
        with self._binding:
            try:
                known = self.bound if holder is None else holder()
                if key is not None and (made := known.get(key)) is not None:
                    return made  # type: ignore[no-any-return]
                request = call.describe(here, members)
                call.check(request, here)
                bound: Any = None if key is None else known.old.pop(key, None)
                shared, has_nothing = shared_facts(request), bound is None and is_empty(request)
                if has_nothing and not isinstance(request, OperationRequest):  # a config may name what exists
                    shared["algorithm"] = self._algorithms(request).choose(request, call.config).name
                is_first = bound is None and not has_nothing
                if is_first and self.gpu is not None and torch.cuda.is_current_stream_capturing():
                    raise UnsupportedError(
                        f"{call.op}: the first call of its kind cannot be captured into a graph, because it prepares "
                        "memory and compiles; call it once before the capture, on every rank of the group, with "
                        "tensors of the same shapes and kind"
                    )
            except Exception as error:
                if call.op in POINT_TO_POINT:
                    raise
                self.refuse(call.op, error, members, request)
            if has_nothing:
                self.members.agree(members, shared)
                about: dict[str, Any] = dict.fromkeys(("workspace", "request", "plan"))
                does = {"mark": lambda: None, "run": lambda *_: None, "run_async": lambda *_: Begun()}
                bound = SimpleNamespace(droppable=True, algorithm="", **about, **does)
            elif bound is None:
                if self._first is not None:
                    bound = self._first.serve(request, call, shared, known.scratch)
                bound = bound or self.serve(request, call.config, scratch=known.scratch)
            if key is not None:
                known.keep(key, bound)
            return bound  # type: ignore[no-any-return]

    def refuse(self, op: str, error: Exception, group: Group, request: Any = None) -> NoReturn:
        """Raise an error on all members that compare such a call; see `Members.refuse`."""
        shared: dict[str, str] = {}
        with contextlib.suppress(Exception):  # whatever else is wrong with the call, `error` says what is
            shared = shared_facts(request)
        self.members.refuse(self.members_of(group), op, shared, error)

    def serve(
        self, request: Request, config: LaunchConfig | None, within: Team | None = None, scratch: Scratch | None = None
    ) -> Bound:
        """Choose an algorithm for a request, agree on it and on its config, and prepare it: on all members or on none.

        Collective: every member calls it with the same request, and no other rank; as a part of another preparation,
        `within` the team that prepares.  An algorithm that the config names is not replaced by another one.
        """
        members, op = request.members, request.op
        agreed, whole = self._space(members, within), within
        if within is not None and within.members != members:
            within = None  # who is in no part of this kind has come, too: see `Host.collective`
        shared, chooser = shared_facts(request), self._algorithms(request)
        left_out, settled = agreed.earlier(request, shared, config)
        if op in POINT_TO_POINT:  # the others take no part, and these two know nothing of each other
            algorithm, wish = chooser.of(chooser.choose(request, config, left_out, settled), request)
            team, order = self.team(members), self.order((op, wish.options["peer"]))
            plan = self._prepare(algorithm, wish, team, scratch, False, None)
            return Bound(algorithm, plan, order, team, self.context, wish)
        kind, layout = (members, *shared.values()), layout_of(request)
        is_named = config is not None and config.named(op)[0] is not None
        is_new_part = whole is not None and settled is None and not is_named and len(members) > 1
        while True:
            try:
                chosen = chooser.choose(request, config, left_out, settled)
            except Exception as error:  # noqa: BLE001 - of a plugin, of any kind; raised again, on all members
                agreed.refuse(members, op, shared, error, within)
            if is_new_part:  # one of them may have measured such calls in another group
                first = choice.Choice(*agreed.gather(members, shared, chosen, within)[0])
                chosen = chooser.choose(request, config, left_out, first)
            algorithm, wish = chooser.of(chosen, request)
            facts = {**shared, "algorithm": algorithm.name, "config": config_text(wish.options["config"])}
            number, is_new = agreed.number(members, facts, within, layout, agreed.served_by.get(kind, ""))
            team, wish = self._team(members, agreed), replace(wish, options={**wish.options, "kind": number})
            make = partial(self._prepare, algorithm, wish, team, scratch, is_new, whole)
            try:
                plan = prepare_alike(team, f"{algorithm.name!r} for {op}", make) if is_new else make()
                break
            except UnsupportedError as error:  # memory is exhausted
                if is_named or chooser.is_fixed(request) or not (is_new or team.size == 1):
                    raise
                left_out[algorithm.name] = reason = str(error).partition("\n")[0]
                team.warn_once(f"{op} does without algorithm {algorithm.name!r}", reason)
        if is_new:
            agreed.add(members, facts, number, shared, {"operation": op})
            agreed.served_by[kind] = f"{algorithm.name!r} with {layout}"
        bound = Bound(algorithm, plan, self.order(members), team, self.context, wish)
        if chosen.in_graphs is not None and whole is None and self.gpu is not None:
            try:
                bound.let_capture(self._serve_by(chosen.in_graphs, request, config, scratch))
            except UnsupportedError:  # on all members, of which one may bind such a call again: memory is exhausted
                chosen = chosen._replace(in_graphs=None)
                agreed.forget(request, shared, config)
        if not is_named:
            agreed.remember(request, shared, config, chosen)
        return bound

    def _prepare(
        self, algorithm: Any, request: Request, team: Team, scratch: Scratch | None, together: bool, whole: Team | None
    ) -> Any:
        """Return an algorithm's plan; made `together` by all members, as a part of an operation of the team `whole`."""
        host: Any = self.open()
        if isinstance(request, OperationRequest) or getattr(algorithm, "composes", False):
            memory = self.fused.scratch if scratch is None else scratch
            host = Host(self.serve, team, memory, self.here.processors, together, (whole or team).world)
        before, self._local.space = getattr(self._local, "space", self.members), self._spaces[team.world.name]
        try:
            return algorithm.prepare(request, host)
        finally:
            self._local.space = before

    def _space(self, members: tuple[int, ...], within: Team | None) -> Members:
        """Return the space of a call of some ranks, which is a part of a call of the team `within`."""
        if within is None:
            return self.members
        name = within.world.name
        if within.members != members:
            name += f"/{'-'.join(map(str, within.members))}"
        if name not in self._spaces:
            self._spaces[name] = Members(self._world.apart(name))
        return self._spaces[name]

    def _serve_by(
        self, launch: choice.Launch, request: Request, config: LaunchConfig | None, scratch: Scratch | None
    ) -> Bound:
        """Return the bound launch of a request by a named algorithm, with fields of its config; see `serve`."""
        name, given = launch
        own: Any = config or (FusedConfig() if isinstance(request, FusedRequest) else Config())
        return self.serve(choice.with_config(request, given), replace(own, algorithm=name), scratch=scratch)

    def explain(self, call: Call) -> Explanation:
        """Explain which algorithm would serve a call."""
        request: Any = call.describe(self.here, self.members_of(call.group))
        call.check(request, self.here)
        earlier = self.members.earlier(request, shared_facts(request), call.config)
        return self._algorithms(request).explain(request, call.config, *earlier)

    def barrier(self, group: Group, async_op: bool) -> Work | None:
        """Launch a barrier on the device, ordered with the group's collectives.

        Between nodes it is a sum of nothing, whose result no member has before all have begun.
        """
        members = self.members_of(group)
        if self._world.subworld(members).spans_nodes:
            key, word = ("barrier", members), torch.zeros(1, dtype=torch.int32, device=self.target.torch_device)
            bound = self.bound.get(key) or self.bind(CollectiveCall("all_reduce", (word, word), members, None), key)
            return bound.run_async(word, word) if async_op else bound.run(word, word)
        self._reports.watch()
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new()
        order = self.order(members)
        place = self._barriers.bind(group, "release")  # not in a thread: the first one is an exchange of the hosts
        try:
            work = order.run_async("barrier", place.launch, None) if async_op else order.run(place.launch, None)
        except BaseException:
            place.drop()
            raise
        if isinstance(work, HostWork):
            work.future.add_done_callback(lambda _: place.drop())  # also where it was not launched
        return work

    def reset(self, group: Group) -> None:
        """Reset a team to its initial state."""
        self.open()
        self.heap.streams.synchronize()
        team = self.team(self._world.members_of(group))
        team.reset(partial(self._barriers.reset, team.members))
        if parts := self._spaces.get(f"/{'-'.join(map(str, team.members))}"):
            for part in parts.teams.values():
                part.reset(lambda: None)

    def forget(self, why: str) -> None:
        """Refuse all calls from now on; in a forked process, whose parent goes on, nothing else is done."""
        self._closed = why
        self.gpu = None  # CUDA refuses every question there
        for known in self.launches:
            known.clear()
            known.front = None  # which a call that is under way may still fill

    def open(self) -> Context:
        """Return the context; HeapClosedError if it is closed."""
        context = self.context()
        if self._closed or context is None:
            raise HeapClosedError(self._closed or CLOSED)
        return context

    def members_of(self, group: Group) -> tuple[int, ...]:
        """Return the world ranks of a group's members, in its order; all for None."""
        self.open()
        return self._world.members_of(group)

    # -- what there is ------------------------------------------------------------------------------------------------
    def team(self, members: tuple[int, ...]) -> Team:
        """Return the team of some ranks.  Collective, the first time: every member calls it, and no other rank.

        Raises:
            RankMismatchError: the members name the group in different orders.
        """
        space = getattr(self._local, "space", self.members)
        is_group = self.rank in members and len(set(members)) == len(members) > 1
        # of all ranks, nothing has to be made together
        if is_group and members not in space.teams and members != tuple(range(self._world.world_size)):
            space.agree(members, {"operation": "making the team of a group"})
        return self._team(members, space)

    def _team(self, members: tuple[int, ...], space: Members) -> Team:
        """Return the team of some ranks, which have agreed on the members and their order."""
        team = space.teams.get(members)
        if team is None:
            world, words = space.world.subworld(members), self.open().get_device_context()
            team = Team(members, world, words, self._opened, self._limit_nbytes, self._reserved)
            space.teams[members] = team
        return team

    def order(self, members: tuple[Any, ...]) -> Order:
        """Return the order of calls of a team, or of messages in one direction between two ranks."""
        if members not in self._orders:
            host, gpu, keep = self.heap.streams, self.target.index, self._keep
            new: Order = HostStream(host, keep) if isinstance(host, HostStreams) else DeviceOrder(gpu, keep)
            # between nodes, teams of the same ranks share a process group of torch
            is_shared = members[0] not in POINT_TO_POINT and self._world.subworld(members).spans_nodes
            self._orders[members] = self._orders.setdefault(tuple(sorted(members)) if is_shared else members, new)
        return self._orders[members]

    def _keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being reused before a stream is done with it."""
        try:
            if self.heap.is_symmetric(tensor):
                self.heap.record_stream(tensor, stream)
                return
        except HeapError:
            pass  # memory of the heap that torch's own allocator manages
        if tensor.is_cuda:  # on the host, the call holds its tensors
            tensor.record_stream(stream)

    def _algorithms(self, request: Request) -> choice.Chooser:
        """Return the algorithms of `ctx.ccl`, or of `ctx.ops`, with their tables."""
        is_fused = isinstance(request, OperationRequest)
        if is_fused not in self._choosers:
            device = "cpu" if self.gpu is None else torch.cuda.get_device_name(self.gpu)
            settings, (found, unusable) = self.open().settings, self.providers.found(is_fused)
            cache = Path(settings.cache_dir) / ("ops" if is_fused else "ccl")
            tables = choice.Tables(cache, self.providers.tables(is_fused), device)
            self._choosers[is_fused] = choice.Chooser(found, tables, unusable, deterministic=settings.deterministic)
        return self._choosers[is_fused]

    def explain_report(self, report: Report) -> Meaning | None:
        """Explain a report, if it is about the memory of a team in which this rank is; else return None."""
        spaces = list(self._spaces.values())  # a thread asks, too
        teams = [(space, team) for space in spaces for team in list(space.teams.values())]
        found = (team.explain_report(report, partial(space.describe, team.members)) for space, team in teams)
        return next((meaning for meaning in found if meaning is not None), None)

    def close(self) -> None:
        """End the threads, and drop plans and the heap's memory."""
        self.held.clear()
        for workspace in list(self.workspaces):
            if workspace.owner is self:
                workspace.reset()
        self.forget(CLOSED)
        self.fused.scratch.clear()
        self.copies.clear()
        self._reserved = ()
        for order in self._orders.values():
            order.close()
        self._spaces = {"": self.members}
        self.members.teams.clear()
