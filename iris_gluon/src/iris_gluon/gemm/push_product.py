"""`hopper_push`: matmul_all_gather.  Every tile goes to the outputs of all by TMA, while the next one is computed.

Chosen on Hopper, by name or where a table says so.
"""
# mypy: disable-error-code="assignment"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.dispatch.team import Host
from iris_core.types import FusedRequest
from iris_gluon.gemm.fused import RUNTIME, Hopper, biased, matrix_at, operand, scales_of
from iris_gluon.gemm.hopper import multiply_tiles, part_rows
from iris_gluon.gemm.order import RowGroups
from iris_gluon.gemm.sinks import StoreTile
from iris_triton.collectives.parts.barrier import last_barrier, sent, sent_second
from iris_triton.gemm.parts.fused import Plan, staged_memory
from iris_triton.gemm.parts.tiles import PER_CALL, begin_call


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_product(
    out, a, b, bias, control, bases, me, rank, m, n, k, a_down, b_down, out_down, bias_step, tiles_m, tiles_n, k_tiles,
    timeout_ns, status, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right,
    SIZE: gl.constexpr, DIM: gl.constexpr, BIAS: gl.constexpr, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, NUM_WARPS: gl.constexpr, SCALES: gl.constexpr
):  # fmt: skip
    """Store A @ B into its part of the outputs of all members, concatenated by rows or, with DIM 1, by columns.

    Two barriers: the outputs may be written to; they are complete.

    Args (beside those of `iris_triton.gemm.parts.tiles`):
        out: the output of this member, which others write to: dense rows.
        a_down, b_down, out_down: elements from row to row, or column to column; multiples of 16 bytes.
        k_tiles: steps of the inner dimension.
        TURNED_A, TURNED_B: the operand lies by columns, not by rows.
        BLOCK_M ... NUM_WARPS: see `iris_gluon.gemm.GemmConfig`.
    """
    ITEM: gl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    ROWS: gl.constexpr = part_rows(BLOCK_M, NUM_WARPS, SCALES)
    row, epoch = begin_call(control, bases, me, out, out_down, timeout_ns, status, rank, SIZE)
    matrices = ()
    for i in gl.static_range(SIZE):  # the next member first, the own output last
        peer = (me + 1 + i) % SIZE
        stride = sent_second(row, peer, SIZE)
        address = gl.load(bases + peer) + sent(row, peer, SIZE)
        if DIM == 0:
            address += gl.cast(me, gl.int64) * m * stride * ITEM
        else:
            address += gl.cast(me, gl.int64) * n * ITEM
        matrices = matrices + (matrix_at(address, out, m, n, stride, ROWS, BLOCK_N // PARTS),)  # noqa: RUF005
    scales = scales_of(a, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right, m, n, SCALES)
    multiply_tiles(
        operand(a, m, k, a_down, BLOCK_M, BLOCK_K, TURNED_A), operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        RowGroups(tiles_m, tiles_n, GROUP), biased(StoreTile(matrices), bias, bias_step, m, n, BIAS),
        tiles_m * tiles_n, k_tiles, STAGES, PARTS, NUM_WARPS, TURNED_A, TURNED_B, None, scales,
        out.dtype.element_ty,
    )  # fmt: skip
    last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class HopperPush(Hopper):
    """`hopper_push` of matmul_all_gather."""

    rows_owned = False

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        gemm, programs = self._launch(request, host)
        memory, staged, (out_down, _) = staged_memory(request, host, self.name, 0)
        how = {"out_down": out_down, "DIM": request.options["gather_dim"]}
        kernel = self._bind(request, host, push_product, programs, gemm, **how)
        return Plan(kernel, staged_out=staged, aux_buffer=memory)
