"""From a call of `ctx.ccl` or `ctx.ops` to what can be launched again and again: request, agreement, choice, plan.

This is the slow path.  It may exchange between the members' hosts, so nothing in it may depend on what differs between
them.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from iris_core.device.launch_order import DeviceOrder, DoneWork, HostOrder, HostWork
from iris_core.dispatch import choice, products, requests
from iris_core.dispatch.config import Config, FusedConfig
from iris_core.dispatch.first_calls import FirstCalls
from iris_core.dispatch.host import Host, Scratch
from iris_core.dispatch.members import Members
from iris_core.dispatch.tables import Tables
from iris_core.dispatch.team import Memory, Region, Team, control_nbytes, mail_nbytes
from iris_core.errors import HeapClosedError, HeapError, UnsupportedError
from iris_core.heap.streams import HostStreams
from iris_core.registry.observers import is_watched, notify
from iris_core.types import DeviceType, FusedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

    from iris_core.device.barrier import DeviceBarriers
    from iris_core.device.reports import KernelReports, Meaning, Report
    from iris_core.dispatch.choice import Explanation, Request
    from iris_core.dispatch.config import LaunchConfig
    from iris_core.dispatch.requests import Here
    from iris_core.heap.heap import SymmetricHeap
    from iris_core.heap.regions import SystemArea
    from iris_core.protocols import Algorithm, Context, Work
    from iris_core.types import ContextSpec
    from iris_core.world import World

    Call = requests.CollectiveCall | products.FusedCall
    Group = dist.ProcessGroup | Sequence[int] | None


GENERATION = 512
"""Launches of a generation; there are two, so at least so many of the last kinds of calls are known."""

_WORKSPACE = {True: 32 << 20, False: 256 << 20}
"""Bound of workspaces where IRIS_CCL_WORKSPACE says nothing, by whether ranks compute on CPUs."""

_CLOSED = "this Iris context is closed; open a new one"


class Bound:
    """A call that can be launched: algorithm, plan, and where it runs.

    Attributes:
        plan: what the algorithm has prepared.
        request: what it was asked for.
        algorithm: its name.
        workspace: of `ctx.ops`: what a call returns.
        reach: likewise: bytes from the first to behind the last element of the output, A, B and the bias.
    """

    workspace: Any = None
    reach: tuple[int, ...] = ()

    def __init__(
        self,
        algorithm: Any,
        plan: Any,
        order: HostOrder | DeviceOrder,
        team: Team,
        context: weakref.ref[Context],
        request: Request,
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
        self.request = request
        self.algorithm: str = algorithm.name
        self._in_graphs: Bound | None = None

    @property
    def op(self) -> str:
        """The operation."""
        return self.request.op

    @property
    def description(self) -> str:
        """The operation, what it works on, and the algorithm."""
        request = self.request
        return f"{self.op} {' x '.join(map(str, (*request.shape, request.dtype)))} ({self.algorithm})"

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
            self.failed(error)
            raise

    def run_async(self, *tensors: Any) -> Work:
        """Launch beside the current stream, and return a handle."""
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new(self._team.control.offset_bytes)
        if is_watched("iris_collective"):
            self._tell()
        self._team.latest = self
        return self._order.run_async(self.op, self._launch_async, self.plan, *tensors)

    def let_capture(self, other: Bound) -> None:
        """Let another algorithm serve where a graph is captured: the device needs less time for it, the CPU more."""
        if isinstance(self._order, HostOrder):  # the CPU captures nothing, and cannot be asked
            return
        self._in_graphs, eagerly = other, self._launch

        def launch(plan: Any, *tensors: Any, **options: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                return other._launch(other.plan, *tensors, **options)
            return eagerly(plan, *tensors, **options)

        self._launch = launch
        self._run = partial(self._order.run, launch, self.plan)

    def try_run(self, *tensors: Any) -> None:
        """Launch on the current stream, in the team's order; a failure is the caller's to report."""
        work = self._run(*tensors)
        if work is not None:
            work.wait()

    def _launch_async(self, plan: Any, *tensors: Any) -> Any:
        """Launch, in whatever thread: the caller may never ask what has become of it."""
        try:
            return self._launch(plan, *tensors)
        except BaseException as error:
            self.failed(error, is_certain=True)
            raise

    def failed(self, error: BaseException, *, is_certain: bool = False) -> None:
        """Let the members know that a launch has failed on this host."""
        if self.op not in requests.POINT_TO_POINT:  # a message concerns none but two of the team
            self._team.failed(error, is_certain=is_certain)

    def forget_failures(self) -> None:
        """Drop what hosts of the team have reported.  Collective: every member calls it, after the last report."""
        self._team.reports.forget(self._team.members, self._team.control.offset_bytes)

    def launch(self, *tensors: Any) -> None:
        """Launch on the current stream, as a part of a call whose turn in the team's order it is already."""
        work = self._launch(self.plan, *tensors)
        if work is not None:
            work.wait()

    @property
    def droppable(self) -> bool:
        """Whether it can be made again: graphs that captured it need nothing of it, or what they need is held."""
        if self._in_graphs is not None and not self._in_graphs.droppable:
            return False
        return isinstance(self.request, FusedRequest) or getattr(self._algorithm, "drops_plans", False)

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
        which: dict[str, Any] = {"op": self.op, "algorithm": self.algorithm, "nbytes": self.request.nbytes}
        notify("iris_collective", context=self._context(), **which)


