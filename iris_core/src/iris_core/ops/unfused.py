"""A product by torch and a collective of `ctx.ccl`, one after the other: what every device can do.

The product is rounded to the output's type before it is reduced; the reduction is in float32 (docs/collectives.md).
The bias is added once: by the first member to its product, where the results of all are added up.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.ops.calls import FP8, PLAIN
from iris_core.ops.config import TILE_OF_THE_REFERENCE
from iris_core.ops.model import fixed_s, moving_s, product_s
from iris_core.ops.precision import float32_products
from iris_core.types import Availability, CollectiveRequest, DeviceType, PluginInfo, PluginKind

if TYPE_CHECKING:
    from iris_core.dispatch.bind import Bound
    from iris_core.ops.host import Host
    from iris_core.types import FusedRequest

UNFUSED_INFO = PluginInfo(
    name="unfused",
    kind=PluginKind.COLLECTIVE,
    summary="torch.matmul and a collective, one after the other",
    devices=frozenset(DeviceType),
)
"""What the core says about its own algorithms."""


@dataclass(slots=True)
class _Plan:
    """What was prepared.

    Attributes:
        collective: the collective.
        local: what the collective gets from this rank, or gives to it; None where that is a part of the output.
        matrix: A of all ranks, where it is gathered; the same memory as `local`.
        fuses_bias: the bias is added by the product.
        adds_bias: the bias is added to the output.
        rank: this rank in the group.
        tf32: products of float32 may be of TF32.
        aux_buffer: see FusedWorkspace.
    """

    collective: Bound
    local: torch.Tensor | None
    matrix: torch.Tensor | None = None
    fuses_bias: bool = True
    adds_bias: bool = False
    rank: int = 0
    tf32: bool = False
    aux_buffer: torch.Tensor | None = None


class Unfused:
    """One operation as a product and a collective.

    Args:
        op: the operation.
    """

    name = "unfused"

    uses: tuple[str, ...] = ()
    """Fields of the config that it fulfils, beside those that define the result."""

    converts = True
    """8-bit floats are multiplied as the output's type, which holds them exactly, where a rank is alone: other
    algorithms need others."""

    def __init__(self, op: str) -> None:
        self.op = op

    @property
    def info(self) -> PluginInfo:
        """The description."""
        return UNFUSED_INFO

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch multiplies such elements; of the config, only what defines the result has a meaning."""
        if request.dtype not in PLAIN and not (request.dtype in FP8 and request.group_size == 1 and self.converts):
            return Availability.no(f"torch.matmul does not multiply {request.dtype}")
        config = dict(request.options["config"])
        if request.options["layout"] == "tiles":
            for name in TILE_OF_THE_REFERENCE:
                config.pop(name, None)
        unused = [name for name in config if name not in self.uses]
        if unused:
            return Availability.no(f"it has no use for {', '.join(unused)} of the config")
        return Availability.yes()

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: one after the other."""
        return product_s(request) + moving_s(request) + fixed_s(request, launches=2, meetings=2)

    # -- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Choose the collective, and find memory for what is between the two."""
        if self.op == "all_gather_matmul":
            plan = self._gather_before(request, host)
        elif self.op == "matmul_all_gather":
            plan = self._gather_after(request, host)
        else:
            plan = self._reduce(request, host)
        plan.tf32 = request.options["tf32"] or request.dtype in FP8  # which TF32 holds exactly, too
        return plan

    def _reduce(self, request: FusedRequest, host: Host) -> _Plan:
        product, direct = product_memory(request, host, request.m, request.n)
        tiles = request.options["layout"] == "tiles"
        config: dict[str, Any] = {}
        if tiles:
            shape = {**TILE_OF_THE_REFERENCE, **request.options["config"]}
            config = {"block_size_m": shape["block_size_m"], "block_size_n": shape["block_size_n"]}
            config["swizzle_size"] = shape["group_size_m"]
        collective = host.collective(
            collective_request(
                request,
                op=self.op.removeprefix("matmul_"),
                in_shape=(request.m, request.n),
                in_stride=(request.n, 1),
                direct_in=direct,
                out_shape=request.out_shape,
                out_stride=request.out_stride,
                direct_out=request.reach_out and request.out_stride == dense(request.out_shape),
                options={"reduction": "sum", "layout": request.options["layout"], "config": config},
            )
        )
        # Rows of a bias that differ from member to member can only be added where they belong.
        own_rows = request.op == "matmul_reduce_scatter" and not tiles and request.options["bias"] == "rows"
        fuses = not own_rows and request.rank == 0
        return _Plan(collective, product, fuses_bias=fuses, adds_bias=own_rows, aux_buffer=_bytes_of(product))

    def _gather_before(self, request: FusedRequest, host: Host) -> _Plan:
        size, by_rows = request.group_size, request.options["gather_dim"] == 0
        rows, inner = (request.m // size, request.k) if by_rows else (request.m, request.k // size)
        item = getattr(torch, request.dtype).itemsize
        buffer = host.scratch(request.m * request.k * item, "gathered")
        matrix = buffer[: request.m * request.k * item].view(getattr(torch, request.dtype)).view(request.m, request.k)
        parts = matrix.view(size, rows, inner) if by_rows else matrix.view(rows, size, inner).transpose(0, 1)
        collective = host.collective(
            collective_request(
                request,
                op="all_gather",
                in_shape=(rows, inner),
                in_stride=request.a_stride,
                direct_in=request.reach_a and request.a_stride == dense((rows, inner)),
                out_shape=tuple(parts.shape),
                out_stride=parts.stride(),
                direct_out=False,
            )
        )
        return _Plan(collective, parts, matrix=matrix, aux_buffer=_bytes_of(matrix))

    def _gather_after(self, request: FusedRequest, host: Host) -> _Plan:
        shape, in_stride = (request.m, request.n), (request.n, 1)
        direct_out = request.reach_out and request.out_stride == dense(request.out_shape)
        if request.options["gather_dim"] == 0 and direct_out:  # the product goes to its place in the output
            collective = host.collective(
                collective_request(
                    request,
                    op="all_gather",
                    in_shape=shape,
                    in_stride=in_stride,
                    direct_in=True,
                    out_shape=request.out_shape,
                    out_stride=request.out_stride,
                    direct_out=True,
                    options={"in_place": True},
                )
            )
            return _Plan(collective, None, rank=request.rank)
        product, direct = product_memory(request, host, *shape)
        down, right = request.out_stride
        stride = (request.m * down, down, right)
        if request.options["gather_dim"] == 1:
            stride = (request.n * right, down, right)
        out_shape = (request.group_size, *shape)
        collective = host.collective(
            collective_request(
                request,
                op="all_gather",
                in_shape=shape,
                in_stride=in_stride,
                direct_in=direct,
                out_shape=out_shape,
                out_stride=stride,
                direct_out=request.reach_out and stride == dense(out_shape),
            )
        )
        return _Plan(collective, product, aux_buffer=_bytes_of(product))

    # -- launching ----------------------------------------------------------------------------------------------------
    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply and communicate, in the operation's order."""
        with torch.no_grad():
            local = plan.local
            if plan.matrix is not None:
                plan.collective.launch(local, a)
                multiply(plan.matrix, b, bias, out, plan.tf32)
                return
            if local is None:
                part = out[plan.rank * a.shape[0] : (plan.rank + 1) * a.shape[0]]
                multiply(a, b, bias, part, plan.tf32)
                plan.collective.launch(out, part)
                return
            multiply(a, b, bias if plan.fuses_bias else None, local, plan.tf32)
            if self.op == "matmul_all_gather":
                plan.collective.launch(_parts(out, local), local)
                return
            plan.collective.launch(out, local)
            if plan.adds_bias and bias is not None:
                out.add_(bias)


def unfused_operations(ops: tuple[str, ...]) -> list[Unfused]:
    """Return the algorithms for these operations."""
    return [Unfused(op) for op in ops]


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


def _parts(out: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """An output as one part of each member: (size, rows, columns)."""
    rows, columns = part.shape
    if out.shape[1] == columns:
        return out.view(-1, rows, columns)
    return out.view(rows, -1, columns).transpose(0, 1)


def product_memory(request: FusedRequest, host: Host, rows: int, columns: int) -> tuple[torch.Tensor, bool]:
    """Memory for a product, and whether peers can address it."""
    dtype = getattr(torch, request.out_dtype)
    nbytes = rows * columns * dtype.itemsize
    region = host.symmetric(nbytes)
    buffer = host.scratch(nbytes, "product") if region is None else region.tensor
    return buffer[:nbytes].view(dtype).view(rows, columns), region is not None


def _bytes_of(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.view(-1).view(torch.uint8)


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    stride, reach = [], 1
    for size in reversed(shape):
        stride.append(reach)
        reach *= size
    return tuple(reversed(stride))


def collective_request(
    request: FusedRequest,
    *,
    op: str,
    in_shape: tuple[int, ...],
    in_stride: tuple[int, ...],
    direct_in: bool,
    out_shape: tuple[int, ...],
    out_stride: tuple[int, ...],
    direct_out: bool,
    options: dict[str, Any] | None = None,
) -> CollectiveRequest:
    """Describe the collective; see `iris_core.dispatch.requests.request_of`."""
    dtype = request.dtype if request.op == "all_gather_matmul" else request.out_dtype
    count = 1
    for size in in_shape:
        count *= size
    return CollectiveRequest(
        op=op,
        shape=in_shape,
        dtype=dtype,
        nbytes=count * getattr(torch, dtype).itemsize,
        rank=request.rank,
        group_size=request.group_size,
        target=request.target,
        options={
            "layout": "torch",
            "in_place": False,
            "uneven": False,
            "config": {},
            "in_stride": in_stride,
            "out_shape": out_shape,
            "out_stride": out_stride,
            **(options or {}),
        },
        members=request.members,
        direct_in=direct_in,
        direct_out=direct_out,
    )
