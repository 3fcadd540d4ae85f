"""GEMM + all-scatter in one kernel: a rank computes a slab of columns of C = A @ B and stores every tile to all ranks.

A is the same on all ranks, B is split by columns, and C is whole on every rank at the end.  A tile travels while the
next one is computed: stores are not waited for.  Nothing else has to be arranged, so this is the form to try first;
21, 22 and 23 do the same in other ways.

    python examples/20_gemm_all_scatter.py [ranks]
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
from iris_triton.tiles import tile_ptr

LAUNCHES = 2


@triton.jit
def gemm_all_scatter_kernel(
    a, b, c, context, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Persistent: programs take tiles in turn.  N is the width of a slab."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    slab = c + ctx.rank.to(tl.int64) * N * stride_cn
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = place_tile(number, tiles_m, tiles_n, GROUP)
        acc = multiply_tile(
            a, b, row, column, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
        )
        where, mask = tile_ptr(slab, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
        tile = acc.to(c.dtype.element_ty)
        for step in tl.static_range(1, WORLD + 1):  # the next rank first, so that the ranks do not all store to rank 0
            ctx.store(where, tile, (ctx.rank + step) % WORLD, mask=mask)


def gemm_all_scatter(ctx, a, b, c):
    """C[:, slab of rank r] = A @ B of rank r, for all ranks r, on all ranks.  Collective: every rank calls it.

    On the stream, C is whole behind the call, and may be used until the next call.

    Args:
        ctx: the open Iris.
        a: M x K, any strides, the same on all ranks.
        b: K x N, any strides, this rank's columns.
        c: M x (N * ranks), on the symmetric heap.
    """
    (m, k), n, options = a.shape, b.shape[1], gemm_options(ctx)
    if b.shape[0] != k or c.shape != (m, n * ctx.num_ranks):
        raise ValueError(f"{tuple(a.shape)} @ {tuple(b.shape)} on {ctx.num_ranks} ranks does not make {tuple(c.shape)}")
    ctx.device_barrier()  # all ranks have used their last C
    gemm_all_scatter_kernel[(min(num_tiles(m, n, options), num_programs(ctx)),)](
        a, b, c, ctx.get_device_context(), m, n, k, *a.stride(), *b.stride(), *c.stride(),
        WORLD=ctx.num_ranks, **options,
    )  # fmt: skip
    ctx.device_barrier()  # all tiles have arrived


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        m, n, k = (4096, 1024, 4096) if on_gpu(ctx) else (137, 101, 77)
        c = ctx.zeros(m, n * world, dtype=torch.bfloat16)
        for launch in range(LAUNCHES):
            a = whole_numbers(ctx, m, k, seed=launch)
            whole_b = whole_numbers(ctx, k, n * world, seed=LAUNCHES + launch)
            b = whole_b[:, rank * n : (rank + 1) * n]
            gemm_all_scatter(ctx, a, b, c)
            assert torch.equal(c, product(a, whole_b).to(c.dtype)), f"C is wrong in launch {launch}"
        time = timing(ctx, lambda: gemm_all_scatter(ctx, a, b, c), flops=2 * m * n * k)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
