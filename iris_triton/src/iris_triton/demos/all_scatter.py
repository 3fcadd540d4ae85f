"""GEMM + all-scatter: every rank computes a slab of columns of C = A @ B and stores each tile to every rank at once.

No rank waits for a finished matrix before sending: a tile travels while the next one is computed.  A is the same on
every rank, B is split by columns, and C is whole on every rank at the end.
"""

import torch
import triton
import triton.language as tl
from triton.language import dot

from iris_core.types import DemoResult
from iris_triton.context import DeviceContext
from iris_triton.language.blocks import axis_for
from iris_triton.testing.languages import open_context

M, N_PER_RANK, K = 256, 128, 256
TILE_M, TILE_N, TILE_K = 64, 64, 32  # they divide these


@triton.constexpr_function
def default_layout(shape):
    """Return no layout: Triton chooses it.  In Gluon this is `iris_gluon.default_layout`."""


@triton.jit
def gemm_all_scatter(
    Context: tl.constexpr, context, world_size: tl.constexpr, a, b, c, N: tl.constexpr, K: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """C[:, rank's slab] = A @ B[:, rank's slab], on every rank; a slab has N columns; one program per tile."""
    ctx = open_context(Context, context, world_size)
    layout: tl.constexpr = default_layout([TILE_M, TILE_N])
    program = tl.program_id(0)
    rows = (program // (N // TILE_N) * TILE_M + axis_for((TILE_M, TILE_N), 0, layout))[:, None]
    columns = (program % (N // TILE_N) * TILE_N + axis_for((TILE_M, TILE_N), 1, layout))[None, :]
    acc = (rows + columns) * 0.0  # zeros, in the layout that the language gives the tile
    for k in range(0, K, TILE_K):
        a_tile = tl.load(a + rows * K + (k + axis_for((TILE_M, TILE_K), 1, layout))[None, :])
        b_tile = tl.load(b + (k + axis_for((TILE_K, TILE_N), 0, layout))[:, None] * N + columns)
        acc = dot(a_tile, b_tile, acc)
    where = c + rows * (N * world_size) + ctx.rank * N + columns
    tile = acc.to(c.dtype.element_ty)
    for i in range(world_size):  # begin with the neighbour, so that the ranks do not all store to rank 0 first
        ctx.store(where, tile, (ctx.rank + 1 + i) % world_size)


def run(ctx, kernel=gemm_all_scatter, Context=DeviceContext) -> DemoResult:
    """Run it on every rank of `ctx`, in the language of the kernel; compare with torch's product of whole matrices."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    n = N_PER_RANK * world
    generator = torch.Generator().manual_seed(7)
    whole_a, whole_b = (torch.randint(-1, 2, shape, generator=generator).bfloat16() for shape in ((M, K), (K, n)))
    a, b = whole_a.to(ctx.device), whole_b[:, rank * N_PER_RANK : (rank + 1) * N_PER_RANK].contiguous().to(ctx.device)
    c = ctx.full((M, n), float("nan"), dtype=torch.bfloat16)
    ctx.barrier()
    kernel[(M // TILE_M * (N_PER_RANK // TILE_N),)](  # one program for each tile of this rank's slab
        Context, ctx.get_device_context(), world, a, b, c, N_PER_RANK, K, TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=TILE_K
    )
    ctx.barrier()
    error = (c.cpu().float() - whole_a.float() @ whole_b.float()).abs().max().item()  # sums of small numbers: exact
    return DemoResult(error, 0.0, f"C {M} x {n}, K {K}, bf16, tiles {TILE_M} x {TILE_N}")
