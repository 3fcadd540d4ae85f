"""Algorithms of torch.distributed: NCCL (gloo on CPUs), alone and after torch.matmul.

They serve where the program has initialised torch.distributed.  In a node they are chosen where they were measured as
the fastest, or by name; between nodes they carry everything.  What they reduce is rounded as NCCL does it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import datetime
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from iris_core.device.launch_order import Begun
from iris_core.dispatch.config import Config
from iris_core.dispatch.requests import COLUMNS, POINT_TO_POINT, REDUCING, name_of, nodes_of
from iris_core.dispatch.team import ELEMENT_TYPES, Host
from iris_core.errors import CollectiveTimeoutError, DeviceError, IrisError, UnsupportedError
from iris_core.providers.baseline import Unfused
from iris_core.providers.model import between_nodes_s, everywhere
from iris_core.providers.parts import PARTED_IN, PARTED_OUT, Staged, dense, scratch_of, staged
from iris_core.types import Availability, CollectiveRequest, DeviceType, FusedRequest, PluginInfo
from iris_core.world import World
from iris_core.world.failures import name_ranks

_BYTES_PER_S, _CALL_S = {"nccl": 2e11, "gloo": 1e9}, {"nccl": 2e-5, "gloo": 1e-3}
NCCL_SMS = 32
"""Multiprocessors that NCCL takes at most: a config that allows as many is fulfilled."""

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_DTYPES = (*_FLOATS, "int8", "uint8", "int32", "int64")
_IN_OUTPUT = ("all_reduce", "reduce")  # which torch does in place: they begin with a copy
_OF_ALL = {"reduce": slice(1), "gather": slice(1), "scatter": slice(1, 2)}  # of input and output, what all have
_PAUSE_S = 0.01  # between two looks whether all have come to make a process group
_LOOK_S = 0.5  # between two looks whether a rank has died that a call waits for
_MARGIN_S = 5.0  # by which torch gives up later than a wait of ours, which says who did not come
_DEVICES = {"gloo": "cpu", "nccl": "cuda"}
_LEARN_S = 2.0  # after torch has failed, for the world to learn of a rank that has died

# torch 2.13 has new names
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_groups: dict[tuple[Any, str, tuple[int, ...], str], Any] = {}
"""Process groups by the program's own of all ranks, which may end and begin again, backend, ranks and what for.

