"""`hopper_copy_engine_push`: all_gather_matmul, gather_dim 0.

Chosen on Hopper where a table says so.  Own rows are multiplied where A lies.  Copy engines bring the others' rows
here, and a word after each shard, for which the warp that loads waits.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.dispatch.team import Host
from iris_core.types import DeviceType, FusedRequest
from iris_gluon.gemm.fused import RUNTIME, UNIT, Hopper, biased, matrix_at, operand, scales_of, unit_of
from iris_gluon.gemm.hopper import multiply_tiles, part_rows
from iris_gluon.gemm.order import ShardsInTurn
from iris_gluon.gemm.sinks import StoreTile
from iris_gluon.layouts import default_layout
from iris_triton.collectives.parts.side import copies_obstacle
from iris_triton.gemm.parts.fused import Plan
from iris_triton.gemm.parts.shards import COPY_S, Shards, shards_of
from iris_triton.gemm.parts.tiles import PER_CALL

_CLEARED = gl.constexpr(128)  # words that are cleared at a time


@gluon.jit
def _clear(flags, count, programs):
    """Reset words to 0 after the last of the programs has waited for them; word `count` counts these programs."""
    if gl.atomic_add(flags + count, 1, sem="acq_rel", scope="gpu") == programs - 1:
        lane = gl.arange(0, _CLEARED, layout=default_layout([_CLEARED]))
        for first in range(0, count + 1, _CLEARED):
            gl.store(flags + first + lane, 0, mask=first + lane <= count)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def gather_product(
    out, a, b, bias, gathered, flags, me, rank, n, k, b_down, out_down, bias_step, rows_each, tiles_n, k_tiles,
    timeout_ns, status, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right,
    SIZE: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr,
    SCALES: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B, each when its flag says that it is there; see `ShardsInTurn`.

    No barrier: that a member's own rows have been taken is not asked, for the copies that take them are its own, and
    what it gets is complete when it has waited for every flag.

    Args (beside those of `push_product`):
        a: the own rows, rows_each x k, dense.
        gathered: symmetric memory for SIZE * rows_each rows of k elements.
        flags: symmetric memory, int32, 0 between launches: one for each member, 1 when its rows are there,
            and one more.
        rows_each: rows of a member, a multiple of BLOCK_M.
    """
    tiles_each = rows_each // BLOCK_M
    order = ShardsInTurn(
        tiles_each, tiles_n, me, flags, gl.cast(timeout_ns, gl.int64), gl.cast(status, gl.int64), rank, GROUP, SIZE
    )
    rows = rows_each * SIZE
    ROWS: gl.constexpr = part_rows(BLOCK_M, NUM_WARPS, SCALES)
    sink = StoreTile(matrix_at(out.to(gl.int64), out, rows, n, gl.cast(out_down, gl.int64), ROWS, BLOCK_N // PARTS))
    scales = scales_of(a, a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right, rows, n, SCALES)
    multiply_tiles(
        operand(gathered, rows, k, k, BLOCK_M, BLOCK_K, False), operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        order, biased(sink, bias, bias_step, rows, n, BIAS), tiles_each * SIZE * tiles_n, k_tiles, STAGES, PARTS,
        NUM_WARPS, False, TURNED_B, operand(a, rows_each, k, k, BLOCK_M, BLOCK_K, False), scales, out.dtype.element_ty,
    )  # fmt: skip
    _clear(flags, rows // BLOCK_M // tiles_each, gl.num_programs(0))


_BESIDE_BARRIER = {168: 160, 255: 240}
"""Registers of a thread instead of all: a warp of 32 each finds room beside them on a multiprocessor.  So the
barrier can be passed while the product runs, even if other kernels have taken the one that it leaves."""


def beside_copies(shards: Shards, kernel: Callable[..., None]) -> Callable[..., None]:
    """Return a function that enqueues the copies and launches a kernel that waits for them.

    Copies come first: the product waits for words that the copies write, and a launch may block until its kernel is
    done (CUDA_LAUNCH_BLOCKING, profilers), or until all kernels are (when one is loaded).
    """

    def run(stream: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *more: torch.Tensor) -> None:
        if shards.scales is None:
            kernel(stream, out, shards.move(a), b, *more)
        else:  # the kernel reads those of all members
            *bias, own, other = more
            kernel(stream, out, shards.move(a, own), b, *bias, shards.scales, other)
        shards.side.join()

    return run


class HopperGather(Hopper):
    """`hopper_copy_engine_push`: the product waits for words of the copy engines.

    It uses all multiprocessors but one, which is left for the barrier.
    """

    serves: ClassVar[Mapping[str, Any]] = {"gather_dim": 0}
    exposed = 1 / 4  # of the last copy
    copy_s = COPY_S

    def _problem(self, request: FusedRequest) -> str:
        unit = unit_of(request)
        if request.k % unit:
            return f"rows of A must be multiples of 16 bytes, and K is {request.k}"
        if request.out_stride[1] != 1 or request.out_stride[0] % UNIT or not request.aligned[2]:
            return "TMA needs dense rows of the output that begin at multiples of 16 bytes"
        # Where its rows are not dense, A is copied before, so neither its strides nor its place matter.
        problem = super()._problem(replace(request, a_stride=(unit, 1), aligned=(True, *request.aligned[1:])))
        return problem or copies_obstacle(request.target.type)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        on_cpu = request.target.type is DeviceType.CPU
        most = request.options["config"].get("num_sms", 2 if on_cpu else host.processors)
        most = most if on_cpu else max(1, min(most, host.processors - 1))
        gemm = self._gemm(request, most)
        gemm = replace(gemm, maxnreg=_BESIDE_BARRIER[gemm.maxnreg])
        shards = shards_of(request, host, self.name)
        programs = min(most, gemm.tiles(request.m, request.n))
        how = {"gathered": shards.matrix, "flags": shards.words}
        kernel = self._bind(request, host, gather_product, programs, gemm, **how)
        return Plan(beside_copies(shards, kernel), aux_buffer=shards.matrix.view(torch.uint8), locks=shards.words)
