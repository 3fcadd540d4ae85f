"""All-gather + GEMM, by pulling: the GEMM reads the other ranks' rows of A where they lie.

C = A @ B_r.  The rows of A are split over the ranks, B_r is this rank's block of columns: the first linear layer of a
tensor-parallel block whose activations are split by rows.  Nobody gathers A beforehand: a tile's loop over K loads from
the rank that owns the rows, and the pipeline of the loop, which hides the latency of memory, hides that of the links.

Each rank begins with its own rows and goes on with those of the next ranks, so that not all read the same rank.  Every
column of tiles reads the rows again over the links: good for few columns of tiles; 30 sends each row once.

    python examples/29_all_gather_gemm_pull.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl
from example_tools import (
    gemm_options,
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
def pull_gemm(
    shard, b, c, context, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Persistent: programs take tiles in turn.  M is the number of rows of a shard."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n  # of the rows of one owner
    for number in range(tl.program_id(0), WORLD * tiles, tl.num_programs(0)):
        owner = (ctx.rank + number // tiles) % WORLD
        row, column = place_tile(number % tiles, tiles_m, tiles_n, GROUP)
        i = row * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        j = column * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, K, BLOCK_K):
            k = (first + tl.arange(0, BLOCK_K)).to(tl.int64)
            a_where = shard + i.to(tl.int64) * stride_am + k[None, :] * stride_ak
            b_where = b + k[:, None] * stride_bk + j.to(tl.int64) * stride_bn
            a_tile = ctx.load(a_where, owner, mask=(i < M) & (k[None, :] < K), other=0.0)
            b_tile = tl.load(b_where, mask=(k[:, None] < K) & (j < N), other=0.0)
            acc = tl.dot(a_tile, b_tile, acc)
        rows = c + owner.to(tl.int64) * M * stride_cm
        where, mask = tile_ptr(rows, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
        tl.store(where, acc.to(c.dtype.element_ty), mask=mask)


def all_gather_gemm(ctx, shard, b, c):
    """C = A @ B, where A is the ranks' shards below each other.  Collective: every rank calls it.

    On the stream, C is whole behind the call, and the shard may be changed.

    Args:
        ctx: the open Iris.
        shard: M x K, this rank's rows of A, on the symmetric heap; any strides, the same on all ranks.
        b: K x N, this rank's columns, any strides, anywhere.
        c: (ranks * M) x N, anywhere.
    """
    (m, k), n, options = shard.shape, b.shape[1], gemm_options(ctx)
    if b.shape[0] != k or c.shape != (ctx.num_ranks * m, n):
        raise ValueError(f"{ctx.num_ranks} x {tuple(shard.shape)} @ {tuple(b.shape)} does not make {tuple(c.shape)}")
    ctx.device_barrier()  # all shards are there
    pull_gemm[(min(ctx.num_ranks * num_tiles(m, n, options), num_programs(ctx)),)](
        shard, b, c, ctx.get_device_context(), m, n, k, *shard.stride(), *b.stride(), *c.stride(),
        WORLD=ctx.num_ranks, **options,
    )  # fmt: skip
    ctx.device_barrier(sem="relaxed")  # all have read; nothing was written for others


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        m, n, k = (1024, 1024, 4096) if on_gpu(ctx) else (70, 101, 77)
        shard = ctx.empty(m, k, dtype=torch.bfloat16)
        c = torch.empty(m * world, n, dtype=torch.bfloat16, device=ctx.device)
        for launch in range(LAUNCHES):
            whole_a = whole_numbers(ctx, m * world, k, seed=launch)
            b = whole_numbers(ctx, k, n, seed=LAUNCHES * (rank + 1) + launch)
            shard.copy_(whole_a[rank * m : (rank + 1) * m])
            all_gather_gemm(ctx, shard, b, c)
            assert torch.equal(c, product(whole_a, b).to(c.dtype)), f"C is wrong in launch {launch}"
        time = timing(ctx, lambda: all_gather_gemm(ctx, shard, b, c), flops=2 * m * world * n * k)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