Kept for ever, as torch does: where a peer was lost, gloo's destructor waits for calls that were given up.
"""

_MESSAGES = "messages"


def _numbers(members: Sequence[int], ranks: Sequence[int] | None) -> tuple[int, ...]:
    """Return the numbers in torch.distributed of some ranks of the world, whose numbers there are `ranks`."""
    return tuple(members if ranks is None else (ranks[member] for member in members))


def group_problem(request: CollectiveRequest | FusedRequest, backend: str, ranks: Sequence[int] | None = None) -> str:
    """Say why there can be no process group for a request; empty if there can."""
    if len(request.members) < 2:
        return "a group of one rank has no peer"
    if not (dist.is_available() and dist.is_initialized()):
        return "torch.distributed is not initialised (torch.distributed.init_process_group)"
    members = _numbers(request.members, ranks)
    if list(members) != sorted(members) and len(nodes_of(request)) < 2:
        return "torch.distributed orders the members by rank"
    if dist.get_rank() != members[request.rank] or dist.get_world_size() <= max(members):
        return "torch.distributed numbers the ranks otherwise"
    is_there = dist.is_gloo_available if backend == "gloo" else dist.is_nccl_available
    return "" if is_there() else f"this torch has no {backend}"


def watch_for_lost(watch: Callable[[], None]) -> None:
    """Look, after torch has failed, for a rank that was lost: others may have noticed it before this one."""
    until = time.monotonic() + _LEARN_S
    while time.monotonic() < until:
        watch()
        time.sleep(_LEARN_S / 20)


@contextlib.contextmanager
def guarded(what: str, members: Sequence[int], watch: Callable[..., None]) -> Iterator[None]:
    """Raise what torch says as an error of Iris, or that of ranks that were lost, as `watch` raises it."""
    try:
        yield
    except IrisError:
        raise
    except RuntimeError as error:
        watch_for_lost(watch)
        watch(failed=True)
        who = name_ranks(members)
        raise IrisError(f"{what}: torch.distributed has failed between {who}: {error}") from error


def group_of(members: Sequence[int], ranks: Sequence[int] | None, backend: str, world: World, what: str = "") -> Any:
    """Return the process group of some ranks, whose numbers there are those of `ranks`, for the calls of one kind.

    Collective, the first time: every member calls it, and waits for the others as long as `world` waits for its ranks.
    UnsupportedError on all of them where NCCL would fail: it is asked for ranks that share a GPU.
    """
    numbers = tuple(sorted(_numbers(members, ranks)))
    key = dist.group.WORLD, backend, numbers, what
    known = _groups.get(key)
    if known is None:
        c10d, own = dist.distributed_c10d, dist.distributed_c10d._hash_ranks_to_str
        numbered = "_".join([backend, *map(str, numbers), *([what] if what else [])])
        # counted in the members' store: a process may be newer than others, and the store older than the world
        store, until = c10d._get_default_store(), time.monotonic() + world.timeout_s
        number = store.add(f"iris/{numbered}/made by {dist.get_rank()}", 1)
        name = f"iris_{number}_{numbered}"
        bound = datetime.timedelta(seconds=world.timeout_s)
        try:
            with guarded(f"a process group of {backend}", members, world.check_peers):
                if backend == "nccl":
                    rank, gpu = dist.get_rank(), torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
                    store.set(f"{name}/{rank}", str(rank if "NCCL_MULTI_RANK_GPU_ENABLE" in os.environ else gpu))
                store.add(f"{name}/came", 1)
                while store.add(f"{name}/came", 0) < len(numbers):  # torch waits in the store, which no thread can use
                    world.check_peers()
                    if time.monotonic() >= until:
                        raise RuntimeError(f"not all came within {world.timeout_s:g} s")
                    time.sleep(_PAUSE_S)
                if backend == "nccl" and len({store.get(f"{name}/{number}") for number in numbers}) < len(numbers):
                    raise UnsupportedError("NCCL connects no ranks that share a GPU")  # and what it leaves may hang
                c10d._hash_ranks_to_str = lambda ranks: name  # torch's depends on how many groups a rank has made
                known = dist.new_group(list(numbers), bound, backend, use_local_synchronization=True)
        finally:
            c10d._hash_ranks_to_str = own
        c10d._set_pg_timeout(datetime.timedelta(seconds=_bound_s(backend) + _MARGIN_S), known)
        _groups[key] = known
    return known


def _bound_s(backend: str) -> float:
    """Return how long a call of the program's process group may take, in seconds."""
    bound: datetime.timedelta | None = None
    group: Any = dist.group.WORLD
    with contextlib.suppress(AttributeError, RuntimeError):  # it has no such backend
        bound = group._get_backend(torch.device(_DEVICES[backend])).options._timeout
    return (bound or dist.distributed_c10d._get_default_timeout(dist.Backend(backend))).total_seconds()


def open_messages(ranks: Sequence[int] | None, backend: str, world: World) -> None:
    """Make the process group of messages between nodes: later on, only two ranks come.  Collective."""
    group_of(range(world.world_size), ranks, backend, world, _MESSAGES)


