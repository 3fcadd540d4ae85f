"""From a call to something that can be launched again and again: check, team, choice, agreement, plan.

This is the slow path of `ctx.ccl`.  It may exchange between the members' hosts, so nothing in it may depend on what
differs between them.
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from iris_core.ccl.reduce_op import reduce_op
from iris_core.dispatch import requests
from iris_core.dispatch.choice import Chooser
from iris_core.dispatch.launches import Launches
from iris_core.dispatch.members import Members
from iris_core.dispatch.providers import find_algorithms
from iris_core.dispatch.requests import Call
from iris_core.dispatch.stream_order import DeviceOrder, HostOrder
from iris_core.dispatch.tables import Tables
from iris_core.dispatch.team import Memory, Region, Team, control_nbytes, mail_nbytes
from iris_core.dispatch.work import DoneWork, HostWork
from iris_core.errors import ArgumentError, HeapClosedError, HeapError, UnsupportedError
from iris_core.heap.streams import HostStreams
from iris_core.registry.observers import is_watched, notify
from iris_core.types import DeviceType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from iris_core.ccl.config import Config
    from iris_core.device.barrier import DeviceBarriers
    from iris_core.device.reports import KernelReports, Meaning, Report
    from iris_core.dispatch.choice import Explanation
    from iris_core.heap.heap import SymmetricHeap
    from iris_core.heap.regions import SystemArea
    from iris_core.protocols import Collective, Context, FusedOperation, SupportsCollectives, Work
    from iris_core.registry import PluginRecord
    from iris_core.types import Capability, CollectiveRequest, ContextSpec, FusedRequest
    from iris_core.world import World


_WORKSPACE = {True: 32 << 20, False: 256 << 20}
"""Bound of workspaces where IRIS_CCL_WORKSPACE says nothing, by whether ranks compute on CPUs."""

_CLOSED = "this Iris context is closed; open a new one"


class Question(NamedTuple):
    """A call as `Collectives` passes it on, not looked at; what `first` and `second` are depends on `op`."""

    op: str
    out: Any
    inp: Any
    group: dist.ProcessGroup | Sequence[int] | None
    config: Config | None
    first: Any
    second: Any


class Bound:
    """A call that can be launched: algorithm, plan, and where it runs.

    Args:
        algorithm: serves it.
        plan: what the algorithm has prepared.
        order: of the team.
        team: the members.
        context: for observers.
        request: what the algorithm was asked for.
    """

    def __init__(
        self,
        algorithm: Collective | FusedOperation,
        plan: Any,
        order: HostOrder | DeviceOrder,
        team: Team,
        context: weakref.ref[Context],
        request: CollectiveRequest | FusedRequest,
    ) -> None:
        self._algorithm = algorithm
        self._reports = team.reports
        self._launch: Callable[..., Any] = algorithm.launch
        self._team = team
        self._memory: torch.Tensor | None = getattr(plan, "memory", None)
        if self._memory is not None and self._memory.device.type != "cpu":
            self._launch = self._launch_with_memory
        self.plan = plan
        self._order = order
        self._run = partial(order.run, self._launch, plan)
        self._context = context
        self._request: Any = request

    @property
    def op(self) -> str:
        """The operation."""
        return str(self._request.op)

    @property
    def description(self) -> str:
        """The operation, what it works on, and the algorithm."""
        request = self._request
        shape = (request.m, request.n, request.k) if hasattr(request, "m") else request.shape
        return f"{self.op} {' x '.join(map(str, (*shape, request.dtype)))} ({self._algorithm.name})"

    def run(self, *tensors: Any) -> None:
        """Launch on the current stream.  Tensors are those that the algorithm's `launch` takes."""
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new(self._team.control.offset_bytes)
        if is_watched("iris_collective"):
            self._tell()
        self._team.latest = self
        try:
            work = self._run(*tensors)
            if work is not None:
                work.wait()
        except BaseException as error:
            self._failed(error)
            raise

    def run_async(self, *tensors: Any) -> Work:
        """Launch beside the current stream, and return a handle."""
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new(self._team.control.offset_bytes)
        if is_watched("iris_collective"):
            self._tell()
        self._team.latest = self
        return self._order.run_async(self._algorithm.op, self._launch_async, self.plan, *tensors)

    def _launch_async(self, plan: Any, *tensors: Any) -> Any:
        """Launch, in whatever thread: the caller may never ask what has become of it."""
        try:
            return self._launch(plan, *tensors)
        except BaseException as error:
            self._failed(error, is_certain=True)
            raise

    def _failed(self, error: BaseException, *, is_certain: bool = False) -> None:
        if self.op not in requests.POINT_TO_POINT:  # a message concerns none but two of the team
            self._team.failed(error, is_certain=is_certain)

    def launch(self, *tensors: Any) -> None:
        """Launch on the current stream, as a part of a call whose turn in the team's order it is already."""
        work = self._launch(self.plan, *tensors)
        if work is not None:
            work.wait()

    @property
    def droppable(self) -> bool:
        """Whether it can be made again: graphs that have captured its launch need nothing of it."""
        return getattr(self._algorithm, "drops_plans", False)

    def mark(self) -> Any:
        """Return an event that has happened when the team's launches so far are done; None if there is none."""
        return self._order.mark()

    def _launch_with_memory(self, plan: Any, *tensors: Any) -> Any:
        """Launch; a graph that captures it will read the plan's memory for ever."""
        if torch.cuda.is_current_stream_capturing():
            assert self._memory is not None
            self._team.hold(self._memory)
        return self._algorithm.launch(plan, *tensors)

    def _tell(self) -> None:
        algorithm = self._algorithm
        notify(
            "iris_collective",
            context=self._context(),
            op=algorithm.op,
            algorithm=algorithm.name,
            nbytes=self._request.nbytes,
        )


