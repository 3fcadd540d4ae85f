"""Reductions of tiles for which the kernel itself raises flags, as in the reference system.

There is one word for each tile, zero before the launch on all ranks.  The kernel stores its part in `src_view`, then
sets the word of the tile to 1, in its own memory, with release semantics; then it calls the function, which waits for
that word on all ranks and reads their parts.  Between two launches the host zeroes the words behind a barrier, because
a word that is still 1 tells of the part before.  The methods of the contexts count calls instead and need none of that.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.flags import await_flags, is_counter, lanes_for
from iris_triton.tiles.reductions import _store_own, _store_to_all, _sum
from iris_triton.tiles.views import number_of
from iris_triton.translation import translate

_MEMBERS = tl.constexpr(32)
"""Ranks that are awaited at a time, at least."""


@triton.jit
def await_raised(locks, tile_id, world):
    """Wait until all ranks have raised their flag of a tile; their parts are visible then."""
    tl.static_assert(is_counter(locks.dtype.element_ty), "locks must be an int32 or int64 tensor, a word for each tile")
    word = locks + tl.cast(tile_id, tl.int64)
    timeout_ns, status = world.bound()
    one = tl.cast(1, locks.dtype.element_ty)
    lane = lanes_for(_MEMBERS)
    for first in range(0, world.size, lane.shape[0]):
        member = first + lane  # those beyond the world repeat a rank
        flags = translate(word, world.rank, member % world.size, world.heap_bases)
        await_flags(flags, one, member < world.size, "ge", "acquire", "sys", timeout_ns, status, world.rank)


@triton.jit
def all_reduce_one_shot(tile, src_view, dst_view, locks, world):
    """Every rank sums up all parts of a tile."""
    await_raised(locks, number_of(tile, dst_view), world)
    _store_own(tile, dst_view, _sum(tile, src_view, world))


@triton.jit
def all_reduce_two_shot(tile, src_view, dst_view, locks, start_tile, stride, world):
    """The rank of which the tile is one of start_tile, start_tile + stride, ... sums up and stores to all."""
    tile_id = number_of(tile, dst_view)
    if (tile_id >= start_tile) & ((tile_id - start_tile) % stride == 0):
        await_raised(locks, tile_id, world)
        _store_to_all(tile, dst_view, _sum(tile, src_view, world), world)


@triton.jit
def reduce_scatter(tile, src_view, dst_view, locks, world):
    """The tile's owner sums up: rank r has T // size tiles from r * (T // size) on, the last rank also the rest."""
    tile_id = number_of(tile, dst_view)
    share = dst_view.number_of_tiles(tile.block_m, tile.block_n) // world.size
    owner = tl.where(share == 0, world.size - 1, tl.minimum(tile_id // tl.maximum(share, 1), world.size - 1))
    if owner == world.rank:
        await_raised(locks, tile_id, world)
        _store_own(tile, dst_view, _sum(tile, src_view, world))
