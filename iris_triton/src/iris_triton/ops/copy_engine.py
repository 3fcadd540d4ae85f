"""all_gather_matmul with shards that the copy engine brings beside the products: torch.matmul on what has arrived.

A member puts its shard of rows into a matrix of all rows, at the same place on all members, and meets the others.  On a
second stream the copy engine then takes the shards out of theirs, the next member's first, and the product with each
run of shards begins as soon as these are there.  The own rows come first and need no copy.  What multiplies loses no
multiprocessor to the copies; products are those of torch, of fewer rows each.

Events say what has arrived: everybody takes, and nobody gives, so no flag crosses a link.  The second meeting, when all
has been taken, runs beside the last product.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from iris_core.ops.model import fixed_s, moving_s, product_s
from iris_core.ops.unfused import Unfused, multiply
from iris_core.types import Availability, DeviceType
from iris_triton._plugin import TRITON_INFO
from iris_triton.collectives.meeting import meet_alone
from iris_triton.copies import copier, copies_obstacle
from iris_triton.launcher import BoundKernel
from iris_triton.ops.fused import peer_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.ops.host import Host
    from iris_core.types import FusedRequest, PluginInfo

_WIRE, _COPY_S = 3.2e11, 7.5e-6
"""Of one stream of copies on 8 x H200: bytes in a second, and what each copy takes beside that."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One shard: where it goes, where it lies (addresses), and its size in bytes; `arrived` is recorded behind it."""

    target: int
    source: int
    nbytes: int
    arrived: Any


@dataclass(frozen=True, slots=True)
class _Product:
    """A run of rows that is multiplied at a time, and the event that it waits for; None for the own rows."""

    begin: int
    end: int
    arrived: Any


@dataclass(slots=True)
class _Plan:
    """What is asked for in a launch.

    Attributes:
        matrix: A of all members, in symmetric memory.
        own: the own rows of it.
        meet: the kernel by which members meet.
        copy: see `iris_triton.copies.copier`.
        copies: of the others' shards, in their order.
        products: in their order.
        side: the second stream, and the event that lets it begin; None on the CPU.
        ready: that event.
        tf32: products of float32 may be of TF32.
        aux_buffer: see FusedWorkspace.
    """

    matrix: torch.Tensor
    own: torch.Tensor
    meet: BoundKernel
    copy: Callable[[int, int, int, int], None]
    tf32: bool
    aux_buffer: torch.Tensor
    copies: list[_Copy] = field(default_factory=list)
    products: list[_Product] = field(default_factory=list)
    side: Any = None
    ready: Any = None


