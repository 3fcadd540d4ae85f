"""Tile-level collectives that move data: all_gather, gather, all_to_all.  The methods of the contexts describe them."""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.language.memory import load, store


@triton.constexpr_function
def _is_dim(dim):
    return dim in (0, 1)


_WIDE = tl.constexpr(16)
"""Elements of which a number of columns must be a multiple to be moved 16 bytes at a time, whatever their type."""


@triton.jit
def _store_to_all(tile, dst_view, rm, rn, within, world):
    ptr, mask = dst_view.tile_ptr_from_indices(rm, rn, tile.block_m, tile.block_n)
    value = tile.partial(dst_view)
    for step in range(world.size):  # the next rank first, so that the ranks do not all store to rank 0
        peer = (world.rank + 1 + step) % world.size
        store(ptr, value, world.rank, peer, world.heap_bases, mask & within)


@triton.jit
def _store_columns(tile, dst_view, part, world):
    rm, rn = tile.indices()
    _store_to_all(tile, dst_view, rm, rn + world.rank * part, (rn < part)[None, :], world)


@triton.jit
def all_gather(tile, dst_view, dim: tl.constexpr, world):
    """Store a tile to all ranks, in the caller's part of `dst_view`; what lies beyond the part is another rank's."""
    tl.static_assert(_is_dim(dim), "dim of all_gather is 0 (rows) or 1 (columns)")
    if dim == 0:
        part = tl.cdiv(dst_view.M, world.size)
        rm, rn = tile.indices()
        _store_to_all(tile, dst_view, rm + world.rank * part, rn, (rm < part)[:, None], world)
    else:
        part = tl.cdiv(dst_view.N, world.size)
        if part % _WIDE == 0:
            _store_columns(tile, dst_view, part // _WIDE * _WIDE, world)  # a form whose alignment the compiler sees
        else:
            _store_columns(tile, dst_view, part, world)


@triton.jit
def gather(tile, src_view, source_rank, hint: tl.constexpr, world):
    """Return a tile of source_rank's `src_view`; 0 beyond the tensor."""
    ptr, mask = src_view.tile_ptr(tile)
    return load(ptr, world.rank, source_rank, world.heap_bases, mask, 0, None, False, hint)


@triton.jit
def all_to_all(tile, src_view, dst_view, N_per_rank, world):
    """Fill a tile of the caller's `dst_view`: column s * N_per_rank + j is column rank * N_per_rank + j of rank s."""
    columns = world.size * N_per_rank
    tl.device_assert(
        (columns <= dst_view.N) & (columns <= src_view.N),
        "all_to_all: the tensors must have world_size * N_per_rank columns",
    )
    rm, rn = tile.indices()
    to, to_mask = dst_view.tile_ptr_from_indices(rm, rn, tile.block_m, tile.block_n)
    first = tile.pid_n * tile.block_n // N_per_rank
    last = tl.minimum((tile.pid_n * tile.block_n + tile.block_n - 1) // N_per_rank, world.size - 1)
    for source in range(first, last + 1):
        column = rn - source * N_per_rank
        mine = ((column >= 0) & (column < N_per_rank))[None, :]
        origin, origin_mask = src_view.tile_ptr_from_indices(
            rm, world.rank * N_per_rank + column, tile.block_m, tile.block_n
        )
        mask = to_mask & origin_mask & mine
        tl.store(to, load(origin, world.rank, source, world.heap_bases, mask), mask=mask)
