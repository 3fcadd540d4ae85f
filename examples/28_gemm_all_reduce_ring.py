"""GEMM + ring all-reduce by two kernels: one computes parts, the other sends sums and results from rank to rank.

C = sum over the ranks of A_r @ B_r: A and B are split along K.  Tiles are taken in groups of as many as there are
ranks.  The sum of tile t of a group begins at rank t; each rank adds its part and sends the sum to the next one.  The
last to add has the result, which then travels around in the same way.  At every step each rank sends one tile and
receives another, only to and from its neighbours, and in all about 2 M N elements: no algorithm can do with less
(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009).

The kernel that computes raises a flag for each tile; the ring's kernel, on a second stream, begins with a group as soon
as its tiles are there.  A sum is rounded once, by the last rank, so all ranks get the same bits.

There is no barrier, not even between launches.  A result needs the parts of all ranks: whoever has one knows that
every rank has read what the ring sent it before, and has come, on its stream, to this launch.  Therefore what is
overwritten in turn n + 1 was used in turn n.

`ctx.all_reduce_ring` does it for one tile; see docs/tiles.md.

    python examples/28_gemm_all_reduce_ring.py [ranks]
"""

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

LAUNCHES = 3


@triton.jit(do_not_specialize=["turn"])
def compute(
    a, b, parts, computed, turn, context, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Store A @ B to `parts`, M x N; tile number i is there when computed[i] is `turn`."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for number in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        row, column = place_tile(number, tiles_m, tiles_n, GROUP)
        acc = multiply_tile(
            a, b, row, column, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
        )
        where, mask = tile_ptr(parts, M, N, N, 1, row, column, BLOCK_M, BLOCK_N)
        tl.store(where, acc, mask=mask)
        ctx.signal(computed + number, turn, ctx.rank, scope="gpu")


@triton.jit(do_not_specialize=["turn"])
def ring(
    parts, inbox, c, computed, summed, finished, turn, context, M, N, stride_cm, stride_cn,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):  # fmt: skip
    """Programs take groups of WORLD tiles in turn; those of one number, on all ranks, are a ring of their own.

    `inbox`: where sums arrive; `summed`, `finished`: per tile, the last turn whose sum, or result, has arrived.
    """
    ctx = DeviceContext.from_tensor(context, WORLD)
    following = (ctx.rank + 1) % WORLD
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    for group in range(tl.program_id(0), tl.cdiv(tiles, WORLD), tl.num_programs(0)):
        for step in range(WORLD):  # sums
            number = group * WORLD + (ctx.rank + WORLD - step) % WORLD
            if number < tiles:
                row, column = place_tile(number, tiles_m, tiles_n, GROUP)
                where, mask = tile_ptr(parts, M, N, N, 1, row, column, BLOCK_M, BLOCK_N)
                arrival, mask = tile_ptr(inbox, M, N, N, 1, row, column, BLOCK_M, BLOCK_N)
                ctx.wait(computed + number, turn, scope="gpu")
                total = tl.load(where, mask=mask, other=0.0)
                if step > 0:
                    ctx.wait(summed + number, turn)
                    total += tl.load(arrival, mask=mask, other=0.0)
                if step < WORLD - 1:
                    ctx.store(arrival, total, following, mask=mask)
                    ctx.signal(summed + number, turn, following)
                else:
                    target, mask = tile_ptr(c, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
                    result = total.to(c.dtype.element_ty)
                    tl.store(target, result, mask=mask)
                    if WORLD > 1:
                        ctx.store(target, result, following, mask=mask)
                        ctx.signal(finished + number, turn, following)
        for step in range(WORLD - 1):  # results
            number = group * WORLD + (ctx.rank + WORLD - step) % WORLD
            if number < tiles:
                row, column = place_tile(number, tiles_m, tiles_n, GROUP)
                target, mask = tile_ptr(c, M, N, stride_cm, stride_cn, row, column, BLOCK_M, BLOCK_N)
                ctx.wait(finished + number, turn)
                if step < WORLD - 2:  # else the next rank is the one that had it first
                    ctx.put(target, target, following, mask=mask)
                    ctx.signal(finished + number, turn, following)


class RingMemory:
    """What the ring needs beside C, for M x N results.  Collective: every rank makes it.

    Attributes:
        parts, inbox: float32, M x N.
        computed, summed, finished: int32, one word for each tile, which count turns.
        turn: of the last call.
    """

    def __init__(self, ctx, m, n):
        self.parts, self.inbox = (ctx.empty(m, n, dtype=torch.float32) for _ in range(2))
        tiles = num_tiles(m, n, gemm_options(ctx))
        self.computed, self.summed, self.finished = (ctx.zeros(tiles, dtype=torch.int32) for _ in range(3))
        self.turn = 0
        ctx.barrier()  # the words are zero everywhere before anybody signals


def gemm_all_reduce(ctx, a, b, c, memory):
    """C = sum of A @ B over all ranks.  Collective: every rank calls it.

    On the stream, C is whole behind the call, and may be used until the next call.

    Args:
        ctx: the open Iris.
        a, b: this rank's M x K and K x N, any strides.
        c: M x N, on the symmetric heap.
        memory: `RingMemory` of this size.
    """
    (m, k), n, options = a.shape, b.shape[1], gemm_options(ctx)
    if b.shape[0] != k or c.shape != (m, n) or memory.parts.shape != (m, n):
        raise ValueError(f"{tuple(a.shape)} @ {tuple(b.shape)} does not fit the other arguments")
    tiles, world, context = num_tiles(m, n, options), ctx.num_ranks, ctx.get_device_context()
    senders = num_senders(ctx)  # fewer than multiprocessors: the GEMM, for which they wait, needs room
    tiling = {name: options[name] for name in ("BLOCK_M", "BLOCK_N", "GROUP")}
    memory.turn += 1
    with beside(ctx) as second:
        compute[(min(tiles, num_programs(ctx) - senders),)](
            a, b, memory.parts, memory.computed, memory.turn, context, m, n, k, *a.stride(), *b.stride(),
            WORLD=world, **options,
        )  # fmt: skip
        with second:
            ring[(min(triton.cdiv(tiles, world), senders),)](
                memory.parts, memory.inbox, c, memory.computed, memory.summed, memory.finished, memory.turn, context,
                m, n, *c.stride(), WORLD=world, **tiling, num_warps=8,
            )  # fmt: skip


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        m, n, k = (4096, 4096, 1024) if on_gpu(ctx) else (137, 101, 77)
        c, memory = ctx.zeros(m, n, dtype=torch.bfloat16), RingMemory(ctx, m, n)
        for launch in range(LAUNCHES):
            whole_a = whole_numbers(ctx, m, k * world, seed=launch)
            whole_b = whole_numbers(ctx, k * world, n, seed=LAUNCHES + launch)
            mine = slice(rank * k, (rank + 1) * k)
            a, b = whole_a[:, mine], whole_b[mine]
            gemm_all_reduce(ctx, a, b, c, memory)
            assert torch.equal(c, product(whole_a, whole_b).to(c.dtype)), f"C is wrong in launch {launch}"
        time = timing(ctx, lambda: gemm_all_reduce(ctx, a, b, c, memory), flops=2 * m * n * k)
        ctx.barrier()
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
