"""Algorithms that every device has: a copy for a rank alone, and torch.matmul with a collective of `ctx.ccl`.

The product is rounded to the output's type before it is reduced; the reduction is in float32 (docs/collectives.md).
The bias is added once: by the first member to its product, where the results of all are added up.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch import products
from iris_core.dispatch.config import TILE_OF_THE_REFERENCE
from iris_core.dispatch.products import FP8, PLAIN, float32_products
from iris_core.dispatch.requests import OPS, POINT_TO_POINT
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, CollectiveRequest, DeviceType, PluginInfo, PluginKind

if TYPE_CHECKING:
    from iris_core.dispatch.config import Config
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest

_BYTES_PER_S, _LAUNCH_S = 1e11, 2e-6


def info(name: str, summary: str) -> PluginInfo:
    """Return the description of algorithms that work on every device."""
    return PluginInfo(name=name, kind=PluginKind.COLLECTIVE, summary=summary, devices=frozenset(DeviceType))


class Local:
    """A collective of a rank alone: a copy, or nothing.

    Args:
        op: the operation.
    """

    name = "local"

    def __init__(self, op: str) -> None:
        self.op = op

    @property
    def info(self) -> PluginInfo:
        """The description."""
        return info("local", "collectives of a rank alone")

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether the rank is alone."""
        if request.group_size > 1:
            return Availability.no(f"it serves a rank alone, and the group has {request.group_size}")
        if request.options.get("config"):
            return Availability.no(f"it has no use for {', '.join(request.options['config'])} of the config")
        return Availability.yes()

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds."""
        return _LAUNCH_S + request.nbytes / _BYTES_PER_S

    def prepare(self, request: CollectiveRequest, host: Any) -> None:
        """Nothing is needed."""

    def launch(self, plan: None, out: torch.Tensor | None, inp: torch.Tensor | None, stream: Any = None) -> None:
        """Copy the input to the output, if they are not the same memory."""
        if out is None or inp is None or (out.data_ptr() == inp.data_ptr() and out.stride() == inp.stride()):
            return
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            out.copy_(inp.view(out.shape))


@dataclass(slots=True)
class _Plan:
    """What was prepared.

    Attributes:
        collective: what communicates.
        rank: this rank in the group.
        tf32: products of float32 may be of TF32.
        fuses_bias, adds_bias: the product adds the bias, or the output gets it afterwards.
        product: what the product is written to; None where it is a part of the output.
        gathered: A of all ranks, where it is gathered, as a matrix and as one part of each.
        aux_buffer: see FusedWorkspace.
    """

    collective: Any
    rank: int
    tf32: bool
    fuses_bias: bool = True
    adds_bias: bool = False
    product: torch.Tensor | None = None
    gathered: tuple[torch.Tensor, torch.Tensor] | None = None
    aux_buffer: torch.Tensor | None = None


class Unfused:
    """One operation as a product and a collective, one after the other.

    Args:
        op: the operation.
    """

    name = "unfused"

    always_measured = True

    collective_config: Config | None = None
    """Config of the collective; by default the library chooses."""

    def __init__(self, op: str) -> None:
        self.op = op

    @property
    def info(self) -> PluginInfo:
        """The description."""
        return info("unfused", "torch.matmul and a collective, one after the other")

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
        """Estimate seconds: one after the other."""
        return product_s(request) + moving_s(request) + fixed_s(request, launches=2, meetings=2)

    # -- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Choose the collective, and find memory for what is between product and collective."""
        op, options, rank = self.op, request.options, request.rank
        tf32 = options["tf32"] or request.dtype in FP8  # which TF32 holds exactly, too
        if op == "all_gather_matmul":
            return self._gather_before(request, host, tf32)
        direct_out = request.reach_out and request.out_stride == dense(request.out_shape)
        if op == "matmul_all_gather" and options["gather_dim"] == 0 and direct_out:
            shape, out = (request.m, request.n), (request.out_shape, request.out_stride, True)
            wanted = collective_request(request, "all_gather", shape, dense(shape), True, out, in_place=True)
            return _Plan(host.collective(wanted, self.collective_config), rank, tf32)
        dtype = getattr(torch, request.out_dtype)
        nbytes = request.m * request.n * dtype.itemsize
        region = host.symmetric(nbytes)
        memory = (host.scratch(nbytes, "product") if region is None else region.tensor)[:nbytes].view(dtype)
        plan = _Plan(host.collective(self._collective(request, region is not None), self.collective_config), rank, tf32)
        plan.product, plan.aux_buffer = memory.view(request.m, request.n), memory.view(torch.uint8)
        # Rows of a bias that differ from member to member can only be added where they belong.
        is_scattered = op == "matmul_reduce_scatter" and options["layout"] == "torch"
        plan.adds_bias = is_scattered and options["bias"] == "rows"
        plan.fuses_bias = not plan.adds_bias and (rank == 0 or op == "matmul_all_gather")
        return plan

    def _collective(self, request: FusedRequest, direct: bool) -> CollectiveRequest:
        """Describe the collective of the product, which is dense."""
        size, (down, right), options = request.group_size, request.out_stride, dict[str, Any]()
        rows, columns = request.m, request.n
        shape: tuple[int, ...] = rows, columns
        stride: tuple[int, ...] = down, right
        if self.op == "matmul_all_gather":
            apart = request.m * down if request.options["gather_dim"] == 0 else request.n * right
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
        op = self.op.removeprefix("matmul_")
        return collective_request(request, op, (rows, columns), (columns, 1), direct, out, **options)

    def _gather_before(self, request: FusedRequest, host: Host, tf32: bool) -> _Plan:
        size, by_rows = request.group_size, request.options["gather_dim"] == 0
        rows, inner = (request.m // size, request.k) if by_rows else (request.m, request.k // size)
        dtype = getattr(torch, request.dtype)
        nbytes = request.m * request.k * dtype.itemsize
        memory = host.scratch(nbytes, "gathered")[:nbytes]
        matrix = memory.view(dtype).view(request.m, request.k)
        parts = matrix.view(size, rows, inner) if by_rows else matrix.view(rows, size, inner).transpose(0, 1)
        direct = request.reach_a and request.a_stride == dense((rows, inner))
        out = tuple(parts.shape), parts.stride(), False
        wanted = collective_request(request, "all_gather", (rows, inner), request.a_stride, direct, out)
        collective = host.collective(wanted, self.collective_config)
        return _Plan(collective, request.rank, tf32, gathered=(matrix, parts), aux_buffer=memory)

    # -- launching ----------------------------------------------------------------------------------------------------
    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply and communicate, in the operation's order."""
        with torch.no_grad():
            if plan.gathered is not None:
                matrix, parts = plan.gathered
                plan.collective.launch(parts, a)
                multiply(matrix, b, bias, out, plan.tf32)
                return
            added = bias if plan.fuses_bias else None
            parts = _parts(out, a.shape[0], b.shape[1]) if self.op == "matmul_all_gather" else out
            if plan.product is None:
                multiply(a, b, added, parts[plan.rank], plan.tf32)
                plan.collective.launch(out, parts[plan.rank])
            else:
                multiply(a, b, added, plan.product, plan.tf32)
                plan.collective.launch(parts, plan.product)
            if plan.adds_bias and bias is not None:
                out.add_(bias)


def local_algorithms() -> list[Any]:
    """Return the algorithms of a rank alone."""
    return [Local(op) for op in OPS if op not in POINT_TO_POINT]


def product_algorithms() -> list[Any]:
    """Return the algorithms of `ctx.ops` that every device has."""
    return [Unfused(op) for op in products.OPS]


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


def _parts(out: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """An output as one part of each member: (size, rows, columns)."""
    if out.shape[1] == columns:
        return out.view(-1, rows, columns)
    return out.view(rows, -1, columns).transpose(0, 1)


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))


def collective_request(
    request: FusedRequest,
    op: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    direct: bool,
    out: tuple[tuple[int, ...], tuple[int, ...], bool],
    **options: Any,
) -> CollectiveRequest:
    """Describe a collective that is a part of an operation, as `CollectiveCall.describe` would.

    Args:
        request: of the operation.
        op: the collective.
        shape, stride: of its input.
        direct: whether peers can address it.
        out: the same of its output.
        **options: which are not as usual.
    """
    dtype = request.dtype if request.op == "all_gather_matmul" else request.out_dtype
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
