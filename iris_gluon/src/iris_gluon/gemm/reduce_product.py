"""`hopper_push`: matmul_reduce_scatter.  Tiles go to slots of the owners of their rows by TMA.

Chosen on Hopper where a table says so.  `chunk_size` tiles in a row go to the same owner, then as many to the next one.
When the launch is over, `iris_triton.gemm.parts.sum_slots` adds the slots up.
"""
# mypy: disable-error-code="assignment"

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.dispatch.team import Host
from iris_core.types import FusedRequest
from iris_gluon.gemm.fused import RUNTIME, USED_CONFIG, Hopper, matrix_at, operand, scales_of
from iris_gluon.gemm.hopper import multiply_tiles, part_rows
from iris_gluon.gemm.order import OwnersInTurn
from iris_gluon.gemm.sinks import OwnersSlot
from iris_triton.collectives.parts.barrier import last_barrier
from iris_triton.gemm.parts.fused import Plan, divided, peer_memory
from iris_triton.gemm.parts.sum_slots import bind_sum
from iris_triton.gemm.parts.tiles import PER_CALL, begin_call


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def reduce_product(
    a, b, control, slots, bases, me, rank, m, n, k, a_down, b_down, rows_each, tiles_n, k_tiles, chunk, timeout_ns,
    status, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right,
    SIZE: gl.constexpr, TURNED_A: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr,
    SCALES: gl.constexpr
):  # fmt: skip
    """Store A @ B into slots of the owners of its rows, who add them up when this launch is over.

    Barriers: peers may be written to; the slots are full.  They are those of the programs of one number, but when all
    of a launch have passed the second one, all of the others' tiles are there.

    Args (beside those of `push_product`):
        slots: symmetric memory for SIZE matrices of rows_each x n elements, of the output's type.
        n: a multiple of 8.
        rows_each: rows that a member owns, a multiple of BLOCK_M.
        chunk: see `OwnersInTurn`.
    """
    ROWS: gl.constexpr = part_rows(BLOCK_M, NUM_WARPS, SCALES)
    row, epoch = begin_call(control, bases, me, None, 0, timeout_ns, status, rank, SIZE)
    own = gl.load(bases + me)
    mine = slots.to(gl.int64) - own + gl.cast(me, gl.int64) * rows_each * n * 2
    matrices = ()
    for i in gl.static_range(SIZE):
        address = gl.load(bases + i) + mine
        part = matrix_at(address, slots, rows_each, n, gl.cast(n, gl.int64), ROWS, BLOCK_N // PARTS)
        matrices = matrices + (part,)  # noqa: RUF005
    tiles_each = rows_each // BLOCK_M
    order = OwnersInTurn(tiles_each, tiles_n, me, chunk, GROUP, SIZE)
    scales = scales_of(a, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right, m, n, SCALES)
    multiply_tiles(
        operand(a, m, k, a_down, BLOCK_M, BLOCK_K, TURNED_A), operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        order, OwnersSlot(matrices, rows_each), tiles_each * tiles_n * SIZE, k_tiles, STAGES, PARTS, NUM_WARPS,
        TURNED_A, TURNED_B, None, scales, slots.dtype.element_ty,
    )  # fmt: skip
    last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


_RUN = 1 << 20  # tiles in a row of one owner: all that it has
_RUN_FLOPS = 2.4e11  # from which on each owner's tiles are sent in one run: between the two sizes that were measured


def _in_runs(request: FusedRequest) -> bool:
    return 2.0 * request.m * request.n * request.k > _RUN_FLOPS


class HopperReduce(Hopper):
    """`hopper_push` of matmul_reduce_scatter."""

    uses = (*USED_CONFIG, "chunk_size")
    serves: ClassVar[Mapping[str, Any]] = {"layout": "torch"}
    exposed = 1 / 4  # of the sums

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        other, *more = super()._offered(request)
        order = {"chunk_size": 1 if _in_runs(request) else _RUN}
        return [other, order, {**other, **order}, *more[:2]]

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        gemm, programs = self._launch(request, host)
        dtype: torch.dtype = getattr(torch, request.out_dtype)
        rows_each = request.m // host.team.size
        memory = peer_memory(request, host, self.name, request.m * request.n * dtype.itemsize)
        slots = memory.view(dtype)
        chunk = request.options["config"].get("chunk_size", _RUN if _in_runs(request) else 1)
        chunk = min(chunk, rows_each // gemm.block_m * -(-request.n // gemm.block_n))
        product = self._bind(request, host, reduce_product, programs, gemm, slots=slots, chunk=chunk)
        add = bind_sum(request, host, slots, rows_each, request.out_stride)

        scaled = request.scales != "none"

        def run(stream: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor) -> None:
            bias, *scales = divided(scaled, more)
            product(stream, a, b, *scales)
            add(stream, out, *(() if bias is None else (bias,)))

        return Plan(run, aux_buffer=memory)