class CopyEngineGather(Unfused):
    """all_gather_matmul, gather_dim 0, by the copy engine.  `num_pieces` is the number of products, one a shard."""

    name = "copy_engine"
    uses = ("num_pieces",)
    measured_only = True

    def __init__(self) -> None:
        super().__init__("all_gather_matmul")

    @property
    def info(self) -> PluginInfo:
        """The backend's description."""
        return TRITON_INFO

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        if request.group_size == 1:
            return Availability.no("a rank alone has nobody to communicate with")
        if request.options["gather_dim"] != 0:
            return Availability.no("with gather_dim=1 the shards' products would be added up in the output, rounded")
        obstacle = copies_obstacle(request.target.type)
        return Availability.no(obstacle) if obstacle else answer

    def tunings(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Return numbers of products that are worth measuring, the own choice first."""
        size = request.group_size
        fewer = {pieces: {"num_pieces": pieces} for pieces in (size // 2 + 1, 3, 2) if pieces < size}
        return [{}, *fewer.values()]

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies, but for a piece."""
        size = request.group_size
        moving = moving_s(request)
        if request.target.type is not DeviceType.CPU:
            moving = request.nbytes * (size - 1) / size / _WIRE + (size - 1) * _COPY_S
        product = product_s(request)
        return max(product, moving) + product / size + fixed_s(request, launches=size + 3, meetings=2)

    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Find memory for all rows, and for every copy its addresses.  Collective: every member calls it."""
        team, on_cpu = host.team, request.target.type is DeviceType.CPU
        dtype: torch.dtype = getattr(torch, request.dtype)
        need = request.m * request.k * dtype.itemsize
        memory = peer_memory(host, need, f"{self.op} ({self.name})")[:need]
        matrix = memory.view(dtype).view(request.m, request.k)
        rows = request.m // team.size
        arguments = {
            "control": team.control.tensor.view(torch.int64),
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "SIZE": team.size,
        }
        plan = _Plan(
            matrix=matrix,
            own=matrix[team.rank * rows : (team.rank + 1) * rows],
            meet=BoundKernel(meet_alone, 1, arguments, (), team.device, {} if on_cpu else {"num_warps": 1}),
            copy=copier(request.target.type),
            tf32=request.options["tf32"],
            aux_buffer=memory,
        )
        if not on_cpu:
            plan.side = torch.cuda.Stream(request.target.index)  # type: ignore[no-untyped-call]
            plan.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        begin, nbytes = matrix.data_ptr() - team.base_ptrs[team.rank], need // team.size
        pieces = request.options["config"].get("num_pieces", team.size)
        products = []
        for run in runs(team.rank, team.size, pieces):
            arrived = None
            for member in run:
                if member == team.rank:
                    continue
                arrived = None if on_cpu else torch.cuda.Event()  # type: ignore[no-untyped-call]
                at = begin + member * nbytes
                here, there = team.base_ptrs[team.rank] + at, team.base_ptrs[member] + at
                plan.copies.append(_Copy(here, there, nbytes, arrived))
            for first, last in neighbours(run):
                products.append(_Product(first * rows, (last + 1) * rows, arrived))
        plan.products = products
        return plan

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Give the own rows, then take the others' beside the products."""
        with torch.no_grad():
            plan.own.copy_(a)
            plan.meet(None)  # in front of the products, which would leave no room for it
            if plan.side is None:
                for each in plan.copies:
                    plan.copy(each.target, each.source, each.nbytes, 0)
            else:
                main = torch.cuda.current_stream(plan.side.device)
                plan.ready.record(main)
                plan.side.wait_event(plan.ready)
                for each in plan.copies:
                    plan.copy(each.target, each.source, each.nbytes, plan.side.cuda_stream)
                    each.arrived.record(plan.side)
                with torch.cuda.stream(plan.side):
                    plan.meet(None)
            for each in plan.products:
                if each.arrived is not None:
                    main.wait_event(each.arrived)
                along_rows = bias is not None and bias.dim() == 2 and bias.shape[0] > 1
                added = bias[each.begin : each.end] if along_rows else bias  # type: ignore[index]
                multiply(plan.matrix[each.begin : each.end], b, added, out[each.begin : each.end], plan.tf32)
            if plan.side is None:
                plan.meet(None)
            else:
                main.wait_stream(plan.side)


def runs(me: int, size: int, pieces: int) -> list[list[int]]:
    """Members whose rows are multiplied at a time, in the order in which they come: the own ones alone, unless all are.

    Args:
        me: the own index.
        size: number of members.
        pieces: how many runs, at most one for each member.
    """
    order = [(me + i) % size for i in range(size)]
    if pieces == 1:
        return [order]
    others, number = order[1:], min(pieces, size) - 1
    bounds = [len(others) * i // number for i in range(number + 1)]
    return [[me], *(others[first:last] for first, last in itertools.pairwise(bounds))]


def neighbours(run: list[int]) -> list[tuple[int, int]]:
    """First and last members of the stretches in which a run lies in the matrix: two where it goes round the end."""
    if run[0] <= run[-1]:
        return [(run[0], run[-1])]
    wrap = run.index(0)
    return [(run[0], run[wrap - 1]), (0, run[-1])]