class Nothing:
    """A call that moves no element: its tensors are empty on all members."""

    droppable = True
    workspace: Any = None
    reach: tuple[int, ...] = ()
    algorithm = ""
    request = plan = None

    def mark(self) -> None:
        """Nothing is under way."""

    def run(self, *tensors: Any) -> None:
        """Return at once."""

    def run_async(self, *tensors: Any) -> Work:
        """Return a handle that is done."""
        return DoneWork()


class Launches(dict[Any, Any]):
    """Bound calls by key: an LRU cache, approximated by two generations, so that a hit is one lookup in a dict.

    When the young generation is full, it becomes the old one, and what that still held is dropped; an old entry that is
    used again becomes young.  What cannot be dropped stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._old: dict[Any, Any] = {}
        self._staying = 0
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """How many are known."""
        return len(self) + len(self._old)

    def recall(self, key: Any) -> Any:
        """Take one out of the old generation; None if it is not there.  `keep` makes it young."""
        return self._old.pop(key, None)

    def keep(self, key: Any, launch: Any) -> list[Any]:
        """Make one known; returns those that are not any more."""
        dropped: list[Any] = []
        with self._lock:  # of threads that call with different groups
            if len(self) - self._staying >= GENERATION:
                dropped = list(self._old.values())
                self._old = {key: each for key, each in self.items() if each.droppable}
                for name in self._old:
                    del self[name]
                self._staying = len(self)
            self[key] = launch
        return dropped

    def clear(self) -> None:
        """Let go of all."""
        super().clear()
        self._old.clear()
        self._staying = 0


class Binder:
    """What `ctx.ccl` and `ctx.ops` know of the context.

    Collective: every rank makes it while the context is opened; of the heap's system area no group has anything yet.

    Attributes:
        rank: this rank.
        target, gpu: its device, and torch's index of it; None on the CPU.
        own_heap: where the rank's heap begins and ends.
        bound, fused: launches of `ctx.ccl`, and of `ctx.ops`.
        processors: multiprocessors (SMs, CUs) of the smallest device of all ranks: grids of all members are the same.
        scratch: local memory of plans.
        closers: called when the context is closed.
    """

    def __init__(
        self,
        context: Context,
        heap: SymmetricHeap,
        area: SystemArea,
        world: World,
        spec: ContextSpec,
        reports: KernelReports,
        providers: Any,
        barriers: DeviceBarriers,
    ) -> None:
        self._context = weakref.ref(context)
        self._heap = heap
        self._world = world
        self._area = area
        self._reports = reports
        self._barriers = barriers
        self.rank, self.target = world.rank, context.target
        own = heap.heap_bases[world.rank]
        self.own_heap = own, own + heap.nbytes
        on_cpu = self.target.type is DeviceType.CPU
        self.gpu: int | None = None if on_cpu else self.target.index
        self.bound, self.fused = Launches(), Launches()
        self.closers: list[Callable[[], None]] = []
        self._dropped: deque[tuple[Any, Bound | Nothing]] = deque()
        given = context.settings.ccl_workspace
        self._memory = Memory(heap, area, _WORKSPACE[on_cpu] if given is None else int(given), spec, reports)
        self.scratch = Scratch()
        self._teams: dict[tuple[int, ...], Team] = {}
        self._orders: dict[tuple[Any, ...], HostOrder | DeviceOrder] = {}
        self.members = Members(world, self._team, self._refused)
        self.providers = providers
        self._choosers: dict[bool, choice.Chooser] = {}
        self._tune = context.settings.tune or ("off" if on_cpu else "first")
        self._closed = ""  # or why
        own_processors = 1 if on_cpu else context.get_cu_count()
        self.processors = min(least for (least,) in world.all_gather_ints([own_processors]))
        self._control: Region | None = self._reserve(control_nbytes(world.world_size, area.nbytes))
        self._mail: Region | None = self._reserve(mail_nbytes(area.nbytes))

    def _reserve(self, nbytes: int) -> Region:
        offset = self._area.reserve_at_opening(nbytes)
        return Region(self._heap.usable_nbytes + offset, self._area.tensor(offset, nbytes))

    # -- the slow path ------------------------------------------------------------------------------------------------
    def bind(
        self, call: Call, key: Any, holder: Callable[[], tuple[Launches, Scratch]] | None = None
    ) -> Bound | Nothing:
        """Return what serves a call, and keep it under its key, if it can have one.

        Collective: every member of the group comes here with its first call of a kind.  What one of them refuses then,
        all refuse.  `holder` returns who keeps the launch, and the local memory of its plan; by default the context.
        """
        members, here = self.members_of(call.group), self._here()
        request: Any = None
        try:
            request = call.describe(here, members)
            call.check(request, here)
            known, scratch = holder() if holder is not None else (self.bound, self.scratch)
            bound = None if key is None else known.recall(key)
            if bound is None and not _is_empty(request):
                refuse_capture(call.op)
        except Exception as error:
            if call.op in requests.POINT_TO_POINT:
                raise
            self.refuse(call.op, error, members, request)
        if bound is None and _is_empty(request):
            bound = self._bind_nothing(request, call.config)
        elif bound is None:
            if self._tune != "off":
                first = FirstCalls(
                    self._tune, self._world, self.members, self._serve_by, self._algorithms, self._memory
                )
                bound = first.serve(request, call, _facts(request), scratch)
            bound = bound or self.serve(request, call.config, scratch=scratch)
        if key is not None:
            self._dropped.extend((event, each) for each in known.keep(key, bound) if (event := each.mark()))
            while self._dropped and self._dropped[0][0].query():  # the device is done with their memory
                self._dropped.popleft()
        return bound

    def refuse(self, op: str, error: Exception, group: Group, request: Any = None) -> NoReturn:
        """Raise an error on all members that come to compare such a call; see `Members.refuse`."""
        self.members.refuse(self.members_of(group), op, lambda: _facts(request), error)

    def _bind_nothing(self, request: Request, config: LaunchConfig | None) -> Nothing:
        """Compare a call that moves nothing, but is one on all members, and asks for nothing that there is not."""
        shared = _facts(request)
        if not isinstance(request, FusedRequest):
            try:
                shared = {**shared, "algorithm": self._algorithms(request).choose(request, config).algorithm.name}
            except Exception as error:  # noqa: BLE001 - of a plugin, of any kind; raised again, on all members
                self.refuse(request.op, error, request.members, request)
        self.members.agree(request.members, shared)
        return Nothing()

    def serve(
        self,
        request: Request,
        config: LaunchConfig | None = None,
        within: Team | None = None,
        scratch: Scratch | None = None,
    ) -> Bound:
        """Return what serves a request.

        Collective: every member comes here with the same, and nobody else; where it is a part of what they prepare,
        `within` their team.
        """
        context, members, shared = self.open(), request.members, _facts(request)
        settled = self.members.settled(request, shared, config)
        choose = partial(self._algorithms(request).choose, request, config, settled=settled)
        if request.op in requests.POINT_TO_POINT:  # the others take no part, and these two know nothing of each other
            algorithm, _, wish, _ = choose()
            team, order = self.team(members), self._order((wish.op, wish.options["peer"]))
            return Bound(algorithm, algorithm.prepare(wish, context), order, team, self._context, wish)

        def prepare(algorithm: Algorithm[Any], wish: Request, team: Team) -> Any:
            if not isinstance(wish, FusedRequest):
                return algorithm.prepare(wish, context)
            return algorithm.prepare(wish, Host(self.serve, team, scratch or self.scratch, self.processors))

        algorithm, wish, plan, team, in_graphs = self.members.settle(members, shared, choose, prepare, config, within)
        bound = Bound(algorithm, plan, self._order(members), team, self._context, wish)
        if in_graphs is not None and within is None and self.gpu is not None:
            with contextlib.suppress(UnsupportedError):  # on all members: there is no room for it
                bound.let_capture(self._serve_by(in_graphs, request, config, scratch))
        return bound

    def _serve_by(
        self, launch: choice.Launch, request: Request, config: LaunchConfig | None, scratch: Scratch | None
    ) -> Bound:
        """Return what serves a request by an algorithm that is named, with fields of its config; see `serve`."""
        name, given = launch
        own: Any = config or (FusedConfig() if isinstance(request, FusedRequest) else Config())
        return self.serve(choice.with_config(request, given), replace(own, algorithm=name), scratch=scratch)

    def explain(self, call: Call) -> Explanation:
        """Say what would serve a call."""
        members, here = self.members_of(call.group), self._here()
        request: Any = call.describe(here, members)
        call.check(request, here)
        shared = _facts(request)
        left_out = self.members.left_out(request.members, shared)
        settled = self.members.settled(request, shared, call.config)
        return self._algorithms(request).explain(request, call.config, left_out, settled)

    def barrier(self, group: Group, async_op: bool) -> Work | None:
        """Launch a barrier on the device, ordered with the group's collectives."""
        self.open()
        self._reports.watch()
        if self._reports.alarm[0] != self._reports.heard:
            self._reports.raise_new()
        place = self._barriers.bind(group, "release")  # not in a thread: the first one is an exchange of the hosts
        try:
            order = self._order(self._world.members_of(group))
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

    def reset(self, group: Group) -> None:
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
        self.fused.clear()

    def open(self) -> Context:
        """Return the context; HeapClosedError if it is closed."""
        context = self._context()
        if self._closed or context is None:
            raise HeapClosedError(self._closed or _CLOSED)
        return context

    def members_of(self, group: Group) -> tuple[int, ...]:
        """Return the world ranks of a group's members, in its order; all for None."""
        self.open()
        return self._world.members_of(group)

    def _here(self) -> Here:
        return requests.Here(self.rank, self._world.world_size, self.target, self._heap.is_symmetric, self.processors)

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
            everyone = members == tuple(range(self._world.world_size))
            team = self._teams[members] = Team(
                members,
                self._world.subworld(members),
                self.rank,
                self._memory,
                self.open().get_device_context(),
                control=self._control if everyone else None,
                mail=self._mail if everyone else None,
            )
        return team

    def _refused(self, members: tuple[int, ...], error: Exception) -> None:
        if (team := self._teams.get(members)) is not None:
            team.failed(error)

    def _order(self, members: tuple[Any, ...]) -> HostOrder | DeviceOrder:
        """The order of calls of a team, or of messages in one direction between two ranks."""
        order = self._orders.get(members)
        if order is None:
            streams = self._heap.streams
            if isinstance(streams, HostStreams):
                order = HostOrder(streams, self._keep)
            else:
                order = DeviceOrder(self.target.index, self._keep)
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

    def _algorithms(self, request: Request) -> choice.Chooser:
        """The algorithms of `ctx.ccl`, or of `ctx.ops`, with their tables."""
        is_fused = isinstance(request, FusedRequest)
        if is_fused not in self._choosers:
            device = "cpu" if self.target.type is DeviceType.CPU else torch.cuda.get_device_name(self.target.index)
            cache = Path(self.open().settings.cache_dir) / ("ops" if is_fused else "ccl")
            tables = Tables(cache, self.providers.tables(is_fused), device)
            found, unusable = self.providers.found(is_fused)
            self._choosers[is_fused] = choice.Chooser(found, tables, unusable)
        return self._choosers[is_fused]

    def add(self, algorithms: Sequence[Any]) -> None:
        """Let more algorithms serve calls that are not planned yet.  Every rank adds the same, before the same call."""
        self.providers.add(algorithms)
        self._choosers.clear()

    def explain_report(self, report: Report) -> Meaning | None:
        """Say what a report means, if it is about the memory of a team in which this rank is; else None."""
        teams = list(self._teams.values())  # a thread asks, too
        found = (team.explain_report(report, partial(self.members.describe, team.members)) for team in teams)
        return next((meaning for meaning in found if meaning is not None), None)

    def close(self) -> None:
        """End the threads, and let go of plans and of the heap's memory."""
        for closer in self.closers:
            closer()
        self.forget(_CLOSED)
        self.scratch.clear()
        self._control = self._mail = None
        for order in self._orders.values():
            order.close()
        self._teams.clear()


def _facts(request: Any) -> dict[str, str]:
    """What members compare."""
    return products.shared_facts(request) if isinstance(request, FusedRequest) else requests.shared_facts(request)


def _is_empty(request: Request) -> bool:
    return products.is_empty(request) if isinstance(request, FusedRequest) else requests.is_empty(request)


def refuse_capture(op: str) -> None:
    """Raise UnsupportedError while a graph is being captured."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{op}: the first call of its kind cannot be captured into a graph, because it prepares memory "
            "and compiles; call it once before the capture, on every rank of the group, with tensors of the same "
            "shapes and kind"
        )
