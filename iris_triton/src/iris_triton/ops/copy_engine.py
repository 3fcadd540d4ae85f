"""all_gather_matmul with shards that the copy engine brings beside the products: torch.matmul on what has arrived.

Shards come as `iris_triton.ops.shards` says, and the product with each run of them begins as soon as they are there.
The own rows come first and need no copy.  What multiplies loses no multiprocessor to the copies; products are those of
torch, of fewer rows each.  Events say what has arrived.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.ops.model import fixed_s, moving_s, product_s
from iris_core.ops.unfused import Unfused, multiply
from iris_core.types import Availability, DeviceType
from iris_triton._plugin import TRITON_INFO
from iris_triton.copies import copies_obstacle
from iris_triton.ops.shards import COPY_S, WIRE, Shards, shards_of

if TYPE_CHECKING:
    from iris_core.ops.host import Host
    from iris_core.types import FusedRequest, PluginInfo


@dataclass(frozen=True, slots=True)
class _Product:
    """A run of rows that is multiplied at a time, and the member whose rows it waits for; None for the own ones."""

    begin: int
    end: int
    after: int | None


@dataclass(slots=True)
class _Plan:
    """What is asked for in a launch.

    Attributes:
        shards: A of all members, and how it is gathered.
        products: in their order.
        arrived: events, by the members whose rows products wait for; empty on the CPU.
        tf32: products of float32 may be of TF32.
        aux_buffer: see FusedWorkspace.
    """

    shards: Shards
    products: list[_Product]
    arrived: dict[int, Any]
    tf32: bool
    aux_buffer: torch.Tensor


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
            moving = request.nbytes * (size - 1) / size / WIRE + (size - 1) * COPY_S
        product = product_s(request)
        return max(product, moving) + product / size + fixed_s(request, launches=size + 3, meetings=2)

    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Find memory for all rows, and for every copy its addresses.  Collective: every member calls it."""
        shards = shards_of(request, host, f"{self.op} ({self.name})")
        team, rows = host.team, request.m // host.team.size
        pieces = request.options["config"].get("num_pieces", team.size)
        products: list[_Product] = []
        for run in runs(team.rank, team.size, pieces):
            after = None if run[-1] == team.rank else run[-1]
            products += (_Product(first * rows, (last + 1) * rows, after) for first, last in neighbours(run))
        awaited = {each.after for each in products if each.after is not None}
        arrived = {} if shards.side is None else {member: torch.cuda.Event() for member in awaited}  # type: ignore[no-untyped-call]
        return _Plan(shards, products, arrived, request.options["tf32"], shards.memory)

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Give the own rows, then take the others' beside the products."""
        shards, arrived = plan.shards, plan.arrived

        def behind(member: int, stream: Any) -> None:
            if member in arrived:
                arrived[member].record(stream)

        with torch.no_grad():
            shards.give(a)
            shards.take(behind)
            for each in plan.products:
                if each.after in arrived:
                    torch.cuda.current_stream(shards.side.device).wait_event(arrived[each.after])
                along_rows = bias is not None and bias.dim() == 2 and bias.shape[0] > 1
                added = bias[each.begin : each.end] if along_rows else bias  # type: ignore[index]
                rows = shards.matrix[each.begin : each.end]
                multiply(rows, b, added, out[each.begin : each.end], plan.tf32)
            shards.end()


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
