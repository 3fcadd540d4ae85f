"""All-gather + GEMM, by pushing: some programs send this rank's rows of A to all others, the rest compute what arrives.

C = A @ B_r, as in 29: the rows of A are split over the ranks, B_r is this rank's block of columns.  Each row crosses
every link once, as a store.  A flag for each block of rows says that it has arrived; tiles are computed in the order in
which rows come: this rank's own first, for which nobody has to wait, then those of the next ranks.

The programs that send have the lower numbers, which devices start first, and wait for nobody; so all rows are on
their way, whatever the size of the launch, and those that compute may wait.

    python examples/30_all_gather_gemm_push.py [ranks]
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
    num_senders,
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


@triton.jit(do_not_specialize=["turn", "sending"])
def push_gemm(
    a, b, c, arrived, turn, sending, context, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn, WORLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """The first `sending` programs send, the others compute.

    M: rows of each rank; `arrived`: [WORLD, blocks of rows], the last turn whose rows are there.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    if program < sending:
        mine = a + ctx.rank.to(tl.int64) * M * stride_am
        for unit in range(program, (WORLD - 1) * tiles_m, sending):
            # This rank's rows are the second to be used by the rank before this one, which therefore gets them first.
            receiver = (ctx.rank + WORLD - 1 - unit // tiles_m) % WORLD
            row = unit % tiles_m
            for piece in range(tl.cdiv(K, BLOCK_K)):
                where, mask = tile_ptr(mine, M, K, stride_am, stride_ak, row, piece, BLOCK_M, BLOCK_K)
                ctx.put(where, where, receiver, mask=mask)
            ctx.signal(arrived + ctx.rank * tiles_m + row, turn, receiver)
    else:
        tiles = tiles_m * tiles_n  # of the rows of one owner
        for number in range(program - sending, WORLD * tiles, tl.num_programs(0) - sending):
            owner = (ctx.rank + number // tiles) % WORLD
            row, column = place_tile(number % tiles, tiles_m, tiles_n, GROUP)
            if owner != ctx.rank:
                ctx.wait(arrived + owner * tiles_m + row, turn)
            acc = multiply_tile(
                a + owner.to(tl.int64) * M * stride_am, b, row, column, M, N, K,
                stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            rows = c + owner.to(tl.int64) * M * stride_cm
            where, mask = tile_ptr(rows, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
            tl.store(where, acc.to(c.dtype.element_ty), mask=mask)


def all_gather_gemm(ctx, a, b, c, arrived, turn):
    """Fill A with the rows of all ranks, and C = A @ B.  Collective: every rank calls it.

    On the stream, A and C are whole behind the call; A may be used, and this rank's rows changed, until the next call.

    Args:
        ctx: the open Iris.
        a: (ranks * M) x K, on the symmetric heap; this rank's rows are there.  Any strides, the same on all ranks.
        b: K x N, this rank's columns, any strides, anywhere.
        c: (ranks * M) x N, anywhere.
        arrived: int32, ranks x blocks of rows, on the symmetric heap; zero before the first call, behind a barrier.
        turn: 1 in the first call, and 1 more in each later one; so nothing has to be reset.
    """
    (rows, k), n, options = a.shape, b.shape[1], gemm_options(ctx)
    m = rows // ctx.num_ranks
    blocks = (ctx.num_ranks, triton.cdiv(m, options["BLOCK_M"]))
    if rows % ctx.num_ranks or b.shape[0] != k or c.shape != (rows, n) or arrived.shape != blocks:
        raise ValueError(
            f"{tuple(a.shape)} @ {tuple(b.shape)} on {ctx.num_ranks} ranks does not fit the other arguments"
        )
    programs = num_programs(ctx)
    sending = num_senders(ctx) if ctx.num_ranks > 1 else 0
    ctx.device_barrier()  # all ranks have used their last A
    push_gemm[(programs,)](
        a, b, c, arrived, turn, sending, ctx.get_device_context(), m, n, k, *a.stride(), *b.stride(), *c.stride(),
        WORLD=ctx.num_ranks, **options,
    )  # fmt: skip


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        m, n, k = (1024, 1024, 4096) if on_gpu(ctx) else (70, 101, 77)
        a = ctx.zeros(m * world, k, dtype=torch.bfloat16)
        c = torch.empty(m * world, n, dtype=torch.bfloat16, device=ctx.device)
        arrived = ctx.zeros(world, triton.cdiv(m, gemm_options(ctx)["BLOCK_M"]), dtype=torch.int32)
        turns = itertools.count(1)
        ctx.barrier()
        for launch in range(LAUNCHES):
            whole_a = whole_numbers(ctx, m * world, k, seed=launch)
            b = whole_numbers(ctx, k, n, seed=LAUNCHES * (rank + 1) + launch)
            mine = slice(rank * m, (rank + 1) * m)
            a[mine] = whole_a[mine]
            all_gather_gemm(ctx, a, b, c, arrived, next(turns))
            assert torch.equal(c, product(whole_a, b).to(c.dtype)), f"C is wrong in launch {launch}"
            assert torch.equal(a, whole_a), f"A is wrong in launch {launch}"
        flops = 2 * m * world * n * k
        time = timing(ctx, lambda: all_gather_gemm(ctx, a, b, c, arrived, next(turns)), flops=flops)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
