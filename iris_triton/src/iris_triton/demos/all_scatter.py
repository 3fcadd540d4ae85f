"""GEMM + all-scatter: every rank computes a slab of columns of C = A @ B and stores each tile to every rank at once.

No rank waits for a finished matrix before sending: a tile travels while the next one is computed.  A is the same on
every rank, B is split by columns, and C is whole on every rank at the end.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl

from iris_core.types import DemoResult
from iris_triton.context import DeviceContext

M, N_PER_RANK, K = 256, 128, 256
TILE_M, TILE_N, TILE_K = 64, 64, 32


@triton.jit
def gemm_all_scatter(
    a, b, c, context, rank: tl.constexpr, world_size: tl.constexpr,
    M, N_local, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm, stride_cn,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """C[:, rank's slab] = A @ B[:, rank's slab], on every rank; one program per tile."""
    ctx = DeviceContext.initialize(context, rank, world_size)
    tiles_n = tl.cdiv(N_local, TILE_N)
    pid = tl.program_id(0)
    rm = (pid // tiles_n) * TILE_M + tl.arange(0, TILE_M)
    rn = (pid % tiles_n) * TILE_N + tl.arange(0, TILE_N)
    rk = tl.arange(0, TILE_K)
    acc = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for k in range(0, K, TILE_K):
        ks = k + rk
        a_tile = tl.load(
            a + rm[:, None].to(tl.int64) * stride_am + ks[None, :] * stride_ak,
            mask=(rm[:, None] < M) & (ks[None, :] < K),
            other=0.0,
        )
        b_tile = tl.load(
            b + ks[:, None].to(tl.int64) * stride_bk + rn[None, :] * stride_bn,
            mask=(ks[:, None] < K) & (rn[None, :] < N_local),
            other=0.0,
        )
        acc = tl.dot(a_tile, b_tile, acc)
    columns = rank * N_local + rn
    where = c + rm[:, None].to(tl.int64) * stride_cm + columns[None, :] * stride_cn
    inside = (rm[:, None] < M) & (rn[None, :] < N_local)
    tile = acc.to(c.dtype.element_ty)
    for i in range(world_size):
        # begin with the neighbour, so that the ranks do not all store to rank 0 first
        ctx.store(where, tile, (rank + 1 + i) % world_size, mask=inside)


def run(ctx, progress) -> DemoResult:
    """Run it on every rank of `ctx` and compare with torch's product of the whole matrices."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    n = N_PER_RANK * world
    generator = torch.Generator().manual_seed(7)
    whole_a, whole_b = (torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in ((M, K), (K, n)))
    a = whole_a.to(ctx.device)
    b = whole_b[:, rank * N_PER_RANK : (rank + 1) * N_PER_RANK].to(ctx.device)
    c = ctx.full((M, n), float("nan"), dtype=torch.bfloat16)
    ctx.barrier()
    progress(0.1)
    grid = (triton.cdiv(M, TILE_M) * triton.cdiv(N_PER_RANK, TILE_N),)
    gemm_all_scatter[grid](
        a, b, c, ctx.get_device_context(), rank, world,
        M, N_PER_RANK, K, *a.stride(), *b.stride(), *c.stride(), TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=TILE_K,
    )  # fmt: skip
    ctx.barrier()
    progress(1.0)
    expected = whole_a.float() @ whole_b.float()
    error = (c.cpu().float() - expected).abs().max().item()  # small whole numbers: their sums are exact
    return DemoResult(error, 0.0, f"C {M} x {n}, K {K}, bf16, tiles {TILE_M} x {TILE_N}")