class Nothing:
    """A call that moves no element: its tensors are empty on all members."""

    droppable = True

    def mark(self) -> None:
        """Nothing is under way."""

    def run(self, *tensors: Any) -> None:
        """Return at once."""

    def run_async(self, *tensors: Any) -> Work:
        """Return a handle that is done."""
        return DoneWork()


class Binder:
    """What `ctx.ccl` knows of the context.

    Collective: every rank makes it while the context is opened.

    Args:
        context: the context.
        heap: open.
        area: the heap's system area, of which no group has anything yet.
        world: the ranks of the heap.
        spec: what the context tensor says.
        reports: what kernels have reported.
        create: makes the algorithm of a plugin for this rank.
        provides: what the allocator's memory can do.
        barriers: of the devices of groups.
    """

    def __init__(
        self,
        context: Context,
        heap: SymmetricHeap,
        area: SystemArea,
        world: World,
        spec: ContextSpec,
        reports: KernelReports,
        create: Callable[[Context, PluginRecord], Collective],
        provides: frozenset[Capability],
        barriers: DeviceBarriers,
    ) -> None:
        self._context = weakref.ref(context)
        self._heap = heap
        self._world = world
        self._area = area
        self._spec = spec
        self._reports = reports
        self._create = create
        self._provides = provides
        self._barriers = barriers
        self.rank = world.rank
        own = heap.heap_bases[world.rank]
        self.own_heap = own, own + heap.nbytes
        self.gpu = None if context.target.type is DeviceType.CPU else context.target.index
        """torch's index of this rank's GPU; None on the CPU."""
        self.bound: Launches[Bound | Nothing] = Launches()
        self._dropped: deque[tuple[Any, Bound | Nothing]] = deque()
        given = context.settings.ccl_workspace
        limit = _WORKSPACE[context.target.type is DeviceType.CPU] if given is None else int(given)
        self._memory = Memory(heap, area, limit)
        self._teams: dict[tuple[int, ...], Team] = {}
        self._orders: dict[tuple[Any, ...], HostOrder | DeviceOrder] = {}
        self.members = Members(world, self._team, self._refused)
        self._chooser: Chooser | None = None
        self._found: tuple[list[Collective], list[tuple[str, str]]] | None = None
        self._closed = ""  # or why
        own_processors = context.get_cu_count() if context.target.type is not DeviceType.CPU else 1
        self.processors = min(least for (least,) in world.all_gather_ints([own_processors]))
        """Multiprocessors (SMs, CUs) of the smallest device of all ranks: grids of all members are the same."""
        self._control: Region | None = self._reserve(control_nbytes(world.world_size, area.nbytes))
        self._mail: Region | None = self._reserve(mail_nbytes(area.nbytes))

    def _reserve(self, nbytes: int) -> Region:
        offset = self._area.reserve_at_opening(nbytes)
        return Region(self._heap.usable_nbytes + offset, self._area.tensor(offset, nbytes))

    # -- the slow path ------------------------------------------------------------------------------------------------
    def bind(self, question: Question, key: Any) -> Bound | Nothing:
        """Return what serves a call, and keep it under its key, if it can have one.

        Collective: every member of the group comes here with its first call of a kind.  What one of them refuses then,
        all refuse.
        """
        op, device = question.op, torch.device(self.open().device)
        members = self._world.members_of(question.group)
        call: Any = None
        try:
            call = self._call(question, members)
            requests.check(call, device)
            bound = None if key is None else self.bound.recall(key)
            if bound is None:
                refuse_capture(op)
        except Exception as error:
            if op in requests.POINT_TO_POINT:
                raise
            self.members.refuse(members, op, lambda: requests.shared_facts(self._request(call)), error)
        if bound is None:
            bound = self._bind(call)
        if key is not None:
            self.drop(self.bound.keep(key, bound))
        return bound

    def drop(self, dropped: Sequence[Bound | Nothing]) -> None:
        """Let go of launches when the device is done with their memory."""
        self._dropped.extend((event, each) for each in dropped if (event := each.mark()))
        while self._dropped and self._dropped[0][0].query():
            self._dropped.popleft()

    def _bind(self, call: Call) -> Bound | Nothing:
        request, config = self._request(call), call.config
        if not call.is_empty:
            return self.serve(request, config, None if call.peer is None else (call.op, call.peer))
        shared = requests.shared_facts(request)
        try:  # it moves nothing, but is one on all members, and asks for nothing that there is not
            algorithm, _, _ = self._algorithms().choose(request, config)
        except Exception as error:  # noqa: BLE001 - of a plugin, of any kind; raised again, on all members
            self.members.refuse(request.members, call.op, lambda: shared, error)
        self.members.agree(request.members, {**shared, "algorithm": algorithm.name})
        return Nothing()

    def serve(
        self,
        request: CollectiveRequest,
        config: Config | None = None,
        message: tuple[Any, ...] | None = None,
        within: Team | None = None,
    ) -> Bound:
        """Return what serves a request.

        Collective: every member comes here with the same, and nobody else.

        Args:
            request: what is to be done.
            config: how.
            message: operation and peer, where it goes between two ranks.
            within: the team, where this is a part of what its members prepare.
        """
        context = self.open()
        members = request.members
        if message is not None:  # between two ranks: the others take no part, and these two know nothing of each other
            algorithm, _, request = self._algorithms().choose(request, config)
            team = self.team(members)
            plan = algorithm.prepare(request, context)
            return Bound(algorithm, plan, self.order(message), team, self._context, request)
        settled = self.members.settle(
            members,
            requests.shared_facts(request),
            partial(self._algorithms().choose, request, config),
            lambda algorithm, wish, team: algorithm.prepare(wish, context),
            config,
            within,
        )
        algorithm, wish, plan, team = settled
        return Bound(algorithm, plan, self.order(members), team, self._context, wish)

    def explain(self, question: Question) -> Explanation:
        """Say what would serve a call."""
        device = torch.device(self.open().device)
        call = self._call(question, self._world.members_of(question.group))
        requests.check(call, device)
        request = self._request(call)
        left_out = self.members.left_out(request.members, requests.shared_facts(request))
        return self._algorithms().explain(request, call.config, left_out)

    def barrier(self, group: dist.ProcessGroup | Sequence[int] | None, async_op: bool) -> Work | None:
        """Launch a barrier on the device, ordered with the group's collectives."""
        self.open()
        self._reports.watch()
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new()
        place = self._barriers.bind(group, "release")  # not in a thread: the first one is an exchange of the hosts
        try:
            order = self.order(self._world.members_of(group))
            if not async_op:
                order.run(place.launch, None)
                return None
            work = order.run_async("barrier", place.launch, None)
        except BaseException:
            place.drop()
            raise
        if isinstance(work, HostWork):
            work.when_done(place.drop)  # it may have failed with a call before it, without a launch
        return work

    def reset(self, group: dist.ProcessGroup | Sequence[int] | None) -> None:
        """Put a team back to its beginning."""
        self.open()
        self._heap.streams.synchronize()
        team = self.team(self._world.members_of(group))
        team.reset(partial(self._barriers.reset, team.members))

    def forget(self, why: str) -> None:
        """Serve no call any more; in a process that was forked off, whose parent goes on, no more than this."""
        self._closed = why
        self.gpu = None  # CUDA refuses every question there
        self.bound.clear()

    def open(self) -> Context:
        """Return the context; HeapClosedError if it is closed."""
        context = self._context()
        if self._closed or context is None:
            raise HeapClosedError(self._closed or _CLOSED)
        return context

    def _call(self, question: Question, members: tuple[int, ...]) -> Call:
        """Make sense of the arguments."""
        op, out, inp, _, config, first, second = question
        call = {"op": op, "out": out, "inp": inp, "members": members, "config": config}
        call["rank"] = members.index(self.rank)
        if config is not None and not hasattr(config, "named"):
            raise TypeError(f"{op}: config must be an iris_core.ccl.Config, not {type(config).__name__}")
        if op in requests.POINT_TO_POINT:  # between two ranks of the world, whatever group they are in
            if first == self.rank:
                raise ArgumentError(f"{op}: rank {first} is this rank; a message goes to another one")
            call["peer"] = members[_index(op, members, first)]
            call["members"], call["rank"] = tuple(range(self._world.world_size)), self.rank
        if op in requests.REDUCING:
            call["reduction"] = reduce_op(first)
        if op in ("broadcast", "gather", "scatter"):
            call["root"] = _index(op, members, first)
        if op == "reduce":
            call["root"] = _index(op, members, second)
        if op == "reduce_scatter" or op == "all_to_all":
            call["layout"] = second
        if op == "all_to_all" and first is not None:
            out_splits, in_splits = first
            call["out_splits"] = requests.split_sizes(out_splits, out, len(members), in_splits)
            call["in_splits"] = requests.split_sizes(in_splits, inp, len(members), out_splits)
        return Call(**call)

    def _request(self, call: Call) -> CollectiveRequest:
        return requests.request_of(call, self.open().target, self._heap.is_symmetric)

    def members_of(self, group: dist.ProcessGroup | Sequence[int] | None) -> tuple[int, ...]:
        """Return the world ranks of a group's members, in its order; all for None."""
        self.open()
        return self._world.members_of(group)

    # -- what there is ------------------------------------------------------------------------------------------------
    def team(self, members: tuple[int, ...]) -> Team:
        """Return the team of some ranks.  Collective, the first time: every member calls it, and nobody else.

        Raises:
            RankMismatchError: the members name the group in different orders.
        """
        if members not in self._teams and self.rank in members and len(set(members)) == len(members) > 1:
            everyone = members == tuple(range(self._world.world_size))
            if not everyone:  # of all ranks, nothing has to be made together
                self.members.agree(members, {"operation": "making the team of a group"})
        return self._team(members)

    def _team(self, members: tuple[int, ...]) -> Team:
        """The team of some ranks, who are sure that all have the same members in mind."""
        team = self._teams.get(members)
        if team is None:
            context = self.open()
            everyone = members == tuple(range(self._world.world_size))
            team = self._teams[members] = Team(
                members,
                self._world.subworld(members),
                self.rank,
                self._memory,
                self._spec,
                context.get_device_context(),
                self._reports,
                control=self._control if everyone else None,
                mail=self._mail if everyone else None,
            )
        return team

    def _refused(self, members: tuple[int, ...], error: Exception) -> None:
        if (team := self._teams.get(members)) is not None:
            team.failed(error)

    def order(self, members: tuple[Any, ...]) -> HostOrder | DeviceOrder:
        """The order of calls of a team, or of messages in one direction between two ranks."""
        order = self._orders.get(members)
        if order is None:
            target, streams = self.open().target, self._heap.streams
            order = (
                HostOrder(streams, self._keep)
                if isinstance(streams, HostStreams)
                else DeviceOrder(target.index, self._keep)
            )
            self._orders[members] = order
        return order

    def _keep(self, tensor: torch.Tensor, stream: Any) -> None:
        """Let a tensor's memory not be used again before a stream is done with it."""
        try:
            if self._heap.is_symmetric(tensor):
                self._heap.record_stream(tensor, stream)
                return
        except HeapError:
            pass  # memory of the heap that torch's own allocator manages
        if tensor.is_cuda:  # on the host, the call holds its tensors
            tensor.record_stream(stream)

    def _algorithms(self) -> Chooser:
        if self._chooser is None:
            context = self.open()
            algorithms, unusable = self.found()
            folders = [Path(context.settings.cache_dir) / "ccl"]
            if hasattr(context.backend, "collectives"):
                folders += cast("SupportsCollectives", context.backend).tables()
            self._chooser = Chooser(algorithms, Tables(folders, self.device_name), unusable)
        return self._chooser

    def found(self) -> tuple[list[Collective], list[tuple[str, str]]]:
        """Return all algorithms that there are, and plugins that bring none with the reason; see `find_algorithms`."""
        if self._found is None:
            context = self.open()
            self._found = find_algorithms(context, partial(self._create, context), self._provides)
        return self._found

    def add(self, algorithms: Sequence[Collective]) -> None:
        """Let more algorithms serve calls that are not planned yet.  Every rank adds the same, before the same call."""
        found, unusable = self.found()
        self._found, self._chooser = ([*found, *algorithms], unusable), None

    @property
    def device_name(self) -> str:
        """Name of this rank's device, as measured tables have it."""
        target = self.open().target
        return "cpu" if target.type is DeviceType.CPU else torch.cuda.get_device_name(target.index)

    def explain_report(self, report: Report) -> Meaning | None:
        """Say what a report means, if it is about the memory of a team in which this rank is; else None."""
        teams = list(self._teams.values())  # a thread asks, too
        found = (team.explain_report(report, partial(self.members.describe, team.members)) for team in teams)
        return next((meaning for meaning in found if meaning is not None), None)

    def close(self) -> None:
        """End the threads, and let go of the heap's memory."""
        self.forget(_CLOSED)
        self._control = self._mail = None
        for order in self._orders.values():
            order.close()
        self._teams.clear()


def _index(op: str, members: tuple[int, ...], rank: Any) -> int:
    """A rank's index in the group."""
    if isinstance(rank, bool) or not hasattr(rank, "__index__"):
        raise TypeError(f"{op}: a root is a rank, not {rank!r}")
    rank = operator.index(rank)
    if rank not in members:
        raise ArgumentError(f"{op}: rank {rank} is not in the group of ranks {', '.join(map(str, members))}")
    return members.index(rank)


def refuse_capture(op: str) -> None:
    """Raise UnsupportedError while a graph is being captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{op}: the first call of its kind cannot be captured into a graph, because it prepares memory "
            "and compiles; call it once before the capture, on every rank of the group, with tensors of the same "
            "shapes and kind"
        )
