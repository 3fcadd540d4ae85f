"""Fused operations on every device: torch.matmul with a collective of `ctx.ccl`, one after the other.

The product is rounded to the output's type before it is reduced; the reduction is in float32 (docs/collectives.md).
The bias is added once: by the first member to its product, where the results of all are added up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from iris_core.dispatch import FP8, PLAIN, products
from iris_core.dispatch.config import AMDS_TILE, Config
from iris_core.dispatch.team import Host
from iris_core.providers.model import everywhere, fixed_s, moving_s, product_s
from iris_core.providers.parts import dense, part_of, scratch_of
from iris_core.types import Availability, CollectiveRequest, FusedRequest


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
    gather_scales: Callable[[torch.Tensor], torch.Tensor] | None = None  # of A, of all ranks


class Unfused:
    """One operation as a product and a collective, one after the other."""

    name = "unfused"
    info = everywhere("unfused", "torch.matmul and a collective, one after the other")
    always_measured = spans_nodes = True
    scaled: tuple[str, ...] = products.SCALED

    collective_config: Config | None = None  # config of the collective; by default the library chooses

    def __init__(self, op: str) -> None:
        self.op = op

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch multiplies such elements; of the config, only what defines the result has a meaning."""
        is_scaled = request.scales != "none"
        if request.dtype not in PLAIN and not (request.dtype in FP8 and (request.group_size == 1 or is_scaled)):
            # alone, as the output's type, which holds 8-bit floats exactly; with peers other algorithms multiply them
            return Availability.no(f"torch.matmul does not multiply {request.dtype}")
        defining = AMDS_TILE if request.options["layout"] == "tiles" else ()
        if unused := [name for name in request.options["config"] if name not in defining]:
            return Availability.no(f"it has no use for {', '.join(unused)} of the config")
        return Availability.yes()

    def cost(self, request: FusedRequest) -> float:
        return product_s(request) + moving_s(request) + fixed_s(request, launches=2, barriers=2)

    # -- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Choose the collective, and find memory for what is between product and collective."""
        return self._prepare(request, host)

    def _prepare(self, request: FusedRequest, host: Host, which: str = "") -> _Plan:
        """Return the same; `which` names the memory."""
        options, rank, size = request.options, request.rank, request.group_size
        tf32 = options["tf32"] or request.dtype in FP8  # which TF32 holds exactly, too
        if self.op == "all_gather_matmul":
            by_rows = options["gather_dim"] == 0
            rows, inner = (request.m // size, request.k) if by_rows else (request.m, request.k // size)
            dtype = getattr(torch, request.dtype)
            memory = host.scratch(request.m * request.k * dtype.itemsize, f"gathered{which}")
            memory = memory[: request.m * request.k * dtype.itemsize]
            matrix = memory.view(dtype).view(request.m, request.k)
            parts = matrix.view(size, rows, inner) if by_rows else matrix.view(rows, size, inner).transpose(0, 1)
            direct = request.reach_a and request.a_stride == dense((rows, inner))
            given = (rows, inner), request.a_stride, direct
            wanted = part_of(request, "all_gather", given, (tuple(parts.shape), parts.stride(), False))
            if request.scales != "none":  # not every collective knows 8-bit floats
                wanted, parts = replace(wanted, dtype="uint8"), parts.view(torch.uint8)
            collective = host.collective(wanted, self.collective_config)
            scales = None if request.scales == "none" else bind_scales(request, host)
            return _Plan(collective, rank, tf32, gathered=(matrix, parts), aux_buffer=memory, gather_scales=scales)
        dense_out = dense(request.out_shape)
        direct_out = request.reach_out and request.out_stride == dense_out
        if self.op == "matmul_all_gather" and options["gather_dim"] == 0 and direct_out:
            shape = request.m, request.n
            out = request.out_shape, dense_out, True
            wanted = part_of(request, "all_gather", (shape, dense(shape), True), out, in_place=True)
            return _Plan(host.collective(wanted, self.collective_config), rank, tf32)
        dtype = getattr(torch, request.out_dtype)
        nbytes = request.m * request.n * dtype.itemsize
        region = host.symmetric(nbytes)
        memory = (host.scratch(nbytes, f"product{which}") if region is None else region.tensor)[:nbytes].view(dtype)
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
                tile = {**AMDS_TILE, **request.options["config"]}
                names = {"block_size_m": "block_size_m", "block_size_n": "block_size_n", "swizzle_size": "group_size_m"}
                options["config"] = {theirs: tile[ours] for theirs, ours in names.items()}
            elif self.op == "matmul_reduce_scatter":
                shape = rows // size, columns
        out = shape, stride, request.reach_out and stride == dense(shape)
        given = (rows, columns), (columns, 1), direct
        return part_of(request, self.op.removeprefix("matmul_"), given, out, **options)

    # -- launching ----------------------------------------------------------------------------------------------------
    def launch(
        self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
        *scales: torch.Tensor,
    ) -> None:  # fmt: skip
        if torch.is_grad_enabled():  # in a thread of its own, or by `bind`, whose call looks at no tensor
            with torch.no_grad():
                self.launch(plan, out, a, b, bias, *scales)
            return
        self._begin(plan, out, a, b, bias, plan.collective.launch, *scales)()

    def _begin(
        self, plan: _Plan, out: Any, a: Any, b: Any, bias: Any, go: Callable[..., Any], *scales: Any
    ) -> Callable[[], None]:
        """Do what comes before the end of the collective, which `go` launches, and return what does the rest."""
        if plan.gathered is not None:
            if plan.gather_scales is not None:
                scales, a = (plan.gather_scales(scales[0]), scales[1]), a.view(torch.uint8)
            work = go(plan.gathered[1], a)
            return partial(self._end, plan, work, out, b, bias, *scales)
        parts, rows, columns = out, a.shape[0], b.shape[1]
        if self.op == "matmul_all_gather":  # one part of each member: (size, rows, columns)
            below = out.shape[1] == columns
            parts = out.unflatten(0, (-1, rows)) if below else out.unflatten(1, (-1, columns)).transpose(0, 1)
        product = parts[plan.rank] if plan.product is None else plan.product
        multiply(a, b, bias if plan.fuses_bias else None, product, plan.tf32, *scales)
        work = go(out if plan.product is None else parts, product)
        return partial(self._end, plan, work, out, b, bias)

    def _end(self, plan: _Plan, work: Any, out: Any, b: Any, bias: Any, *scales: Any) -> None:
        if work is not None:
            work.wait()
        if plan.gathered is not None and out.dim() == 2:
            multiply(plan.gathered[0], b, bias, out, plan.tf32, *scales)
        elif plan.gathered is not None:  # of a chunk, the rows of each member
            for rank, rows in enumerate(plan.gathered[1]):
                own = bias[rank] if bias is not None and bias.dim() == out.dim() else bias
                multiply(rows, b, own, out[rank], plan.tf32)
        elif plan.adds_bias and bias is not None:
            out.add_(bias)


def scales_shape(request: FusedRequest) -> tuple[int, int]:
    """Shape of the scales of A of request.m rows; of no columns without scales."""
    if request.scales == "none":
        return request.m, 0
    return request.m, 1 if request.scales == products.SCALED[0] else -(-request.k // products.SCALED_BLOCK)


def bind_scales(request: FusedRequest, host: Host) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that gathers the scales of A of all ranks, request.m rows of them, contiguous.

    Collective: every member calls it, and what it returns.
    """
    whole, part = scales_shape(request), request.m // request.group_size
    memory, own, columns = scratch_of(host, "gathered scales", math.prod(whole), "float32"), (part, whole[1]), whole[1]
    stride = request.scale_strides[0] if columns > 1 else (request.scale_strides[0][0], 1)
    wanted = part_of(request, "all_gather", (own, stride, False), (whole, dense(whole), False))
    gather = host.collective(replace(wanted, dtype="float32", nbytes=part * columns * 4)).launch

    def run(scales: torch.Tensor) -> torch.Tensor:
        gather(memory.view(whole), scales.view(own) if columns == 1 else scales)
        return memory.view(whole)

    return run


def multiply(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tf32: bool,
    a_scales: torch.Tensor | None = None, b_scales: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Write a @ b, + bias if there is one, to `out`; on GPUs `tf32` says whether float32 may be multiplied as that.

    Operands of another type than the output's become of that type; with scales, those of `ctx.ops`, they are multiplied
    by torch._scaled_mm where it takes them, else as float32.
    """
    if a_scales is not None and b_scales is not None:
        _multiply_scaled(a, b, bias, out, tf32 and out.dtype is not torch.float32, a_scales, b_scales)
        return
    if a.dtype is not out.dtype:
        a, b = a.to(out.dtype), b.to(out.dtype)
    if a.dtype is torch.float32 and a.is_cuda:
        with products.float32_products(tf32):
            _multiply_plain(a, b, bias, out)
    else:
        _multiply_plain(a, b, bias, out)


def _multiply_plain(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _multiply_scaled(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tf32: bool,
    a_scales: torch.Tensor, b_scales: torch.Tensor,
) -> None:  # fmt: skip
    (rows, inner), columns = a.shape, b.shape[1]
    of_rows = b_scales.dim() == 1 or tuple(b_scales.shape) == (1, columns)
    if of_rows:
        left, right = a_scales.reshape(rows, 1).contiguous(), b_scales.reshape(1, columns).contiguous()
    if _is_for_torch(a, b, out, of_rows):
        if not of_rows:
            left, right = (each.t().contiguous().t() for each in (a_scales, b_scales))
        product = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
        how: dict[str, Any] = {"out_dtype": out.dtype, "use_fast_accum": of_rows, "out": product}
        torch._scaled_mm(a, b, left, right, **how)
        if bias is not None:
            product.add_(bias)
        if product is not out:
            out.copy_(product)
        return
    if not of_rows:
        left = a_scales.repeat_interleave(products.SCALED_BLOCK, 1)[:, :inner]
        wide = b_scales.repeat_interleave(products.SCALED_BLOCK, 1)[:, :columns]
        right = wide.repeat_interleave(products.SCALED_BLOCK, 0)[:inner]
    product = out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
    multiply(a.float() * left, b.float() * right, None if bias is None else bias.float(), product, tf32)
    if product is not out:
        out.copy_(product)


_CUDA = tuple(map(int, (torch.version.cuda or "0").split(".")))


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    """Return that of an NVIDIA GPU: torch takes 5 us for it."""
    return torch.cuda.get_device_capability(index) if torch.version.hip is None else (0, 0)


def _is_for_torch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, of_rows: bool) -> bool:
    """Whether torch._scaled_mm takes such operands: it does on NVIDIA's GPUs from Hopper on, blocks on Hopper only.

    Of blocks, cuBLAS reads scales of B at multiples of four blocks, which only newer versions of torch ask for.
    """
    capability = _capability(a.device.index) if a.is_cuda else (0, 0)
    dense = a.stride(1) == 1 == b.stride(0) and a.stride(0) % 16 == 0 == b.stride(1) % 16
    aligned = all(each.data_ptr() % 16 == 0 for each in (a, b, out))
    usual = torch.float8_e4m3fn
    if of_rows:
        known = capability >= (9, 0) and usual in (a.dtype, b.dtype)
    else:
        known = capability == (9, 0) and _CUDA >= (12, 9) and usual is a.dtype is b.dtype
        known = known and a.shape[0] % 4 == 0 == a.shape[1] % (4 * products.SCALED_BLOCK)
    return known and dense and aligned and a.shape[1] % 16 == 0 == b.shape[1] % 16 and out.dtype is torch.bfloat16