@dataclass(slots=True)
class _Plan:
    """A prepared call."""

    group: Any  # its process group
    members: tuple[int, ...]  # whom that connects, by their ranks in the world
    watch: Callable[..., None]  # raises if one is lost that the call waits for
    far: tuple[int, ...]  # those on other nodes, or else all others
    bound_s: float  # how long the host waits
    on_host: bool  # whether the host carries the data, and waits: gloo's does
    op: str  # the operation
    reduction: Any = None  # torch's
    root: int = 0  # by its number there
    is_root: bool = False
    on_gpu: bool = False  # whether the tensors lie on a GPU
    inp: Staged = field(default_factory=Staged)  # how tensors are passed on
    out: Staged = field(default_factory=Staged)
    # elements for and from each member where they differ, in torch's order
    splits: tuple[list[int], list[int]] | None = None
    # parts go as a list: elements for and from each member, in the group's order, and which of them torch gets in its
    # order, None for nothing
    parts: tuple[list[int], list[int], list[int | None]] | None = None
    matrix: torch.Tensor | None = None  # of split sizes, which members compare
    pending: Begun | None = None  # a call whose buffers are in use

    def guarded(self) -> contextlib.AbstractContextManager[None]:
        """Raise what torch says as an error of Iris, or that of the rank that was lost."""
        return guarded(self.op, self.members, self.watch)

    def end(self, work: Any) -> None:
        """Wait for a work of torch: the host on the CPU, else the current stream."""
        with self.guarded():
            if work is None:
                return
            if not self.on_host:
                work.wait()
                return
            until = time.monotonic() + self.bound_s
            if self.op in POINT_TO_POINT:
                self._end_message(work, until)
                return
            while not work.is_completed():
                try:
                    work.wait(datetime.timedelta(seconds=min(_LOOK_S, max(1e-3, until - time.monotonic()))))
                    return
                except RuntimeError:
                    if not work.is_completed():  # it is only late
                        self.watch()
                        if time.monotonic() >= until:
                            raise self._late() from None
            work.wait()

    def _end_message(self, work: Any, until: float) -> None:
        """Wait for a message once: gloo closes its connections where such a wait is given up."""
        waiting: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def wait() -> None:
            try:
                waiting.set_result(work.wait(datetime.timedelta(seconds=self.bound_s)))
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                waiting.set_exception(error)

        threading.Thread(target=wait, daemon=True).start()
        while not concurrent.futures.wait((waiting,), _LOOK_S).done:
            self.watch()
        if waiting.exception() is not None and time.monotonic() >= until:
            raise self._late()
        waiting.result()

    def _late(self) -> CollectiveTimeoutError:
        who, is_one = name_ranks(self.far), len(self.far) == 1
        return CollectiveTimeoutError(
            f"{self.op} between {name_ranks(self.members)} did not complete within {self.bound_s:g} s; "
            f"{f'{who} did not arrive' if is_one else f'not all of {who} arrived'}. Either that rank failed, or it "
            "makes other calls, or the timeout of init_process_group, or IRIS_DEVICE_TIMEOUT, is too short",
            missing_ranks=self.far,
        )


