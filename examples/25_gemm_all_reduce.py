"""GEMM + all-reduce in one kernel: C = sum over the ranks of A_r @ B_r, whole on every rank.

A and B are split along K, as in the second linear layer of a tensor-parallel block.  The epilogue all-reduces each tile
as soon as it is computed: a rank stores its part of the tile in symmetric memory, and the rank that comes last adds the
parts up in rank order and stores the result to all.  No program waits for another rank, so the number of programs does
not matter, and all ranks get the same bits.

    python examples/25_gemm_all_reduce.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl

import iris_core
from iris_triton import DeviceContext
from iris_triton.tiles import Tile, check_locks, make_locks, make_tensor_view

M, N, K_PER_RANK = 200, 168, 96
BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 32
LAUNCHES = 3


@triton.jit
def gemm_all_reduce_kernel(
    a, b, c, parts, locks, context, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Persistent: programs take tiles in turn.  `parts` has the strides of c."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    a_view = make_tensor_view(a, M, K, stride_am, stride_ak)
    b_view = make_tensor_view(b, K, N, stride_bk, stride_bn)
    c_view = make_tensor_view(c, M, N, stride_cm, stride_cn)
    parts_view = make_tensor_view(parts, M, N, stride_cm, stride_cn)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for i in range(tl.program_id(0), c_view.number_of_tiles(BLOCK_M, BLOCK_N), tl.num_programs(0)):
        pid_m, pid_n = i // tiles_n, i % tiles_n
        rows = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            a_ptr, a_mask = a_view.tile_ptr_from_indices(rows, k, BLOCK_M, BLOCK_K)
            b_ptr, b_mask = b_view.tile_ptr_from_indices(k, columns, BLOCK_K, BLOCK_N)
            acc = tl.dot(tl.load(a_ptr, mask=a_mask, other=0.0), tl.load(b_ptr, mask=b_mask, other=0.0), acc)
        ctx.all_reduce_two_shot(Tile(pid_m, pid_n, BLOCK_M, BLOCK_N, acc), parts_view, c_view, locks)


def gemm_all_reduce(ctx, a, b, c, parts, locks):
    """C = sum of A @ B over all ranks.  Collective: every rank calls it; C is whole behind a barrier.

    It may be called again at once, also with other data, and captured in a graph: nothing has to be reset.

    Args:
        ctx: the open Iris.
        a, b: this rank's M x K and K x N, any strides.
        c: M x N, on the symmetric heap.
        parts: as c; the ranks' parts lie here while they are added up.
        locks: of `iris_triton.tiles.make_locks`.
    """
    (m, k), n = a.shape, b.shape[1]
    if c.shape != (m, n) or parts.shape != (m, n) or c.stride() != parts.stride():
        raise ValueError(f"c and parts must be {m} x {n} with the same strides")
    check_locks(ctx, locks, m, n, BLOCK_M, BLOCK_N)
    tiles = -(-m // BLOCK_M) * -(-n // BLOCK_N)
    gemm_all_reduce_kernel[(min(tiles, ctx.get_cu_count()),)](
        a, b, c, parts, locks, ctx.get_device_context(), m, n, k, *a.stride(), *b.stride(), *c.stride(),
        WORLD=ctx.num_ranks, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K,
    )  # fmt: skip


def main():
    with iris_core.Iris(heap_size="64MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        c, parts = ctx.zeros(M, N, dtype=torch.bfloat16), ctx.zeros(M, N, dtype=torch.bfloat16)
        locks = make_locks(ctx, M, N, BLOCK_M, BLOCK_N)
        ctx.barrier()
        for launch in range(LAUNCHES):
            generator = torch.Generator().manual_seed(launch)
            whole_a = torch.randn(M, K_PER_RANK * world, generator=generator).to(torch.bfloat16)
            whole_b = torch.randn(K_PER_RANK * world, N, generator=generator).to(torch.bfloat16)
            mine = slice(rank * K_PER_RANK, (rank + 1) * K_PER_RANK)
            gemm_all_reduce(ctx, whole_a[:, mine].to(ctx.device), whole_b[mine].to(ctx.device), c, parts, locks)
            ctx.barrier()
            torch.testing.assert_close(c.cpu().float(), whole_a.float() @ whole_b.float(), rtol=2e-2, atol=3e-1)
            same = ctx.broadcast(c.cpu().view(torch.int16).numpy(), src=0)
            assert (c.cpu().view(torch.int16).numpy() == same).all(), "the ranks' results differ in their bits"
        return f"rank {rank} of {world} on {ctx.device}: C is right {LAUNCHES} times, and the same on all ranks"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
