"""A product in pieces, each followed by its collective beside the next one: torch.matmul and `ctx.ccl` on two streams.

Pieces are rows of the product, or columns where its rows are divided among the members.  On the CPU there is one
stream, and the pieces go one after the other.  Where product and collective take equally long, half of the time can be
hidden at best; what the collective's programs take from the product's multiprocessors comes off that.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from iris_core.ops.model import fixed_s, moving_s, product_s
from iris_core.ops.unfused import Unfused, collective_request, dense, multiply, product_memory
from iris_core.types import Availability, DeviceType

if TYPE_CHECKING:
    from iris_core.dispatch.bind import Bound
    from iris_core.ops.host import Host
    from iris_core.types import FusedRequest

_PIECES = 4
_UNIT = 8
"""Pieces begin at multiples of so many rows or columns: 16 bytes of the narrowest elements."""


@dataclass(slots=True)
class _Piece:
    """Rows or columns `begin` to `end` of the product: where they are computed, and the collective."""

    begin: int
    end: int
    product: torch.Tensor
    collective: Bound
    computed: Any = None


@dataclass(slots=True)
class _Plan:
    """What was prepared.

    Attributes:
        pieces: of the product.
        side: the second stream.
        bias: what it lies along.
        fuses_bias, adds_bias: the product adds it, or somebody later.
        tf32: products of float32 may be of TF32.
        aux_buffer: see FusedWorkspace.
    """

    bias: str
    pieces: list[_Piece] = field(default_factory=list)
    side: Any = None
    fuses_bias: bool = True
    adds_bias: bool = False
    tf32: bool = False
    aux_buffer: torch.Tensor | None = None


class Overlapped(Unfused):
    """One operation in pieces; all_gather_matmul is none of them: its pieces would not lie together in the output.

    Args:
        op: the operation.
    """

    name = "overlapped"
    uses = ("num_pieces",)
    converts = False
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
        product, moving = product_s(request), moving_s(request)
        pieces = len(self._bounds(request))
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
        length = request.n if self.op == "matmul_reduce_scatter" else request.m
        number = request.options["config"].get("num_pieces", _PIECES)
        step = -(-length // (number * _UNIT)) * _UNIT
        return [(begin, min(begin + step, length)) for begin in range(0, length, step)]

    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Divide the product, and choose the collectives."""
        whole, direct = product_memory(request, host, request.m, request.n)
        flat = whole.view(-1)
        plan = _Plan(request.options["bias"], tf32=request.options["tf32"], aux_buffer=flat.view(torch.uint8))
        by_columns = self.op == "matmul_reduce_scatter"
        known: dict[int, Bound] = {}
        for begin, end in self._bounds(request):
            length = end - begin
            rows, columns = (request.m, length) if by_columns else (length, request.n)
            first = begin * (request.m if by_columns else request.n)
            product = flat[first : first + rows * columns].view(rows, columns)
            if length not in known:
                known[length] = host.collective(self._collective(request, rows, columns, direct))
            plan.pieces.append(_Piece(begin, end, product, known[length]))
        own_rows = by_columns and plan.bias == "rows"
        plan.adds_bias = own_rows
        plan.fuses_bias = not own_rows and (request.rank == 0 or self.op == "matmul_all_gather")
        if request.target.type is not DeviceType.CPU:
            plan.side = torch.cuda.Stream(request.target.index)  # type: ignore[no-untyped-call]
            for piece in plan.pieces:
                piece.computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return plan

    def _collective(self, request: FusedRequest, rows: int, columns: int, direct: bool) -> Any:
        size, (down, right) = request.group_size, request.out_stride
        if self.op == "matmul_reduce_scatter":
            out_shape: tuple[int, ...] = (rows // size, columns)
            out_stride: tuple[int, ...] = (down, right)
        elif self.op == "matmul_all_reduce":
            out_shape, out_stride = (rows, columns), (down, right)
        else:
            apart = request.m * down if request.options["gather_dim"] == 0 else request.n * right
            out_shape, out_stride = (size, rows, columns), (apart, down, right)
        return collective_request(
            request,
            op=self.op.removeprefix("matmul_"),
            in_shape=(rows, columns),
            in_stride=(columns, 1),
            direct_in=direct,
            out_shape=out_shape,
            out_stride=out_stride,
            direct_out=request.reach_out and out_stride == dense(out_shape),
            options={} if self.op == "matmul_all_gather" else {"reduction": "sum"},
        )

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply piece by piece, and communicate beside it."""
        with torch.no_grad():
            parts = self._parts(out, a, b)
            main = None if plan.side is None else torch.cuda.current_stream(plan.side.device)
            for piece in plan.pieces:
                left, right, target = a, b, parts
                if self.op == "matmul_reduce_scatter":
                    right, target = b[:, piece.begin : piece.end], parts[:, piece.begin : piece.end]
                else:
                    left, target = a[piece.begin : piece.end], parts[..., piece.begin : piece.end, :]
                added = self._bias(bias, plan.bias, piece) if plan.fuses_bias else None
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
            if plan.adds_bias and bias is not None:
                out.add_(bias)

    def _parts(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The output; where products are gathered, as one matrix of each member."""
        rows, columns = a.shape[0], b.shape[1]
        if self.op != "matmul_all_gather":
            return out
        if out.shape[1] == columns:
            return out.view(-1, rows, columns)
        return out.view(rows, -1, columns).transpose(0, 1)

    def _bias(self, bias: torch.Tensor | None, along: str, piece: _Piece) -> torch.Tensor | None:
        """What belongs to a piece."""
        if bias is None:
            return None
        if along == "rows":
            return bias[piece.begin : piece.end]
        return bias[..., piece.begin : piece.end] if self.op == "matmul_reduce_scatter" else bias


def overlapped_operations(ops: tuple[str, ...]) -> list[Overlapped]:
    """Return the algorithms for those of the operations that can go in pieces."""
    return [Overlapped(op) for op in ops if op != "all_gather_matmul"]
