"""all_reduce, reduce_scatter and reduce by reading the others' inputs; reduce_scatter by pushing parts, too.

The kernels are in `iris_triton.collectives.reduce` and `iris_triton.collectives.push`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from iris_triton.collectives.parts.portable import Plan, Portable
from iris_triton.collectives.parts.sizes import Carrier, blocks_for, layout_of, pieces, rounded_up
from iris_triton.collectives.pull import PER_CALL
from iris_triton.collectives.push import push_reduce
from iris_triton.collectives.reduce import pull_reduce, two_shot_direct, two_shot_staged
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max", "band": "min", "bor": "max", "bxor": "bxor"}
"""Reductions of bool, as those of bytes that are 0 or 1."""

_NO_DIMS = layout_of((), ())


class Reduction(Portable):
    """What all reductions have in common."""

    @staticmethod
    def reduction(request: CollectiveRequest) -> tuple[str, Carrier | None]:
        """Return the reduction's name for the kernel, and as what it takes the elements."""
        op = request.options["reduction"]
        if request.dtype == "bool":
            return _BOOL[op], Carrier(torch.uint8)
        return op, None

    @staticmethod
    def common(request: CollectiveRequest, team: Team, op: str) -> dict[str, Any]:
        """Arguments that all kernels take."""
        return {
            "control": team.control.tensor.view(torch.int64),
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "kind": request.options.get("kind", 0),
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "SIZE": team.size,
            "OP": op,
        }


class PullReduce(Reduction):
    """all_reduce in one step, reduce, or reduce_scatter."""

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings; every input comes over the links to whoever wants it."""
        part = request.nbytes // request.group_size if self.op == "reduce_scatter" else request.nbytes
        staged = not self._is_direct(request)
        moved = part * (request.group_size - 1)
        return self.model(request, meetings=2, moved=moved, copied=request.nbytes * staged)

    def _is_direct(self, request: CollectiveRequest) -> bool:
        # In place, a rank would overwrite what others still read.
        return request.direct_in and not (self.op == "all_reduce" and request.options["in_place"])

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel."""
        op, carrier = self.reduction(request)
        item = getattr(torch, request.dtype).itemsize
        scatters = self.op == "reduce_scatter" and request.options["layout"] == "torch"
        count = math.prod(request.shape) // (team.size if scatters else 1)
        wanted = count if self.op != "reduce" or request.options["root"] == team.rank else 0
        direct = self._is_direct(request)
        inner = layout_of(request.shape, request.options["in_stride"])
        outer = layout_of(request.options["out_shape"], request.options["out_stride"]) if wanted else _NO_DIMS
        region, capacity = team.control, count
        if not direct:
            region, capacity = pieces(team, count, item, team.size if scatters else 1)
        blocks = blocks_for(request, team, count, item, reduces=True)
        arguments = self.common(request, team, op) | {
            "stage": region.tensor,
            "count": count,
            "wanted": wanted,
            "apart": count if scatters else 0,
            "capacity": capacity,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "out_sizes": outer.sizes,
            "out_strides": outer.strides,
            "STAGED": not direct,
            "SHARED": not scatters,
            "IN_DIMS": 0 if direct else inner.num_dims,
            "OUT_DIMS": outer.num_dims,
            "tiles": _tiles(request),
            "STRIDING": request.options["config"].get("all_reduce_distribution") == 0,
            "BLOCK": blocks.block,
        }
        kernel = BoundKernel(pull_reduce, blocks.programs, arguments, PER_CALL, team.device, blocks.options)
        return Plan(kernel, carrier)


class PullTiles(PullReduce):
    """reduce_scatter in the layout of the reference system: each member gets some tiles of the result."""

    uses = (*Portable.uses, "swizzle_size", "all_reduce_distribution")
    layouts = ("tiles",)

    def __init__(self) -> None:
        super().__init__("reduce_scatter", "two_shot")


def _tiles(request: CollectiveRequest) -> tuple[int, ...] | None:
    """The argument `tiles` of the kernel; None where the layout is torch's."""
    if request.options["layout"] != "tiles":
        return None
    config = request.options["config"]
    rows, columns = request.shape
    height, width = config.get("block_size_m", 32), config.get("block_size_n", 64)
    return columns, height, width, -(-rows // height), -(-columns // width), config.get("swizzle_size", 4)


class TwoShot(Reduction):
    """all_reduce in two steps."""

    def __init__(self) -> None:
        super().__init__("all_reduce", "two_shot")

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: shards come, and results go; without an output that peers can address, one meeting more."""
        moved = 2 * request.nbytes * (request.group_size - 1) / request.group_size
        staged = (not request.direct_in) + (not request.direct_out)
        return self.model(request, meetings=2 + staged, moved=moved, copied=request.nbytes * staged)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind one of the two kernels."""
        op, carrier = self.reduction(request)
        item = getattr(torch, request.dtype).itemsize
        count = math.prod(request.shape)
        shard = rounded_up(-(-count // team.size), item)
        blocks = blocks_for(request, team, shard, item, reduces=True)
        arguments = self.common(request, team, op) | {"count": count, "shard": shard, "BLOCK": blocks.block}
        kernel = two_shot_direct
        if not (request.direct_in and request.direct_out):
            kernel = two_shot_staged
            region, capacity = pieces(team, shard, item, 1 + team.size * (not request.direct_in), halves=1)
            inner = layout_of(request.shape, request.options["in_stride"])
            outer = layout_of(request.options["out_shape"], request.options["out_stride"])
            arguments |= {
                "stage": region.tensor,
                "capacity": capacity,
                "in_sizes": inner.sizes,
                "in_strides": inner.strides,
                "out_sizes": outer.sizes,
                "out_strides": outer.strides,
                "IN_STAGED": not request.direct_in,
                "IN_DIMS": 0 if request.direct_in else inner.num_dims,
                "OUT_DIMS": outer.num_dims,
            }
        return Plan(BoundKernel(kernel, blocks.programs, arguments, PER_CALL, team.device, blocks.options), carrier)


class PushReduce(Reduction):
    """reduce_scatter: every rank pushes its parts to their owners, who reduce them in the group's order."""

    def __init__(self) -> None:
        super().__init__("reduce_scatter", "push")

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings, what goes over the links, and reading what came."""
        moved = request.nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, meetings=2, moved=moved, copied=request.nbytes)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel.  Collective: every member calls it."""
        op, carrier = self.reduction(request)
        item = getattr(torch, request.dtype).itemsize
        count = math.prod(request.shape) // team.size
        inner = layout_of(request.shape, request.options["in_stride"])
        outer = layout_of(request.options["out_shape"], request.options["out_stride"])
        region, capacity = pieces(team, count, item, team.size, name="pushed")
        blocks = blocks_for(request, team, count, item, reduces=True)
        arguments = self.common(request, team, op) | {
            "stage": region.tensor,
            "count": count,
            "capacity": capacity,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "out_sizes": outer.sizes,
            "out_strides": outer.strides,
            "IN_DIMS": inner.num_dims,
            "OUT_DIMS": outer.num_dims,
            "BLOCK": blocks.block,
        }
        kernel = BoundKernel(push_reduce, blocks.programs, arguments, PER_CALL, team.device, blocks.options)
        return Plan(kernel, carrier)
