"""GEMM + all-reduce in one kernel: C = sum over the ranks of A_r @ B_r, whole on every rank.

A and B are split along K, as in the second linear layer of a tensor-parallel block.  The epilogue all-reduces each tile
as soon as it is computed: a rank stores its part of the tile in symmetric memory, and the rank that comes last adds the
parts up in rank order and stores the result to all.  No program waits for another rank, so the number of programs does
not matter, and all ranks get the same bits.

The tile collectives are the library's (docs/tiles.md); 26, 27 and 28 do the same by hand, in other ways.

    python examples/25_gemm_all_reduce.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl
from example_tools import (
    gemm_options,
    multiply_tile,
    num_programs,
    num_tiles,
    on_gpu,
    place_tile,
    product,
    timing,
    whole_numbers,
)

import iris_core
from iris_triton import DeviceContext
from iris_triton.tiles import Tile, check_locks, make_locks, make_tensor_view

LAUNCHES = 3


@triton.jit
def gemm_all_reduce_kernel(
    a, b, c, parts, locks, context, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Persistent: programs take tiles in turn.  `parts` has the strides of c."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    c_view = make_tensor_view(c, M, N, stride_cm, stride_cn)
    parts_view = make_tensor_view(parts, M, N, stride_cm, stride_cn)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = place_tile(number, tiles_m, tiles_n, GROUP)
        acc = multiply_tile(
            a, b, row, column, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
        )
        ctx.all_reduce_two_shot(Tile(row, column, BLOCK_M, BLOCK_N, acc), parts_view, c_view, locks)


def gemm_all_reduce(ctx, a, b, c, parts, locks):
    """C = sum of A @ B over all ranks.  Collective: every rank calls it; C is whole behind a barrier.

    It may be called again at once, also with other data, and captured in a graph: nothing has to be reset.

    Args:
        ctx: the open Iris.
        a, b: this rank's M x K and K x N, any strides.
        c: M x N, on the symmetric heap.
        parts: shape and strides of c, on the symmetric heap; the ranks' parts lie here while they are added up.  In
            float32 they keep the accumulator's precision, in bfloat16 they are half the traffic.
        locks: of `iris_triton.tiles.make_locks`.
    """
    (m, k), n, options = a.shape, b.shape[1], gemm_options(ctx)
    if b.shape[0] != k or c.shape != (m, n) or parts.shape != (m, n) or c.stride() != parts.stride():
        raise ValueError(f"c and parts must be {m} x {n} with the same strides, and b must have {k} rows")
    check_locks(ctx, locks, m, n, options["BLOCK_M"], options["BLOCK_N"])
    gemm_all_reduce_kernel[(min(num_tiles(m, n, options), num_programs(ctx)),)](
        a, b, c, parts, locks, ctx.get_device_context(), m, n, k, *a.stride(), *b.stride(), *c.stride(),
        WORLD=ctx.num_ranks, **options,
    )  # fmt: skip


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world, options = ctx.cur_rank, ctx.num_ranks, gemm_options(ctx)
        m, n, k = (4096, 4096, 1024) if on_gpu(ctx) else (137, 101, 77)
        c, parts = ctx.zeros(m, n, dtype=torch.bfloat16), ctx.zeros(m, n, dtype=torch.float32)
        locks = make_locks(ctx, m, n, options["BLOCK_M"], options["BLOCK_N"])
        ctx.barrier()
        for launch in range(LAUNCHES):
            whole_a = whole_numbers(ctx, m, k * world, seed=launch)
            whole_b = whole_numbers(ctx, k * world, n, seed=LAUNCHES + launch)
            mine = slice(rank * k, (rank + 1) * k)
            a, b = whole_a[:, mine], whole_b[mine]
            gemm_all_reduce(ctx, a, b, c, parts, locks)
            ctx.barrier()
            assert torch.equal(c, product(whole_a, whole_b).to(c.dtype)), f"C is wrong in launch {launch}"
        time = timing(ctx, lambda: gemm_all_reduce(ctx, a, b, c, parts, locks), flops=2 * m * n * k)
        # Numbers that are not whole show that the order of additions is the same on all ranks.
        a, b = (torch.randn(shape, device=ctx.device).to(torch.bfloat16) for shape in ((m, k), (k, n)))
        gemm_all_reduce(ctx, a, b, c, parts, locks)
        ctx.barrier()
        bits = c.cpu().view(torch.int16).numpy()
        assert (bits == ctx.broadcast(bits, src=0)).all(), "the ranks' results differ in their bits"
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times, and the same on all ranks{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
