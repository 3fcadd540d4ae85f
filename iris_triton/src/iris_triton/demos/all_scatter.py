"""GEMM + all-scatter: every rank computes a slab of columns of C = A @ B and stores each tile to every rank at once.

No rank waits for a finished matrix before sending: a tile travels while the next one is computed.  A is the same on
every rank, B is split by columns, and C is whole on every rank at the end.
"""

import torch
import triton
import triton.language as tl

from iris_core.types import DemoResult
from iris_triton.context import DeviceContext

M, N_PER_RANK, K = 256, 128, 256
TILE_M, TILE_N, TILE_K = 64, 64, 32  # they divide these


@triton.jit
def gemm_all_scatter(
    a, b, c, context, rank: tl.constexpr, world_size: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """C[:, rank's slab] = A @ B[:, rank's slab], on every rank; a slab has N columns; one program per tile."""
    ctx = DeviceContext.initialize(context, rank, world_size)
    program = tl.program_id(0)
    rows = (program // (N // TILE_N) * TILE_M + tl.arange(0, TILE_M))[:, None]
    columns = (program % (N // TILE_N) * TILE_N + tl.arange(0, TILE_N))[None, :]
    inner = tl.arange(0, TILE_K)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for k in range(0, K, TILE_K):
        a_tile = tl.load(a + rows * K + (k + inner)[None, :])
        b_tile = tl.load(b + (k + inner)[:, None] * N + columns)
        acc = tl.dot(a_tile, b_tile, acc)
    where = c + rows * (N * world_size) + rank * N + columns
    tile = acc.to(c.dtype.element_ty)
    for i in range(world_size):  # begin with the neighbour, so that the ranks do not all store to rank 0 first
        ctx.store(where, tile, (rank + 1 + i) % world_size)


def launch(ctx, a, b, c) -> None:
    """Launch it on this rank: one program for each tile of its slab."""
    gemm_all_scatter[(M // TILE_M * (N_PER_RANK // TILE_N),)](
        a, b, c, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks, N_PER_RANK, K,
        TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=TILE_K,
    )  # fmt: skip


def run(ctx, launch=launch) -> DemoResult:
    """Run it on every rank of `ctx` and compare with torch's product of the whole matrices.

    `launch` is called with ctx, a, b and c; that of another language is in iris_gluon.
    """
    rank, world = ctx.cur_rank, ctx.num_ranks
    n = N_PER_RANK * world
    generator = torch.Generator().manual_seed(7)
    whole_a, whole_b = (torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in ((M, K), (K, n)))
    a, b = whole_a.to(ctx.device), whole_b[:, rank * N_PER_RANK : (rank + 1) * N_PER_RANK].contiguous().to(ctx.device)
    c = ctx.full((M, n), float("nan"), dtype=torch.bfloat16)
    ctx.barrier()
    launch(ctx, a, b, c)
    ctx.barrier()
    error = (c.cpu().float() - whole_a.float() @ whole_b.float()).abs().max().item()  # sums of small numbers: exact
    return DemoResult(error, 0.0, f"C {M} x {n}, K {K}, bf16, tiles {TILE_M} x {TILE_N}")
