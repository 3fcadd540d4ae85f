"""`pull`: all_gather_matmul.  Tiles are computed from the members' shards of A where they lie.

Chosen for narrow B, where the model says so: every column of tiles reads a shard again over the links.  The own shard
comes first, then those of the next members.

Shards are rows (gather_dim 0) or columns (gather_dim 1) of A.  Their rows are dense and begin at multiples of 16 bytes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from iris_core.dispatch.products import ROW_NBYTES
from iris_core.providers.model import moving_s
from iris_triton.collectives.parts.barrier import meet_and_leave
from iris_triton.gemm.parts.fused import Fused, Plan, peer_memory, programs_for, staging, staging_nbytes
from iris_triton.gemm.parts.shapes import tiling
from iris_triton.gemm.parts.tiles import (
    PER_CALL,
    RUNTIME,
    add_product,
    announce_and_meet,
    announced,
    own_program,
    place,
    store_tile,
    wide,
    with_bias,
)

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_triton.gemm.parts.shapes import Tiling


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def pull_product(
    out, a, b, bias, control, bases, me, rank, rows, n, inner, a_down, b_down, b_right, out_down, out_right, bias_step,
    tiles_m, tiles_n, timeout_ns, status,
    SIZE: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, B_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Multiply the members' shards, read where they lie, with B.

    Two meetings: the shards may be read; they were read.

    Args (beside those of `iris_triton.gemm.matmul_reduce.matmul_reduce`):
        rows, inner: shape of a shard.
        tiles_m, tiles_n: tiles below each other and beside each other, of a shard's rows if DIM is 0.
        DIM: 0 if shards are rows of A, 1 if they are columns.
    """
    row, epoch = announce_and_meet(control, bases, me, a, a_down, timeout_ns, status, rank, SIZE)
    per_shard = tiles_m * tiles_n
    total = per_shard
    if DIM == 0:
        total = per_shard * SIZE
    for i in range(own_program(0, XCDS, CHUNK), total, tl.num_programs(0)):
        acc = tl.zeros((BM, BN), tl.float32)
        down, right = place(i % per_shard, tiles_m, tiles_n, GROUP)
        if DIM == 0:
            shard = (me + i // per_shard) % SIZE
            theirs, stride = announced(row, bases, shard, a, SIZE)
            acc = add_product(
                acc, theirs, wide(b, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                stride, 1, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
            )  # fmt: skip
            first = shard * rows
        else:
            for j in range(SIZE):
                shard = (me + j) % SIZE
                theirs, stride = announced(row, bases, shard, a, SIZE)
                part = b + tl.cast(shard, tl.int64) * inner * b_down
                acc = add_product(
                    acc, theirs, wide(part, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                    stride, 1, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
                )  # fmt: skip
            first = me * 0
        acc = with_bias(acc, bias, first + down * BM, right * BN, first + rows, n, bias_step, BIAS, BM, BN)
        store_tile(
            wide(out, OUT_ALIGNED), acc, first + down * BM, right * BN, first + rows, n, out_down, out_right, BM, BN
        )
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class GatherProduct(Fused):
    """What the two ways to all_gather_matmul have in common."""

    def _shard(self, request: FusedRequest) -> tuple[int, int]:
        """Rows and columns of a shard."""
        size = request.group_size
        by_rows = request.options["gather_dim"] == 0
        return (request.m // size, request.k) if by_rows else (request.m, request.k // size)

    def _staged(self, request: FusedRequest, host: Host) -> torch.Tensor | None:
        """Memory for the own shard, where peers cannot reach A."""
        if request.reach_a:
            return None
        rows, inner = self._shard(request)
        need = staging_nbytes(rows, inner, request.dtype)
        return staging(peer_memory(host, need, f"{self.op} ({self.name})"), 0, rows, inner, request.dtype)

    def _arguments(
        self, request: FusedRequest, host: Host, tiles: Tiling, staged: torch.Tensor | None
    ) -> dict[str, Any]:
        rows, inner = self._shard(request)
        by_rows = request.options["gather_dim"] == 0
        item = getattr(torch, request.dtype).itemsize
        apart = inner * request.b_stride[0] * item % ROW_NBYTES == 0  # the parts of B that belong to the shards
        return self.common(request, host, tiles, rows) | {
            "rows": rows,
            "inner": inner,
            "a_down": request.a_stride[0] if staged is None else staged.stride(0),
            "out_down": request.out_stride[0],
            "out_right": request.out_stride[1],
            "DIM": request.options["gather_dim"],
            "B_ALIGNED": request.aligned[1] and (by_rows or apart),
            "OUT_ALIGNED": request.aligned[2],
        }


class Pull(GatherProduct):
    """all_gather_matmul: the kernel reads the shards where they lie."""

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: each column of tiles reads the shards again."""
        tiles = tiling(request, *self._shard(request))
        again = -(-request.n // tiles.block_n)
        return self.model(request, meetings=2, moving=again * moving_s(request))

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory where A cannot be reached, bind the kernel."""
        rows, inner = self._shard(request)
        tiles = tiling(request, rows, inner)
        staged = self._staged(request, host)
        arguments = self._arguments(request, host, tiles, staged)
        shards = host.team.size if request.options["gather_dim"] == 0 else 1
        number = arguments["tiles_m"] * arguments["tiles_n"] * shards
        programs = programs_for(request, host, number, meeting=True)
        kernel = self.bind(request, host, pull_product, programs, arguments, tiles.options)
        return Plan(kernel, staged_a=staged, aux_buffer=staged)