@dataclass
class TorchCollective:
    """A collective of torch.distributed; its name is the backend of its process groups, "nccl" or "gloo".

    Within a node, contiguous tensors in torch's order, but for what the root alone has.  Between nodes any: others are
    copied, and what only moves goes as bytes.
    """

    op: str
    name: str
    ranks: tuple[int, ...] | None = None  # the world's numbers in torch.distributed; None where they are the same

    measured_only: ClassVar = True
    always_measured: ClassVar = True
    spans_nodes: ClassVar = True
    composes: ClassVar = True

    @property
    def info(self) -> PluginInfo:
        return everywhere(self.name, f"torch.distributed with {self.name}")

    def supports(self, request: CollectiveRequest) -> Availability:
        problem = group_problem(request, self.name, self.ranks) or self._problem(request)
        return Availability(not problem, problem)

    def _problem(self, request: CollectiveRequest) -> str:
        options, between = request.options, len(nodes_of(request)) > 1
        reduction = options.get("reduction", "sum")
        averages = reduction == "avg" and self.name == "nccl" and request.dtype in _FLOATS
        sides: Any = (request.shape, options.get("in_stride")), (options.get("out_shape"), options.get("out_stride"))
        alike = sides[_OF_ALL.get(self.op, slice(None))]  # others would not know how the root's own tensor lies
        config = options.get("config", {})
        unused = [name for name in config if name != "comm_sms" or self.name != "nccl" or config[name] < NCCL_SMS]
        if unused:
            return f"it has no use for {', '.join(unused)} of the config"
        if not between and self.op in POINT_TO_POINT:
            return "it is offered between nodes only"
        layouts = ("torch", COLUMNS) if between else ("torch",)
        if options.get("layout", "torch") not in layouts or (options.get("uneven") and not between):
            return "it divides tensors in equal parts, along the first dimension"
        if request.dtype not in _DTYPES and not (between and self.op not in REDUCING):
            return f"it is offered for {', '.join(_DTYPES)}"
        if not averages and reduction not in ("sum", "product", "min", "max"):
            return f"it does not reduce by {reduction}"
        if not between and any(stride not in (None, dense(shape or ())) for shape, stride in alike):
            return "its tensors are contiguous"
        return ""

    def cost(self, request: CollectiveRequest) -> float:
        if len(nodes_of(request)) > 1:
            return between_nodes_s(request, flat=True)
        return _CALL_S[self.name] + request.nbytes * (request.group_size - 1) / _BYTES_PER_S[self.name]

    # -- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, request: CollectiveRequest, host: Host) -> _Plan:
        """Find the process group, and memory for tensors that are not as torch takes them."""
        options, op, whole = request.options, self.op, host.whole or host.team.world
        numbers, on_host = _numbers(request.members, self.ranks), self.name == "gloo"
        timeout_ns = host.team.reports.timeout_ns
        bound_s = timeout_ns / 1e9 if timeout_ns > 0 else _bound_s(self.name)
        if op in ("send", "recv"):
            group = group_of(request.members, self.ranks, self.name, whole, _MESSAGES)
            root = numbers[options["peer"]]
            names = request.members[request.rank], request.members[options["peer"]]
            plan = _Plan(group, names, whole.check_peers, names[1:], bound_s, on_host, op, root=root)
        else:
            root = options.get("root", 0)
            reduction = getattr(dist.ReduceOp, options.get("reduction", "sum").upper())
            group = group_of(request.members, self.ranks, self.name, whole, host.team.world.name)
            is_root = request.rank == root
            among = request.members, whole.check_peers, _far(request), bound_s
            on_gpu = request.target.type is not DeviceType.CPU
            plan = _Plan(group, *among, on_host, op, reduction, numbers[root], is_root, on_gpu)
        in_order = sorted(range(request.group_size), key=numbers.__getitem__)
        splits = [options.get(name) for name in ("in_splits", "out_splits")]
        if splits[0] is not None and splits[1] is not None:
            rows = math.prod(request.shape[1:])
            plan.splits = [splits[1][i] * rows for i in in_order], [splits[0][i] * rows for i in in_order]
        if options["uneven"]:
            plan.matrix = torch.zeros(2, len(numbers), len(numbers), dtype=torch.int64)
            for side, sizes in enumerate(splits):
                plan.matrix[side, request.rank] = torch.tensor(sizes)
        if options.get("to_other_nodes"):
            self._leave_out_node(plan, request, host, in_order)
            return plan
        is_columns = options["layout"] == COLUMNS
        order = None if in_order == list(range(request.group_size)) and not is_columns else in_order
        has_in, has_out = "in_stride" in options, "out_shape" in options
        if has_in and op not in _IN_OUTPUT:
            parted = order if op in PARTED_IN else None
            sides = request.shape, options["in_stride"], parted, splits[0], is_columns
            plan.inp = staged(host, f"{op} from", request.dtype, *sides)
        if has_out or op == "reduce":
            parted = order if op in PARTED_OUT else None
            shape = options.get("out_shape", request.shape)
            stride = options.get("out_stride")  # of a reduce, all but the root need memory for what they pass on
            plan.out = staged(host, f"{op} to", request.dtype, shape, stride, parted, splits[1], is_columns)
        return plan

    def _leave_out_node(self, plan: _Plan, request: CollectiveRequest, host: Host, in_order: list[int]) -> None:
        """Let an all_to_all of flat tensors exchange with other nodes only: in lists, or copied to where gloo can."""
        is_near = [node == request.nodes[request.rank] for node in request.nodes]
        row, far = math.prod(request.shape[1:]), [i for i in in_order if not is_near[i]]
        given, taken = ([n * row for n in request.options[name]] for name in ("in_splits", "out_splits"))
        if not plan.on_host:
            plan.parts = given, taken, [None if is_near[i] else i for i in in_order]
            return
        left = [[0 if is_near[i] else sizes[i] for i in in_order] for sizes in (taken, given)]
        plan.splits = left[0], left[1]
        plan.out, plan.inp = (
            Staged(scratch_of(host, f"{what} other nodes", sum(of_far), request.dtype), far, sizes)
            for what, of_far, sizes in zip(("from", "to"), left, (taken, given), strict=True)
        )

    # -- launching ----------------------------------------------------------------------------------------------------
    def launch(self, plan: _Plan, out: Any, inp: Any, stream: Any = None) -> None:
        with torch.no_grad(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            if self.op in ("send", "recv"):
                self._pass_message(plan, out, inp)
            else:
                self._start(plan, out, inp, self.name == "gloo").wait()

    def begin(self, plan: _Plan, out: Any, inp: Any) -> Begun:
        """Launch, and return a handle: the current stream goes on before the end."""
        with torch.no_grad():
            return self._start(plan, out, inp, True)

    def _start(self, plan: _Plan, out: Any, inp: Any, async_op: bool) -> Begun:
        if plan.on_host and plan.on_gpu and torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(f"{self.op}: gloo's calls cannot be captured into a graph; NCCL's can")
        if self.op == "broadcast" and plan.is_root:
            out = None  # it is the input
        if plan.pending is not None:  # two calls cannot use the buffers at the same time
            plan.pending.wait()
        if plan.matrix is not None and plan.on_host:  # else the host would have to wait
            _compare_splits(plan, plan.matrix)
        given = None if inp is None or self.op in _IN_OUTPUT else plan.inp.fill(inp)
        taken = plan.out.buffer if out is None else plan.out.flat(out)
        with plan.guarded():
            work = self._call(plan, taken, given, inp, async_op)
        if work is None and plan.out.buffer is None:  # the current stream does it in order
            return Begun()

        def finish() -> None:
            plan.end(work)
            if out is not None:
                plan.out.drain(out)

        begun = Begun(finish)
        if plan.inp.buffer is not None or plan.out.buffer is not None:
            plan.pending = begun
        return begun

    def _call(self, plan: _Plan, out: Any, given: Any, inp: Any, async_op: bool) -> Any:
        """Call torch.distributed with flat tensors; `inp` is the input as it is."""
        group, op, root, of = plan.group, self.op, plan.root, {"async_op": async_op}
        if op in _IN_OUTPUT:
            whole = out.view(inp.shape)
            if whole.data_ptr() != inp.data_ptr() or whole.stride() != inp.stride():
                whole.copy_(inp)
            if op == "all_reduce":
                return dist.all_reduce(out, plan.reduction, group, **of)
            return dist.reduce(out, root, plan.reduction, group, **of)
        if op == "reduce_scatter":
            return _reduce_scatter(out, given, plan.reduction, group, **of)
        out, given = (None if each is None else each.view(torch.uint8) for each in (out, given))
        if op == "broadcast":
            return dist.broadcast(given if plan.is_root else out, root, group, **of)
        if op == "all_gather":
            return _all_gather(out, given, group, **of)
        size, item = len(plan.members), 1 if inp is None else inp.element_size()
        if op == "gather":
            return dist.gather(given, list(out.chunk(size)) if plan.is_root else None, root, group, **of)
        if op == "scatter":
            return dist.scatter(out, list(given.chunk(size)) if plan.is_root else None, root, group, **of)
        if plan.parts is not None:
            *sizes, chosen = plan.parts
            inputs, outputs = (
                [each[:0] if i is None else parts[i] for i in chosen]
                for each, of_all in zip((given, out), sizes, strict=True)
                for parts in [each.split([n * item for n in of_all])]
            )
            return dist.all_to_all(outputs, inputs, group, **of)
        taken, from_me = ([n * item for n in sizes] for sizes in plan.splits) if plan.splits else (None, None)
        return dist.all_to_all_single(out, given, taken, from_me, group, **of)

    def _pass_message(self, plan: _Plan, out: Any, inp: Any) -> None:
        """Send or receive one message; gloo's say how much they have, and of what.

        Raises:
            DeviceError: another message has come; the tensor stays as it is, and later messages are not affected.
        """
        tensor = out if inp is None else inp
        call: Callable[..., Any] = dist.irecv if inp is None else dist.isend
        kind = name_of(tensor.dtype)

        def move(data: torch.Tensor) -> None:
            if data.numel():
                plan.end(call(data.view(torch.uint8), plan.root, plan.group))

        with plan.guarded():
            if plan.on_host:  # else the host would have to wait
                head = torch.tensor([tensor.numel(), ELEMENT_TYPES.index(kind)])
                move(head)
                count, number = head.tolist()
                if (count, ELEMENT_TYPES[number]) != (tensor.numel(), kind):
                    move(torch.empty(count, dtype=getattr(torch, ELEMENT_TYPES[number])))
                    raise DeviceError(
                        f"rank {plan.members[0]} received from rank {plan.members[1]} and expected {tensor.numel()} "
                        f"elements of {kind}, but {count} elements of {ELEMENT_TYPES[number]} were sent. The output is "
                        "as it was; later messages are not affected."
                    )
            move(plan.inp.fill(inp) if out is None else plan.out.flat(out))
        if out is not None:
            plan.out.drain(out)


def _far(request: CollectiveRequest) -> tuple[int, ...]:
    """Return the members on other nodes; all others where there are none."""
    others = [place for place in range(request.group_size) if place != request.rank]
    far = [place for place in others if request.nodes and request.nodes[place] != request.nodes[request.rank]]
    return tuple(request.members[place] for place in far or others)


def _compare_splits(plan: _Plan, matrix: torch.Tensor) -> None:
    """Raise DeviceError on all members where one gives another not as much as that takes."""
    sums = matrix.clone()
    plan.end(dist.all_reduce(sums, group=plan.group, async_op=True))
    given, taken = sums[0], sums[1].t()
    if not torch.equal(given, taken):
        source, target = (given != taken).nonzero()[0].tolist()
        raise DeviceError(
            f"all_to_all between {name_ranks(plan.members)}: rank {plan.members[target]} takes "
            f"{int(taken[source, target])} rows from rank {plan.members[source]} (output_split_sizes), which gives it "
            f"{int(given[source, target])} (input_split_sizes). Nothing was moved."
        )


class UnfusedTorch(Unfused):
    """One operation as torch.matmul and a collective of torch.distributed, one after the other."""

    measured_only = True

    def __init__(self, op: str, backend: str, ranks: tuple[int, ...] | None = None) -> None:
        super().__init__(op)
        self.name = self.backend = backend
        self._ranks = ranks
        self.collective_config = Config(algorithm=backend)
        self.info = everywhere(backend, f"torch.matmul and {backend}, one after the other")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch multiplies such elements, and what is between product and collective is contiguous."""
        problem = self._problem(request) or group_problem(request, self.backend, self._ranks)
        return Availability.no(problem) if problem else super().supports(request)

    def _problem(self, request: FusedRequest) -> str:
        if request.options["layout"] != "torch" or request.options.get("gather_dim") == 1:
            return "its parts are rows, in torch's order"
        if request.out_stride != dense(request.out_shape):
            return "its output is contiguous"
        gathers = self.op == "all_gather_matmul"
        contiguous = dense((request.m // request.group_size, request.k))
        return "its A is contiguous" if gathers and request.a_stride != contiguous else ""
