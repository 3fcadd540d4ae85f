"""GEMM + all-reduce in one shot: ranks show each other their parts, and each adds all of them up for itself.

C = sum over the ranks of A_r @ B_r: A and B are split along K.  A rank stores its part of a tile in its own symmetric
memory and tells all ranks.  When the parts of all ranks are there, it reads them, in rank order, and adds them up: all
ranks get the same bits, in every run.  Every part crosses the links once for each rank, and there is only one step: the
form for small results, whose time is latency.

There is no barrier, not even between launches, and yet no part is overwritten while somebody reads it.  The parts of
odd and even turns lie in different places.  A rank that computes turn 3 has finished turn 2, so it has seen flags of
turn 2 from all ranks, which raise them only behind their turn 1: nobody reads parts of turn 1 any more.

A program computes all its tiles before it waits for the first one, and what it waits for is computed by the program of
the same number on the other ranks: so all launches end, whatever their size.

`ctx.all_reduce_one_shot` does it for one tile; see docs/tiles.md.

    python examples/27_gemm_all_reduce_one_shot.py [ranks]
"""

import itertools
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

LAUNCHES = 4


@triton.jit(do_not_specialize=["turn"])
def gemm_all_reduce_kernel(
    a, b, c, parts, arrived, turn, context, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """`parts`: [2, M, N]; `arrived`: [WORLD, tiles], the last turn whose part is there."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    parts += (turn % 2).to(tl.int64) * M * N
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = place_tile(number, tiles_m, tiles_n, GROUP)
        acc = multiply_tile(
            a, b, row, column, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
        )
        where, mask = tile_ptr(parts, M, N, N, 1, row, column, BLOCK_M, BLOCK_N)
        tl.store(where, acc, mask=mask)
        for step in range(1, WORLD + 1):
            ctx.signal(arrived + ctx.rank * tiles + number, turn, (ctx.rank + step) % WORLD)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = place_tile(number, tiles_m, tiles_n, GROUP)
        where, mask = tile_ptr(parts, M, N, N, 1, row, column, BLOCK_M, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for source in range(WORLD):
            ctx.wait(arrived + source * tiles + number, turn)
            total += ctx.load(where, source, mask=mask, other=0.0)
        where, mask = tile_ptr(c, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
        tl.store(where, total.to(c.dtype.element_ty), mask=mask)


def gemm_all_reduce(ctx, a, b, c, parts, arrived, turn):
    """C = sum of A @ B over all ranks.  Collective: every rank calls it.

    On the stream, C is whole behind the call.

    Args:
        ctx: the open Iris.
        a, b: this rank's M x K and K x N, any strides.
        c: M x N, anywhere.
        parts: float32, 2 x M x N, contiguous, on the symmetric heap.
        arrived: int32, ranks x tiles, on the symmetric heap; zero before the first call, behind a barrier.
        turn: 1 in the first call, and 1 more in each later one; so nothing has to be reset.
    """
    (m, k), n, options = a.shape, b.shape[1], gemm_options(ctx)
    tiles = num_tiles(m, n, options)
    if b.shape[0] != k or c.shape != (m, n) or parts.shape != (2, m, n) or arrived.shape != (ctx.num_ranks, tiles):
        raise ValueError(f"{tuple(a.shape)} @ {tuple(b.shape)} on {ctx.num_ranks} ranks does not fit the other tensors")
    gemm_all_reduce_kernel[(min(tiles, num_programs(ctx)),)](
        a, b, c, parts, arrived, turn, ctx.get_device_context(), m, n, k, *a.stride(), *b.stride(), *c.stride(),
        WORLD=ctx.num_ranks, **options,
    )  # fmt: skip


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        m, n, k = (256, 4096, 1024) if on_gpu(ctx) else (137, 101, 77)
        parts = ctx.empty(2, m, n, dtype=torch.float32)
        arrived = ctx.zeros(world, num_tiles(m, n, gemm_options(ctx)), dtype=torch.int32)
        turns = itertools.count(1)
        ctx.barrier()
        for launch in range(LAUNCHES):
            whole_a = whole_numbers(ctx, m, k * world, seed=launch)
            whole_b = whole_numbers(ctx, k * world, n, seed=LAUNCHES + launch)
            mine = slice(rank * k, (rank + 1) * k)
            a, b = whole_a[:, mine], whole_b[mine]
            c = torch.empty(m, n, dtype=torch.bfloat16, device=ctx.device)
            gemm_all_reduce(ctx, a, b, c, parts, arrived, next(turns))
            assert torch.equal(c, product(whole_a, whole_b).to(c.dtype)), f"C is wrong in launch {launch}"
        time = timing(ctx, lambda: gemm_all_reduce(ctx, a, b, c, parts, arrived, next(turns)), flops=2 * m * n * k)
        ctx.barrier()  # the others may still read the parts of this rank
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
