"""The programs of `iris demo --backend gluon`: the kernels of `iris_triton.demos` in Gluon, with its host code.

They use no matrix instructions and no TMA, so they run on every target, CPU ranks included.
"""

import functools

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.types import Demo
from iris_gluon.context import IrisDeviceCtx
from iris_gluon.layouts import default_layout
from iris_triton.demos import all_scatter, message_passing


@gluon.jit
def pass_messages(
    IrisDeviceCtx: gl.constexpr, context, source, slots, result, flags, credits, rounds, num_blocks, BLOCK: gl.constexpr
):  # fmt: skip
    """Send `rounds` times every block of `source` to the next rank; add up what arrives in `result`."""
    ctx = IrisDeviceCtx.initialize(context)
    program = gl.program_id(0)
    layout: gl.constexpr = default_layout([BLOCK])
    lanes = gl.arange(0, BLOCK, layout=layout)
    if program < num_blocks:
        succ = (ctx.cur_rank + 1) % ctx.num_ranks
        block = program * BLOCK + lanes
        for r in range(rounds):
            ctx.wait(credits + program, r, cmp="ge")
            data = gl.load(source + block) * (r + 1)
            ctx.store(slots + block, data, succ)
            ctx.signal(flags + program, r + 1, succ)
    else:
        pred = (ctx.cur_rank + ctx.num_ranks - 1) % ctx.num_ranks
        slot = program - num_blocks
        block = slot * BLOCK + lanes
        total = gl.zeros([BLOCK], gl.float32, layout)
        for r in range(rounds):
            ctx.wait(flags + slot, r + 1, cmp="ge")
            total += gl.load(slots + block)
            ctx.signal(credits + slot, r + 1, pred)
        gl.store(result + block, total)


@gluon.jit
def gemm_all_scatter(
    IrisDeviceCtx: gl.constexpr, context, a, b, c, N: gl.constexpr, K: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr,
):  # fmt: skip
    """C[:, rank's slab] = A @ B[:, rank's slab], on every rank; a slab has N columns; one program per tile."""
    ctx = IrisDeviceCtx.initialize(context)
    layout: gl.constexpr = default_layout([TILE_M, TILE_N])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    of_columns: gl.constexpr = gl.SliceLayout(0, layout)
    row, column = gl.program_id(0) // (N // TILE_N) * TILE_M, gl.program_id(0) % (N // TILE_N) * TILE_N
    rows = (row + gl.arange(0, TILE_M, layout=of_rows))[:, None]
    columns = (column + gl.arange(0, TILE_N, layout=of_columns))[None, :]
    acc = gl.zeros([TILE_M, TILE_N], gl.float32, layout)
    for k in range(0, K, TILE_K):
        a_tile = gl.load(a + rows * K + (k + gl.arange(0, TILE_K, layout=of_columns))[None, :])
        b_tile = gl.load(b + (k + gl.arange(0, TILE_K, layout=of_rows))[:, None] * N + columns)
        left = gl.convert_layout(a_tile.to(gl.float32), gl.DotOperandLayout(0, layout, 0))
        right = gl.convert_layout(b_tile.to(gl.float32), gl.DotOperandLayout(1, layout, 0))
        acc = gl.dot_fma(left, right, acc)
    where = c + rows * (N * ctx.num_ranks) + ctx.cur_rank * N + columns
    tile = acc.to(c.dtype.element_ty)
    for i in range(ctx.num_ranks):  # begin with the neighbour, so that the ranks do not all store to rank 0 first
        ctx.store(where, tile, (ctx.cur_rank + 1 + i) % ctx.num_ranks)


def _launch_messages(ctx, *tensors) -> None:
    blocks, rounds = message_passing.BLOCKS, message_passing.ROUNDS
    pass_messages[(2 * blocks,)](
        IrisDeviceCtx, ctx.get_device_context(), *tensors, rounds, blocks, BLOCK=message_passing.BLOCK
    )


def _launch_all_scatter(ctx, a, b, c) -> None:
    n, tile_m, tile_n = all_scatter.N_PER_RANK, all_scatter.TILE_M, all_scatter.TILE_N
    gemm_all_scatter[(all_scatter.M // tile_m * (n // tile_n),)](
        IrisDeviceCtx, ctx.get_device_context(), a, b, c, n, all_scatter.K,
        TILE_M=tile_m, TILE_N=tile_n, TILE_K=all_scatter.TILE_K,
    )  # fmt: skip


def demos() -> tuple[Demo, ...]:
    """Return the programs in the order in which they are shown."""
    messages = functools.partial(message_passing.run, launch=_launch_messages)
    scatter = functools.partial(all_scatter.run, launch=_launch_all_scatter)
    return (
        Demo("message-passing", "producer and consumer with flags, in Gluon", messages),
        Demo("gemm-all-scatter", "GEMM that stores its tiles to every rank, in Gluon", scatter),
    )
