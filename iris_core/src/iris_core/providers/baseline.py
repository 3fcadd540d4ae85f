"""Algorithms that every device has: a copy for a rank alone, and torch.matmul with a collective of `ctx.ccl`.

The product is rounded to the output's type before it is reduced; the reduction is in float32 (docs/collectives.md).
The bias is added once: by the first member to its product, where the results of all are added up.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
_PIECES = 4
_UNIT = 8
"""Pieces begin at multiples of so many rows or columns: 16 bytes of the narrowest elements."""


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
class _Piece:
    """Rows or columns `begin` to `end` of the product: where they are computed, and the collective.

    `product` is None where it is a part of the output.
    """

    begin: int
    end: int
    product: torch.Tensor | None
    collective: Any
    computed: Any = None


@dataclass(slots=True)
class _Plan:
    """What was prepared.

    Attributes:
        bias: what it lies along.
        pieces: of the product.
        gathered: A of all ranks, where it is gathered, as a matrix and as one part of each; there are no pieces then.
        collective: which gathers it.
        side: the second stream, if there are several pieces.
        fuses_bias, adds_bias: the product adds it, or somebody later.
        rank: this rank in the group.
        tf32: products of float32 may be of TF32.
        aux_buffer: see FusedWorkspace.
    """

    bias: str
    pieces: list[_Piece] = field(default_factory=list)
    gathered: tuple[torch.Tensor, torch.Tensor] | None = None
    collective: Any = None
    side: Any = None
    fuses_bias: bool = True
    adds_bias: bool = False
    rank: int = 0
    tf32: bool = False
    aux_buffer: torch.Tensor | None = None


class Unfused:
    """One operation as a product and a collective, one after the other.

    Args:
        op: the operation.
    """

    name = "unfused"

    uses: tuple[str, ...] = ()
    """Fields of the config that it fulfils, beside those that define the result."""

    always_measured = True

    collective_config: Config | None = None
    """Config of the collective; by default the library chooses."""

    converts = True
    """8-bit floats are multiplied as the output's type, which holds them exactly, where a rank is alone: other
    algorithms need others."""

    def __init__(self, op: str) -> None:
        self.op = op

    @property
    def info(self) -> PluginInfo:
        """The description."""
        return info("unfused", "torch.matmul and a collective, one after the other")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch multiplies such elements; of the config, only what defines the result has a meaning."""
        if request.dtype not in PLAIN and not (request.dtype in FP8 and request.group_size == 1 and self.converts):
            return Availability.no(f"torch.matmul does not multiply {request.dtype}")
        defining = TILE_OF_THE_REFERENCE if request.options["layout"] == "tiles" else ()
        if unused := [name for name in request.options["config"] if name not in (*defining, *self.uses)]:
            return Availability.no(f"it has no use for {', '.join(unused)} of the config")
        return Availability.yes()

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: one after the other."""
        return product_s(request) + moving_s(request) + fixed_s(request, launches=2, meetings=2)

    def _bounds(self, request: FusedRequest) -> list[tuple[int, int]]:
        """Begin and end of the pieces: columns where the product's rows are divided among the members, else rows."""
        return [(0, request.n if self.op == "matmul_reduce_scatter" else request.m)]

    # -- preparing ----------------------------------------------------------------------------------------------------
    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Choose the collectives, and find memory for what is between product and collective."""
        op, options = self.op, request.options
        plan = _Plan(options["bias"], rank=request.rank)
        plan.tf32 = options["tf32"] or request.dtype in FP8  # which TF32 holds exactly, too
        if op == "all_gather_matmul":
            return self._gather_before(plan, request, host)
        direct_out = request.reach_out and request.out_stride == dense(request.out_shape)
        bounds = self._bounds(request)
        if op == "matmul_all_gather" and options["gather_dim"] == 0 and direct_out and len(bounds) == 1:
            shape, out = (request.m, request.n), (request.out_shape, request.out_stride, True)
            wanted = collective_request(request, "all_gather", shape, dense(shape), True, out, in_place=True)
            plan.pieces.append(_Piece(0, request.m, None, host.collective(wanted, self.collective_config)))
            return plan
        dtype = getattr(torch, request.out_dtype)
        nbytes = request.m * request.n * dtype.itemsize
        region = host.symmetric(nbytes)
        memory = (host.scratch(nbytes, "product") if region is None else region.tensor)[:nbytes].view(dtype)
        plan.aux_buffer = memory.view(torch.uint8)
        by_columns, known = op == "matmul_reduce_scatter", dict[int, Any]()
        for begin, end in bounds:
            length = end - begin
            rows, columns = (request.m, length) if by_columns else (length, request.n)
            first = begin * (request.m if by_columns else request.n)
            if length not in known:
                known[length] = host.collective(
                    self._collective(request, rows, columns, region is not None), self.collective_config
                )
            product = memory[first : first + rows * columns].view(rows, columns)
            plan.pieces.append(_Piece(begin, end, product, known[length]))
        # Rows of a bias that differ from member to member can only be added where they belong.
        plan.adds_bias = by_columns and options["layout"] == "torch" and plan.bias == "rows"
        plan.fuses_bias = not plan.adds_bias and (request.rank == 0 or op == "matmul_all_gather")
        if len(bounds) > 1 and request.target.type is not DeviceType.CPU:
            plan.side = torch.cuda.Stream(request.target.index)  # type: ignore[no-untyped-call]
            for piece in plan.pieces:
                piece.computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return plan

    def _collective(self, request: FusedRequest, rows: int, columns: int, direct: bool) -> CollectiveRequest:
        """The collective of a piece, whose product is dense."""
        size, (down, right), options = request.group_size, request.out_stride, dict[str, Any]()
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

    def _gather_before(self, plan: _Plan, request: FusedRequest, host: Host) -> _Plan:
        size, by_rows = request.group_size, request.options["gather_dim"] == 0
        rows, inner = (request.m // size, request.k) if by_rows else (request.m, request.k // size)
        dtype = getattr(torch, request.dtype)
        nbytes = request.m * request.k * dtype.itemsize
        plan.aux_buffer = host.scratch(nbytes, "gathered")[:nbytes]
        matrix = plan.aux_buffer.view(dtype).view(request.m, request.k)
        parts = matrix.view(size, rows, inner) if by_rows else matrix.view(rows, size, inner).transpose(0, 1)
        direct = request.reach_a and request.a_stride == dense((rows, inner))
        out = tuple(parts.shape), parts.stride(), False
        wanted = collective_request(request, "all_gather", (rows, inner), request.a_stride, direct, out)
        plan.gathered, plan.collective = (matrix, parts), host.collective(wanted, self.collective_config)
        return plan

    # -- launching ----------------------------------------------------------------------------------------------------
    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply and communicate: in the operation's order, or one piece after the other, on two streams."""
        with torch.no_grad():
            if plan.gathered is not None:
                matrix, parts = plan.gathered
                plan.collective.launch(parts, a)
                multiply(matrix, b, bias, out, plan.tf32)
                return
            added = bias if plan.fuses_bias else None
            parts = _parts(out, a.shape[0], b.shape[1]) if self.op == "matmul_all_gather" else out
            if len(plan.pieces) > 1:
                self._launch_pieces(plan, parts, a, b, added)
            elif (piece := plan.pieces[0]).product is not None:
                multiply(a, b, added, piece.product, plan.tf32)
                piece.collective.launch(parts, piece.product)
            else:
                multiply(a, b, added, parts[plan.rank], plan.tf32)
                piece.collective.launch(out, parts[plan.rank])
            if plan.adds_bias and bias is not None:
                out.add_(bias)

    def _launch_pieces(
        self, plan: _Plan, parts: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Compute each piece beside the collective of the one before; on the CPU there is one stream."""
        main = None if plan.side is None else torch.cuda.current_stream(plan.side.device)
        for piece in plan.pieces:
            span, left, right, added = slice(piece.begin, piece.end), a, b, bias
            if self.op == "matmul_reduce_scatter":
                right, target = b[:, span], parts[:, span]
                added = None if bias is None or plan.bias == "rows" else bias[..., span]
            else:
                left, target = a[span], parts[..., span, :]
                added = bias[span] if bias is not None and plan.bias == "rows" else bias
            assert piece.product is not None
            multiply(left, right, added, piece.product, plan.tf32)
            if main is None:
                piece.collective.launch(target, piece.product)
                continue
            piece.computed.record(main)
            plan.side.wait_event(piece.computed)
            with torch.cuda.stream(plan.side):
                piece.collective.launch(target, piece.product)
        if main is not None:
            main.wait_stream(plan.side)


class Overlapped(Unfused):
    """One operation in pieces, each followed by its collective beside the next one.

    Where product and collective take equally long, half of the time can be hidden at best; what the collective's
    programs take from the product's multiprocessors comes off that.  all_gather_matmul is none of them: its pieces
    would not lie together in the output.
    """

    name = "overlapped"
    uses = ("num_pieces",)
    converts = False
    always_measured = False
    measured_only = True
    """How much the two disturb each other, no model knows."""

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether torch multiplies such elements, and whether there is something to divide."""
        answer = super().supports(request)
        if not answer:
            return answer
        if request.group_size == 1:
            return Availability.no("a rank alone has nobody to communicate with")
        if request.options["layout"] != "torch":
            return Availability.no("pieces are rows or columns, not runs of tiles")
        if len(self._bounds(request)) < 2:
            return Availability.no(f"there is nothing to divide: a piece has {_UNIT} rows or columns at least")
        return answer

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the longer one, and a piece of the other."""
        product, moving, pieces = product_s(request), moving_s(request), len(self._bounds(request))
        hidden = max(product, moving) + min(product, moving) / pieces
        return hidden + pieces * fixed_s(request, launches=2, meetings=2)

    def host_seconds(self, request: FusedRequest) -> float:
        """Estimate what a call costs the CPU: two launches and two waits for each piece (hosts of H200s)."""
        return 0.0 if request.target.type is DeviceType.CPU else 6e-5 * len(self._bounds(request))

    def tunings(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Return numbers of pieces that are worth measuring, the own choice first."""
        found: dict[int, dict[str, Any]] = {}
        for config in ({}, {"num_pieces": 2}, {"num_pieces": 8}):
            wish = {**config, **request.options["config"]}
            divided = replace(request, options={**request.options, "config": wish})
            found.setdefault(len(self._bounds(divided)), config)
        return list(found.values())

    def _bounds(self, request: FusedRequest) -> list[tuple[int, int]]:
        """Begin and end of the pieces; all but the last one are equally long."""
        ((_, length),) = super()._bounds(request)
        number = request.options["config"].get("num_pieces", _PIECES)
        step = -(-length // (number * _UNIT)) * _UNIT
        return [(begin, min(begin + step, length)) for begin in range(0, length, step)]


def local_algorithms() -> list[Any]:
    """Return the algorithms of a rank alone."""
    return [Local(op) for op in OPS if op not in POINT_TO_POINT]


def product_algorithms() -> list[Any]:
    """Return the algorithms of `ctx.ops` that every device has."""
    overlapped = [Overlapped(op) for op in products.OPS if op != "all_gather_matmul"]
    return [*(Unfused(op) for op in products.OPS), *overlapped]


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
