"""GEMM + all-scatter by two kernels on two streams: one computes tiles and raises flags, the other sends tiles.

As in 20, each rank computes a slab of columns of C = A @ B, and C is whole on every rank at the end.  Here the kernel
that computes knows nothing of other ranks: it stores a tile to its own C and raises the tile's flag.  A second kernel
of few programs waits for the flags in the order in which the tiles are computed, and copies each tile to the others.
So the GEMM may be somebody else's, as long as it raises flags, and it spends no registers or time on sending.

The sender waits for the GEMM, the GEMM for nobody: whichever the device starts first, both end.  The sender has fewer
programs than there are multiprocessors, or it might keep the GEMM out that it waits for.

    python examples/21_gemm_all_scatter_producer_consumer.py [ranks]
"""

import itertools
import sys

import torch
import triton
import triton.language as tl
from example_tools import (
    beside,
    gemm_options,
    multiply_tile,
    num_programs,
    num_senders,
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


@triton.jit(do_not_specialize=["turn"])
def compute(
    a, b, c, ready, turn, context, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Store A @ B to this rank's slab of its own C; tile number i is there when ready[i] is `turn`."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    slab = c + ctx.rank.to(tl.int64) * N * stride_cn
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = place_tile(number, tiles_m, tiles_n, GROUP)
        acc = multiply_tile(
            a, b, row, column, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
        )
        where, mask = tile_ptr(slab, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
        tl.store(where, acc.to(c.dtype.element_ty), mask=mask)
        ctx.signal(ready + number, turn, ctx.rank, scope="gpu")  # released to the same device: cheaper than "sys"


@triton.jit(do_not_specialize=["turn"])
def send(
    c, ready, turn, context, M, N, stride_cm, stride_cn,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Copy this rank's slab to all other ranks, tile by tile, each as soon as it is there."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    slab = c + ctx.rank.to(tl.int64) * N * stride_cn
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = place_tile(number, tiles_m, tiles_n, GROUP)
        where, mask = tile_ptr(slab, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
        ctx.wait(ready + number, turn, scope="gpu")
        tile = tl.load(where, mask=mask)
        for step in tl.static_range(1, WORLD):
            ctx.store(where, tile, (ctx.rank + step) % WORLD, mask=mask)


def gemm_all_scatter(ctx, a, b, c, ready, turn):
    """C[:, slab of rank r] = A @ B of rank r, for all ranks r, on all ranks.  Collective: every rank calls it.

    On the stream, C is whole behind the call, and may be used until the next call.

    Args:
        ctx: the open Iris.
        a: M x K, any strides, the same on all ranks.
        b: K x N, any strides, this rank's columns.
        c: M x (N * ranks), on the symmetric heap.
        ready: int32, at least one word for each tile of a slab, on the heap; zero before the first call.
        turn: 1 in the first call, and 1 more in each later one; so nothing has to be reset.
    """
    (m, k), n, options = a.shape, b.shape[1], gemm_options(ctx)
    tiles = num_tiles(m, n, options)
    if b.shape[0] != k or c.shape != (m, n * ctx.num_ranks) or ready.numel() < tiles:
        raise ValueError(f"{tuple(a.shape)} @ {tuple(b.shape)} on {ctx.num_ranks} ranks does not fit the other tensors")
    senders = num_senders(ctx)
    context, tiling = ctx.get_device_context(), {name: options[name] for name in ("BLOCK_M", "BLOCK_N", "GROUP")}
    ctx.device_barrier()  # all ranks have used their last C
    with beside(ctx) as second:
        compute[(min(tiles, num_programs(ctx) - senders),)](
            a, b, c, ready, turn, context, m, n, k, *a.stride(), *b.stride(), *c.stride(),
            WORLD=ctx.num_ranks, **options,
        )  # fmt: skip
        with second:
            send[(min(tiles, senders),)](
                c, ready, turn, context, m, n, *c.stride(), WORLD=ctx.num_ranks, **tiling, num_warps=8
            )
    ctx.device_barrier()  # all tiles have arrived


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        m, n, k = (4096, 1024, 4096) if on_gpu(ctx) else (137, 101, 77)
        c = ctx.zeros(m, n * world, dtype=torch.bfloat16)
        ready = ctx.zeros(num_tiles(m, n, gemm_options(ctx)), dtype=torch.int32)
        turns = itertools.count(1)
        ctx.barrier()
        for launch in range(LAUNCHES):
            a = whole_numbers(ctx, m, k, seed=launch)
            whole_b = whole_numbers(ctx, k, n * world, seed=LAUNCHES + launch)
            b = whole_b[:, rank * n : (rank + 1) * n]
            gemm_all_scatter(ctx, a, b, c, ready, next(turns))
            assert torch.equal(c, product(a, whole_b).to(c.dtype)), f"C is wrong in launch {launch}"
        time = timing(ctx, lambda: gemm_all_scatter(ctx, a, b, c, ready, next(turns)), flops=2 * m * n * k)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
