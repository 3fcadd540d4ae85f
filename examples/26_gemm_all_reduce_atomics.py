"""GEMM + all-reduce by atomics: every rank adds its part of each tile to the C of all ranks.

C = sum over the ranks of A_r @ B_r: A and B are split along K, as in the second linear layer of a tensor-parallel
block.  Nobody waits for anybody inside the kernel, and no memory is needed beside C.  The price: C must be zero before,
on all ranks; every rank sends every tile to all others; and with numbers that are not whole, sums may differ in their
last bits between ranks and from run to run, because additions come in any order.  25, 27 and 28 have no such
differences.

    python examples/26_gemm_all_reduce_atomics.py [ranks]
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
def gemm_all_reduce_kernel(
    a, b, c, context, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Persistent: programs take tiles in turn."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = place_tile(number, tiles_m, tiles_n, GROUP)
        acc = multiply_tile(
            a, b, row, column, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
        )
        where, mask = tile_ptr(c, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
        for step in tl.static_range(1, WORLD + 1):  # the next rank first: fewer ranks add to the same place at once
            # relaxed: an addition hands over nothing but itself; the barrier behind the kernel orders the rest
            ctx.atomic_add(where, acc, (ctx.rank + step) % WORLD, mask=mask, sem="relaxed")


def gemm_all_reduce(ctx, a, b, c):
    """C = sum of A @ B over all ranks.  Collective: every rank calls it.

    On the stream, C is whole behind the call, and may be used until the next call.

    Args:
        ctx: the open Iris.
        a, b: this rank's M x K and K x N, any strides.
        c: float32, M x N, on the symmetric heap; need not be zero.
    """
    (m, k), n, options = a.shape, b.shape[1], gemm_options(ctx)
    if b.shape[0] != k or c.shape != (m, n) or c.dtype != torch.float32:
        raise ValueError(f"{tuple(a.shape)} @ {tuple(b.shape)} does not make a {c.dtype} matrix {tuple(c.shape)}")
    c.zero_()
    ctx.device_barrier()  # C is zero on all ranks, and all have used their last one
    gemm_all_reduce_kernel[(min(num_tiles(m, n, options), num_programs(ctx)),)](
        a, b, c, ctx.get_device_context(), m, n, k, *a.stride(), *b.stride(), *c.stride(),
        WORLD=ctx.num_ranks, **options,
    )  # fmt: skip
    ctx.device_barrier()  # all have added


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        m, n, k = (4096, 4096, 1024) if on_gpu(ctx) else (137, 101, 77)
        c = ctx.zeros(m, n, dtype=torch.float32)
        for launch in range(LAUNCHES):
            whole_a = whole_numbers(ctx, m, k * world, seed=launch)
            whole_b = whole_numbers(ctx, k * world, n, seed=LAUNCHES + launch)
            mine = slice(rank * k, (rank + 1) * k)
            a, b = whole_a[:, mine], whole_b[mine]
            gemm_all_reduce(ctx, a, b, c)
            assert torch.equal(c, product(whole_a, whole_b)), f"C is wrong in launch {launch}"
        time = timing(ctx, lambda: gemm_all_reduce(ctx, a, b, c), flops=2 * m * n * k)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
