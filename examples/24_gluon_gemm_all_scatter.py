"""GEMM + all-scatter in Gluon: each rank computes a slab of columns of C = A @ B and stores every tile to all ranks.

A is the same on all ranks, B is split by columns, and C is whole on every rank at the end.  A tile travels while the
next one is computed.  Two kernels do the same: one for every target, the CPU included, and one for Hopper, which
multiplies with wgmma and moves everything by TMA.

    python examples/24_gluon_gemm_all_scatter.py [ranks]
"""

import sys

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris_core
from iris_gluon import IrisDeviceCtx, gemm
from iris_gluon.gemm.launch import by_columns

M, N_PER_RANK, K = 256, 192, 320


@gluon.jit(do_not_specialize=["M", "N", "K"])  # a 1 would be a constant, which the order cannot hold
def portable(
    IrisDeviceCtx: gl.constexpr, context, a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    stride_cn, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Persistent: programs take tiles in turn.  N is the width of a slab."""
    ctx = IrisDeviceCtx.initialize(context)
    order = gemm.RowGroups(gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), 8)
    layout: gl.constexpr = gemm.tile_layout([BLOCK_M, BLOCK_N])
    lane_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    lane_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        row, column = order.place(tile)
        acc = gemm.multiply_tile(
            a, b, row * BLOCK_M, column * BLOCK_N, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        i = (row * BLOCK_M + lane_m)[:, None]
        j = (column * BLOCK_N + lane_n)[None, :]
        where = c + i.to(gl.int64) * stride_cm + (ctx.cur_rank * N + j).to(gl.int64) * stride_cn
        for step in range(ctx.num_ranks):  # the next rank first, so that the ranks do not all store to rank 0
            peer = (ctx.cur_rank + 1 + step) % ctx.num_ranks
            ctx.store(where, acc.to(c.dtype.element_ty), peer, mask=(i < M) & (j < N))


@gluon.jit(do_not_specialize=["M", "N", "K"])
def on_hopper(
    IrisDeviceCtx: gl.constexpr, context, a, b, c, M, N, K, stride_c, WORLD: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr,
    TURNED_A: gl.constexpr = False, TURNED_B: gl.constexpr = False
):  # fmt: skip
    """The core of `iris_gluon.gemm`, with a sink that stores every tile to all ranks.

    a and b are descriptors, of the transposes where TURNED_A and TURNED_B say so.
    """
    ctx = IrisDeviceCtx.initialize(context)
    BLOCK_M: gl.constexpr = a.block_type.shape[1 if TURNED_A else 0]
    BLOCK_K: gl.constexpr = a.block_type.shape[0 if TURNED_A else 1]
    BLOCK_N: gl.constexpr = b.block_type.shape[0 if TURNED_B else 1]
    tiles_m, tiles_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    slab = c + gl.cast(ctx.cur_rank, gl.int64) * N
    sink = gemm.scatter_tile(ctx, slab, [M, N], [stride_c, 1], BLOCK_M, BLOCK_N // PARTS, WORLD)
    gemm.multiply_tiles(
        a, b, gemm.RowGroups(tiles_m, tiles_n, GROUP), sink, tiles_m * tiles_n, gl.cdiv(K, BLOCK_K),
        STAGES, PARTS, NUM_WARPS, TURNED_A=TURNED_A, TURNED_B=TURNED_B,
    )  # fmt: skip


def gemm_all_scatter(ctx, a, b, c, config=None):
    """C[:, slab of rank r] = A @ B of rank r, for all ranks r, on all ranks.

    Collective: every rank calls it; C is whole behind a barrier between the devices.

    Args:
        ctx: the open Iris.
        a: M x K, of any strides, the same on all ranks.
        b: K x N, of any strides, this rank's columns.
        c: M x (N * ranks), of any strides, on the symmetric heap.
        config: `gemm.GemmConfig` of the Hopper kernel; by default chosen by shape.

    Returns:
        Empty, or why the portable kernel ran.
    """
    (m, k), n = a.shape, b.shape[1]
    if b.shape[0] != k or c.shape != (m, n * ctx.num_ranks) or 0 in (m, n, k):
        raise ValueError(f"{tuple(a.shape)} @ {tuple(b.shape)} on {ctx.num_ranks} ranks does not make {tuple(c.shape)}")
    if not ctx.is_symmetric(c):
        raise ValueError("c must lie on the symmetric heap: the other ranks store to it")
    reason = gemm.unsupported(a, b, c)
    if reason:
        programs = min(-(-m // 64) * -(-n // 64), 4 * ctx.get_cu_count())
        portable[(programs,)](
            IrisDeviceCtx, ctx.get_device_context(), a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(),
            BLOCK_M=64, BLOCK_N=64, BLOCK_K=32,
        )  # fmt: skip
        return reason
    config = config or gemm.choose_config(m, n, ctx.get_cu_count())
    on_hopper[(min(config.tiles(m, n), ctx.get_cu_count()),)](
        IrisDeviceCtx, ctx.get_device_context(), *config.operands(a, b), c, m, n, k, c.stride(0),
        WORLD=ctx.num_ranks, TURNED_A=by_columns(a), TURNED_B=by_columns(b), **config.options,
    )  # fmt: skip
    return ""


def main():
    with iris_core.Iris(heap_size="64MiB", backend="gluon") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        generator = torch.Generator().manual_seed(7)
        shapes = (M, K), (K, N_PER_RANK * world)  # small whole numbers: their sums are exact
        whole_a, whole_b = (torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in shapes)
        a = whole_a.to(ctx.device)
        b = whole_b[:, rank * N_PER_RANK : (rank + 1) * N_PER_RANK].contiguous().to(ctx.device)
        c = ctx.full((M, N_PER_RANK * world), float("nan"), dtype=torch.bfloat16)
        ctx.barrier()
        reason = gemm_all_scatter(ctx, a, b, c)
        ctx.barrier()
        assert torch.equal(c.cpu().float(), whole_a.float() @ whole_b.float())
        kernel = f"the portable kernel, because {reason}" if reason else "the kernel for Hopper"
        return f"rank {rank} of {world} on {ctx.device}: C is right; {kernel}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
