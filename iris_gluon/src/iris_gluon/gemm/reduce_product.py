"""`hopper_push`: matmul_reduce_scatter; `hopper_two_shot`: matmul_all_reduce.  Tiles go to slots of their owners.

Chosen on Hopper, by name or where a table says so.  `iris_triton.gemm.parts.sum_slots` adds the slots up afterwards.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.types import Availability
from iris_gluon.collectives.push_bulk import WithScratch
from iris_gluon.gemm.fused import FULL_BLOCK, RUNTIME, USED_CONFIG, RowsOwned, matrix_at, operand
from iris_gluon.gemm.hopper import multiply_tiles
from iris_gluon.gemm.order import OwnersInTurn
from iris_gluon.gemm.sinks import OwnersSlot
from iris_triton.collectives.parts.barrier import last_epoch, meet, meet_and_leave, row_of
from iris_triton.gemm.parts.fused import Plan, programs_for, staged_memory
from iris_triton.gemm.parts.sum_slots import bind_sum
from iris_triton.gemm.parts.tiles import PER_CALL, announce

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_triton.launcher import BoundKernel


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def reduce_product(
    out, a, b, control, slots, bases, me, rank, m, n, k, a_down, b_down, out_down, rows_each, tiles_n, k_tiles, chunk,
    timeout_ns, status,
    SIZE: gl.constexpr, FORM: gl.constexpr, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Store A @ B into slots of the owners of its rows, who add them up when this launch is over.

    Meetings: peers may be written to; the slots are full.  Only programs of the same number meet, but when all of a
    launch have met, all of the others' tiles are there.

    Args (beside those of `push_product`):
        out: with FORM "two_shot", members are told where it is, and its rows are dense and aligned.
        slots: symmetric memory for SIZE matrices of rows_each x n elements, of the output's type.
        n: a multiple of 8.
        out_down: stride in elements.
        rows_each: rows that a member owns, a multiple of BLOCK_M; the last members may own fewer, or none.
        chunk: see `OwnersInTurn`.
        FORM: "rows" or "two_shot"; see `iris_triton.gemm.parts.sum_slots`.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    if FORM == "two_shot":
        announce(row, bases, me, out, out_down, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    own = gl.load(bases + me)
    mine = slots.to(gl.int64) - own + gl.cast(me, gl.int64) * rows_each * n * 2
    matrices = ()
    for i in gl.static_range(SIZE):
        address = gl.load(bases + i) + mine
        part = matrix_at(address, out, rows_each, n, gl.cast(n, gl.int64), BLOCK_M, BLOCK_N // PARTS)
        matrices = matrices + (part,)  # noqa: RUF005
    tiles_each = rows_each // BLOCK_M
    order = OwnersInTurn(tiles_each, tiles_n, me, chunk, GROUP, SIZE)
    multiply_tiles(
        operand(a, m, k, a_down, BLOCK_M, BLOCK_K, TURNED_A), operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        order, OwnersSlot(matrices, rows_each), tiles_each * tiles_n * SIZE, k_tiles, STAGES, PARTS, NUM_WARPS, 0,
        TURNED_A, TURNED_B,
    )  # fmt: skip
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


_RUN = 1 << 20
"""Tiles in a row of one owner: all that it has."""

_RUN_FLOPS = 2.4e11
"""From so many multiplications on, the owners' tiles are sent in runs: between both sizes at which it was measured."""


@dataclass(slots=True, kw_only=True)
class _ReducePlan(Plan):
    """As `Plan`; and the kernel that adds up: it takes the output and, if there is one, the bias."""

    add: BoundKernel


class HopperReduce(RowsOwned):
    """matmul_reduce_scatter or matmul_all_reduce: tiles go to slots of their owners by TMA, who add them up.

    `chunk_size` tiles in a row go to the same owner, then as many to the next one.

    Args:
        op: which of the two.
    """

    uses: tuple[str, ...] = (*USED_CONFIG, "chunk_size")

    def __init__(self, op: str) -> None:
        super().__init__(op, "hopper_push" if op == "matmul_reduce_scatter" else "hopper_two_shot")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer or self.op == "matmul_all_reduce":
            return answer
        if request.options["layout"] != "torch":
            return Availability.no("members own rows, not runs of tiles")
        problem = self._rows_problem(request)
        return Availability.no(problem) if problem else answer

    def _block_m(self, request: FusedRequest) -> int:
        # the last members may own fewer rows of a product that all get
        return FULL_BLOCK if self.op == "matmul_all_reduce" else super()._block_m(request)

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        other, *more = super()._offered(request)
        order = {"chunk_size": 1 if self._in_runs(request) else _RUN}
        return [other, order, {**other, **order}, *more[:2]]

    @staticmethod
    def _in_runs(request: FusedRequest) -> bool:
        return 2.0 * request.m * request.n * request.k > _RUN_FLOPS

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides what is sent, except in one step the sums."""
        return self.model(request, meetings=3 if self.op == "matmul_all_reduce" else 2, launches=2, seen=1 / 4)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the slots, bind the kernels."""
        gemm = self._gemm(request, self._processors(request, host, meeting=True))
        size, item = host.team.size, getattr(torch, request.dtype).itemsize
        two_shot = self.op == "matmul_all_reduce"
        tiles_each = math.ceil(math.ceil(request.m / gemm.block_m) / size)
        rows_each = tiles_each * gemm.block_m
        slots_nbytes = size * rows_each * request.n * item
        stages = two_shot and not request.reach_out
        memory, staged = staged_memory(request, host, self.name, slots_nbytes, stages=stages)
        slots = memory[:slots_nbytes].view(getattr(torch, request.out_dtype))
        stride = request.out_stride if staged is None else (staged.stride(0), staged.stride(1))
        arguments, compiler = self._arguments(request, host, gemm)
        del arguments["BIAS"], arguments["bias_step"]
        per_owner = tiles_each * int(arguments["tiles_n"])
        chunk = request.options["config"].get("chunk_size", _RUN if self._in_runs(request) else 1)
        arguments |= {
            "slots": slots,
            "out_down": stride[0],
            "rows_each": rows_each,
            "chunk": min(chunk, per_owner),
            "FORM": "two_shot" if two_shot else "rows",
        }
        programs = programs_for(request, host, per_owner * size, meeting=True)
        kernel = WithScratch(reduce_product, programs, arguments, ("out", "a", "b"), host.team.device, compiler)
        add = bind_sum(request, host, slots, rows_each, stride)
        return _ReducePlan(kernel, staged_out=staged, aux_buffer=memory, add=add)

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Multiply, then add up."""
        target = out if plan.staged_out is None else plan.staged_out
        plan.kernel(None, target, a, b)
        plan.add(None, target, *(() if bias is None else (bias,)))
        if plan.staged_out is not None:
            out.detach().copy_(plan.staged_out)
