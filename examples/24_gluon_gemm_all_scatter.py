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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import iris_core
from iris_gluon import IrisDeviceCtx, default_layout, gemm
from iris_gluon.bulk import peer_descriptor

M, N_PER_RANK, K = 256, 192, 320


@gluon.jit
def load_block(
    matrix, first_row, first_column, rows, columns, down, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Load a block as float32; 0 beyond the matrix."""
    layout: gl.constexpr = default_layout([BLOCK_M, BLOCK_N])
    i = (first_row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout)))[:, None]
    j = (first_column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout)))[None, :]
    place = matrix + i.to(gl.int64) * down + j.to(gl.int64) * right
    return gl.load(place, mask=(i < rows) & (j < columns), other=0.0).to(gl.float32)


@gluon.jit
def multiply_tile(
    a, b, row, column, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Return the tile of A @ B that begins at (row, column), without matrix instructions: for every target."""
    layout: gl.constexpr = default_layout([BLOCK_M, BLOCK_N])
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)
    for first in range(0, k, BLOCK_K):
        left = load_block(a, row, first, m, k, stride_am, stride_ak, BLOCK_M, BLOCK_K)
        right = load_block(b, first, column, k, n, stride_bk, stride_bn, BLOCK_K, BLOCK_N)
        left = gl.convert_layout(left, gl.DotOperandLayout(0, layout, 0))
        right = gl.convert_layout(right, gl.DotOperandLayout(1, layout, 0))
        acc = gl.dot_fma(left, right, acc)
    return acc


@gluon.jit(do_not_specialize=["M", "N", "K"])  # a 1 would be a constant, which the order cannot hold
def portable(
    IrisDeviceCtx: gl.constexpr, context, a, b, c, M, N, K, stride_am, stride_ak, stride_bk, stride_bn, stride_cm,
    stride_cn, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """Persistent: programs take tiles in turn.  N is the width of a slab."""
    ctx = IrisDeviceCtx.initialize(context)
    order = gemm.RowGroups(gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N), 8)
    layout: gl.constexpr = default_layout([BLOCK_M, BLOCK_N])
    lane_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    lane_n = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
    for tile in range(gl.program_id(0), gl.cdiv(M, BLOCK_M) * gl.cdiv(N, BLOCK_N), gl.num_programs(0)):
        row, column = order.place(tile)
        acc = multiply_tile(
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
    part: gl.constexpr = [BLOCK_M, BLOCK_N // PARTS]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(part, c.dtype.element_ty)
    slabs = ()
    for step in gl.static_range(WORLD):  # the next rank first, so that the ranks do not all store to rank 0
        peer = (ctx.cur_rank + 1 + step) % WORLD
        theirs = peer_descriptor(slab, ctx.cur_rank, peer, ctx.heap_bases, [M, N], [stride_c, 1], part, layout)
        slabs = slabs + (theirs,)  # noqa: RUF005 - kernels have no unpacking
    gemm.multiply_tiles(
        a, b, gemm.RowGroups(tiles_m, tiles_n, GROUP), gemm.StoreTile(slabs), tiles_m * tiles_n, gl.cdiv(K, BLOCK_K),
        STAGES, PARTS, NUM_WARPS, TURNED_A=TURNED_A, TURNED_B=TURNED_B,
    )  # fmt: skip


def by_columns(matrix):
    """Whether a matrix lies by columns, as the transpose of a row-major one does."""
    return matrix.stride(1) != 1 and matrix.stride(0) == 1


def describe(matrix, block):
    """Describe a row-major matrix for TMA, which moves such blocks."""
    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, element))


def operands(config, a, b):
    """Describe A and B; their transposes where they lie by columns."""
    blocks = [config.block_m, config.block_k], [config.block_k, config.block_n]
    return [
        describe(matrix.t(), block[::-1]) if by_columns(matrix) else describe(matrix, block)
        for matrix, block in zip((a, b), blocks, strict=True)
    ]


def unsupported(a, b, c):
    """Say why the kernel for Hopper cannot multiply these matrices; empty if it can."""
    where = torch.cuda.get_device_name(a.device) if a.is_cuda else f"the {a.device.type.upper()}"
    if not a.is_cuda or torch.version.cuda is None or torch.cuda.get_device_capability(a.device) != (9, 0):
        return f"wgmma and TMA (sm_90) need an NVIDIA Hopper GPU, and this is {where}"
    if not a.dtype == b.dtype == c.dtype or a.dtype not in (torch.bfloat16, torch.float16):
        return f"the types must be equal, and bfloat16 or float16, not {a.dtype}, {b.dtype} and {c.dtype}"
    for name, matrix in (("A", a), ("B", b), ("C", c)):
        down, right = matrix.t().stride() if name != "C" and by_columns(matrix) else matrix.stride()
        if right != 1 or down <= 0 or down * matrix.element_size() % 16 or matrix.data_ptr() % 16:
            return f"TMA needs dense rows (or columns, but of C) at multiples of 16 bytes, and {name} has no such ones"
    return ""


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
    reason = unsupported(a, b, c)
    if reason:
        programs = min(-(-m // 64) * -(-n // 64), 4 * ctx.get_cu_count())
        portable[(programs,)](
            IrisDeviceCtx, ctx.get_device_context(), a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(),
            BLOCK_M=64, BLOCK_N=64, BLOCK_K=32,
        )  # fmt: skip
        return reason
    config = config or gemm.choose_config(m, n, ctx.get_cu_count())
    on_hopper[(min(config.tiles(m, n), ctx.get_cu_count()),)](
        IrisDeviceCtx, ctx.get_device_context(), *operands(config, a, b), c, m, n, k, c.stride(0),
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
