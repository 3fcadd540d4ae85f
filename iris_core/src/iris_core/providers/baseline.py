"""Fused operations on every device: torch.matmul with a collective of `ctx.ccl`, one after the other.

The product is rounded to the output's type before it is reduced; the reduction is in float32 (docs/collectives.md).
The bias is added once: by the first member to its product, where the results of all are added up.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.config import TILE_OF_THE_REFERENCE
from iris_core.dispatch.products import FP8, PLAIN, float32_products
from iris_core.providers.model import everywhere, fixed_s, moving_s, product_s
from iris_core.types import Availability, CollectiveRequest

if TYPE_CHECKING:
    from iris_core.dispatch.config import Config
    from iris_core.dispatch.team import Host
    from iris_core.types import FusedRequest


@dataclass(slots=True)
class _Plan:
    collective: Any
    rank: int
    tf32: bool
    fuses_bias: bool = True  # in the product
    adds_bias: bool = False  # to the output, afterwards
    product: torch.Tensor | None = None  # None where it is a part of the output
    gathered: tuple[torch.Tensor, torch.Tensor] | None = None  # A of all ranks, as a matrix and as one part of each
    aux_buffer: torch.Tensor | None = None  # see FusedWorkspace


class Unfused:
    """One operation as a product and a collective, one after the other.

    Args:
        op: the operation.
    """

    name = "unfused"
    info = everywhere("unfused", "torch.matmul and a collective, one after the other")
    always_measured = True

    collective_config: Config | None = None
    """Config of the collective; by default the library chooses."""

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch multiplies such elements; of the config, only what defines the result has a meaning."""
        if request.dtype not in PLAIN and not (request.dtype in FP8 and request.group_size == 1):
            # alone, as the output's type, which holds 8-bit floats exactly; with peers other algorithms multiply them
            return Availability.no(f"torch.matmul does not multiply {request.dtype}")
        defining = TILE_OF_THE_REFERENCE if request.options["layout"] == "tiles" else ()
        if unused := [name for name in request.options["config"] if name not in defining]:
            return Availability.no(f"it has no use for {', '.join(unused)} of the config")
        return Availability.yes()

    def cost(self, request: FusedRequest) -> float:
        return product_s(request) + moving_s(request) + fixed_s(request, launches=2, barriers=2)

    # -- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Choose the collective, and find memory for what is between product and collective."""
        options, rank, size = request.options, request.rank, request.group_size
        tf32 = options["tf32"] or request.dtype in FP8  # which TF32 holds exactly, too
        if self.op == "all_gather_matmul":
            by_rows = options["gather_dim"] == 0
            rows, inner = (request.m // size, request.k) if by_rows else (request.m, request.k // size)
            dtype = getattr(torch, request.dtype)
            memory = host.scratch(request.m * request.k * dtype.itemsize, "gathered")
            memory = memory[: request.m * request.k * dtype.itemsize]
            matrix = memory.view(dtype).view(request.m, request.k)
            parts = matrix.view(size, rows, inner) if by_rows else matrix.view(rows, size, inner).transpose(0, 1)
            direct = request.reach_a and request.a_stride == dense((rows, inner))
            given = (rows, inner), request.a_stride, direct
            wanted = _part_of(request, "all_gather", given, (tuple(parts.shape), parts.stride(), False))
            collective = host.collective(wanted, self.collective_config)
            return _Plan(collective, rank, tf32, gathered=(matrix, parts), aux_buffer=memory)
        dense_out = dense(request.out_shape)
        direct_out = request.reach_out and request.out_stride == dense_out
        if self.op == "matmul_all_gather" and options["gather_dim"] == 0 and direct_out:
            shape = request.m, request.n
            out = request.out_shape, dense_out, True
            wanted = _part_of(request, "all_gather", (shape, dense(shape), True), out, in_place=True)
            return _Plan(host.collective(wanted, self.collective_config), rank, tf32)
        dtype = getattr(torch, request.out_dtype)
        nbytes = request.m * request.n * dtype.itemsize
        region = host.symmetric(nbytes)
        memory = (host.scratch(nbytes, "product") if region is None else region.tensor)[:nbytes].view(dtype)
        wanted = self._collective(request, region is not None)
        plan = _Plan(host.collective(wanted, self.collective_config), rank, tf32)
        plan.product, plan.aux_buffer = memory.view(request.m, request.n), memory.view(torch.uint8)
        # Rows of a bias that differ from member to member can only be added where they belong.
        is_scattered = self.op == "matmul_reduce_scatter" and options["layout"] == "torch"
        plan.adds_bias = is_scattered and options["bias"] == "rows"
        plan.fuses_bias = not plan.adds_bias and (rank == 0 or self.op == "matmul_all_gather")
        return plan

    def _collective(self, request: FusedRequest, direct: bool) -> CollectiveRequest:
        """Describe the collective of the product, which is dense."""
        size, (down, right), options = request.group_size, request.out_stride, dict[str, Any]()
        rows, columns = request.m, request.n
        shape: tuple[int, ...] = rows, columns
        stride: tuple[int, ...] = down, right
        if self.op == "matmul_all_gather":
            apart = rows * down if request.options["gather_dim"] == 0 else columns * right
            shape, stride = (size, rows, columns), (apart, down, right)
        else:
            options = {"reduction": "sum", "layout": request.options["layout"]}
            if options["layout"] == "tiles":
                tile = {**TILE_OF_THE_REFERENCE, **request.options["config"]}
                names = {"block_size_m": "block_size_m", "block_size_n": "block_size_n", "swizzle_size": "group_size_m"}
                options["config"] = {theirs: tile[ours] for theirs, ours in names.items()}
            elif self.op == "matmul_reduce_scatter":
                shape = rows // size, columns
        out = shape, stride, request.reach_out and stride == dense(shape)
        given = (rows, columns), (columns, 1), direct
        return _part_of(request, self.op.removeprefix("matmul_"), given, out, **options)

    # -- launching ----------------------------------------------------------------------------------------------------
    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        with torch.no_grad():
            if plan.gathered is not None:
                matrix, parts = plan.gathered
                plan.collective.launch(parts, a)
                multiply(matrix, b, bias, out, plan.tf32)
                return
            parts, rows, columns = out, a.shape[0], b.shape[1]
            if self.op == "matmul_all_gather":  # one part of each member: (size, rows, columns)
                below = out.shape[1] == columns
                parts = out.view(-1, rows, columns) if below else out.view(rows, -1, columns).transpose(0, 1)
            product = parts[plan.rank] if plan.product is None else plan.product
            multiply(a, b, bias if plan.fuses_bias else None, product, plan.tf32)
            plan.collective.launch(out if plan.product is None else parts, product)
            if plan.adds_bias and bias is not None:
                out.add_(bias)


def multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tf32: bool) -> None:
    """Write a @ b, + bias if there is one, to `out`; on GPUs `tf32` says whether float32 may be multiplied as that.

    Operands of another type than the output's become of that type.
    """
    if a.dtype is not out.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
    with float32_products(tf32) if a.is_cuda and a.dtype is torch.float32 else nullcontext():
        if bias is None:
            torch.mm(a, b, out=out)
        else:
            torch.addmm(bias, a, b, out=out)


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


_Side = tuple[tuple[int, ...], tuple[int, ...], bool]
"""Of an input or output: shape, strides, and whether peers can address it."""


def _part_of(request: FusedRequest, op: str, inp: _Side, out: _Side, **options: Any) -> CollectiveRequest:
    """Describe a collective that is a part of an operation, as `CollectiveCall.describe` would."""
    dtype = request.dtype if request.op == "all_gather_matmul" else request.out_dtype
    shape, stride, direct = inp
    usual = {"layout": "torch", "in_place": False, "uneven": False, "config": {}, "in_stride": stride}
    return CollectiveRequest(
        op=op,
        shape=shape,
        dtype=dtype,
        nbytes=math.prod(shape) * getattr(torch, dtype).itemsize,
        rank=request.rank,
        group_size=request.group_size,
        target=request.target,
        options={**usual, "out_shape": out[0], "out_stride": out[1], **options},
        members=request.members,
        direct_in=direct,
        direct_out=out[2],
    )
