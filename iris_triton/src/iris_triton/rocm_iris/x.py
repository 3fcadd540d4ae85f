"""Tile-level collectives as functions, with the names and orders of parameters of `iris.x` of AMD's Iris; `quiet`.

Each calls the method of its name of `ctx`, a `DeviceContext` or, in Gluon, an `IrisDeviceCtx`, which says what the
parameters mean; docs/tiles.md says what `locks` are.
"""

import triton
import triton.language as tl


@triton.jit
def all_gather(tile, dst_view, dim: tl.constexpr, ctx):
    """Store a tile to all ranks, at its place in the caller's part of `dst_view`."""
    ctx.all_gather(tile, dst_view, dim)


@triton.jit
def gather(tile, src_view, source_rank, ctx, hint: tl.constexpr = None):
    """Return a tile of source_rank's `src_view`; 0 beyond the tensor."""
    return ctx.gather(tile, src_view, source_rank, hint)


@triton.jit
def all_to_all(tile, src_view, dst_view, N_per_rank, ctx):
    """Fill a tile of the caller's `dst_view`; its columns s * N_per_rank and following come from rank s."""
    ctx.all_to_all(tile, src_view, dst_view, N_per_rank)


@triton.jit
def all_reduce_atomic(tile, dst_view, ctx):
    """Add a tile to `dst_view` of all ranks by atomics."""
    ctx.all_reduce_atomic(tile, dst_view)


@triton.jit
def all_reduce_spinlock(tile, dst_view, locks, ctx):
    """Add a tile to `dst_view` of all ranks, one rank at a time."""
    ctx.all_reduce_spinlock(tile, dst_view, locks)


@triton.jit
def all_reduce_one_shot(tile, src_view, dst_view, locks, ctx):
    """Sum a tile over all ranks; every rank reads all parts."""
    ctx.all_reduce_one_shot(tile, src_view, dst_view, locks)


@triton.jit
def all_reduce_two_shot(tile, src_view, dst_view, locks, start_tile=None, stride=None, ctx=None):
    """Sum a tile over all ranks; one rank reduces and stores to all; complete after a barrier.

    `start_tile` may be the context; else the rank with the tiles start_tile, start_tile + stride, ... reduces them.
    """
    if ctx is None:
        start_tile.all_reduce_two_shot(tile, src_view, dst_view, locks)
    else:
        ctx.all_reduce_two_shot(tile, src_view, dst_view, locks, start_tile, stride)


@triton.jit
def all_reduce_ring(tile, src_view, dst_view, ctx, locks=None):
    """Sum a tile over all ranks, from rank to rank."""
    tl.static_assert(locks is not None, "all_reduce_ring needs locks, the last argument: iris_triton.tiles.make_locks")
    ctx.all_reduce_ring(tile, src_view, dst_view, locks)


@triton.jit
def reduce_scatter(tile, src_view, dst_view, locks, ctx):
    """Sum a tile over all ranks; only its owner's `dst_view` gets the result: see the method."""
    ctx.reduce_scatter(tile, src_view, dst_view, locks)


@triton.jit
def quiet(copy_engine_ctx, to_rank):
    """Do nothing: kernels have no copy engines, and `put` stores by itself; ctx.get_copy_engine_ctx() returns None."""
    tl.static_assert(copy_engine_ctx is None, "quiet: kernels have no copy engines here; pass None")
