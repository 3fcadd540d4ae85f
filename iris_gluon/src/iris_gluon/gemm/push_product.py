"""`hopper_push`: matmul_all_gather.  Every tile goes to the outputs of all by TMA, while the next one is computed.

Chosen on Hopper, by name or where a table says so.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import TYPE_CHECKING

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon.gemm.fused import RUNTIME, Hopper, biased, matrix_at, operand
from iris_gluon.gemm.hopper import multiply_tiles
from iris_gluon.gemm.order import RowGroups
from iris_gluon.gemm.sinks import ScatterTile
from iris_triton.collectives.parts.barrier import meet_and_leave, told, told_second
from iris_triton.gemm.parts.fused import Plan, programs_for, staged_memory
from iris_triton.gemm.parts.tiles import PER_CALL, announce_and_meet

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_product(
    out, a, b, bias, control, bases, me, rank, m, n, k, a_down, b_down, out_down, bias_step, tiles_m, tiles_n, k_tiles,
    timeout_ns, status,
    SIZE: gl.constexpr, DIM: gl.constexpr, BIAS: gl.constexpr, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Store A @ B into its place in the outputs of all members.

    Two meetings: the outputs may be written to; they are complete.

    Args:
        out: the output of this member, which others write to: dense rows.
        a, b: the operands.
        bias: or None; see BIAS.
        control: the team's control region (int64).
        bases: int64[SIZE], the members' heaps.
        me, rank: the caller's index in the team, and in the world.
        m, n, k: of the product.
        a_down, b_down, out_down: elements from row to row, or column to column; multiples of 16 bytes.
        bias_step: elements between values of the bias.
        tiles_m, tiles_n, k_tiles: tiles of the product, and steps of the inner dimension.
        timeout_ns, status: bound of waits, and where they report.
        SIZE: number of members.
        DIM: 0 if the products lie below each other in the output, 1 if beside each other.
        BIAS: what the bias lies along: "columns", "rows" (of this member's product) or "none".
        TURNED_A, TURNED_B: the operand lies by columns, not by rows.
        BLOCK_M ... NUM_WARPS: see `iris_gluon.gemm.GemmConfig`.
    """
    ITEM: gl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    row, epoch = announce_and_meet(control, bases, me, out, out_down, timeout_ns, status, rank, SIZE)
    matrices = ()
    for i in gl.static_range(SIZE):  # the next member first, the own output last
        peer = (me + 1 + i) % SIZE
        stride = told_second(row, peer, SIZE)
        address = gl.load(bases + peer) + told(row, peer, SIZE)
        if DIM == 0:
            address += gl.cast(me, gl.int64) * m * stride * ITEM
        else:
            address += gl.cast(me, gl.int64) * n * ITEM
        matrices = matrices + (matrix_at(address, out, m, n, stride, BLOCK_M, BLOCK_N // PARTS),)  # noqa: RUF005
    multiply_tiles(
        operand(a, m, k, a_down, BLOCK_M, BLOCK_K, TURNED_A), operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        RowGroups(tiles_m, tiles_n, GROUP), biased(ScatterTile(matrices), bias, bias_step, m, n, BIAS),
        tiles_m * tiles_n, k_tiles, STAGES, PARTS, NUM_WARPS, 0, TURNED_A, TURNED_B,
    )  # fmt: skip
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class HopperPush(Hopper):
    """`hopper_push` of matmul_all_gather."""

    rows_owned = False

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory where the output cannot be reached, bind the kernel."""
        gemm = self._gemm(request, self._processors(request, host, most=host.team.max_programs))
        staged = memory = None
        if not request.reach_out:
            memory, staged = staged_memory(request, host, self.name, 0, stages=True)
        arguments, compiler = self._arguments(request, host, gemm)
        arguments |= self._operand_a(request) | {
            "out_down": request.out_stride[0] if staged is None else staged.stride(0),
            "tiles_m": -(-request.m // gemm.block_m),
            "DIM": request.options["gather_dim"],
        }
        programs = programs_for(request, host, gemm.tiles(request.m, request.n), meeting=True)
        kernel = self.bind(request, host, push_product, programs, arguments, compiler)
        return Plan(kernel, staged_out=staged, aux_buffer=memory)
