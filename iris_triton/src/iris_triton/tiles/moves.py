"""Tile-level collectives that move data: all_gather, gather, all_to_all, as methods of the contexts."""

import triton
import triton.language as tl

from iris_triton._compat import AggregateMethods
from iris_triton.language.memory import load, store

_WIDE = tl.constexpr(16)  # if the number of columns is a multiple of it, 16 bytes are moved at a time, of whatever type


@triton.jit
def store_to_all(ptr, value, mask, ctx):
    """Store a block to all ranks: the next one first, so that not all store to rank 0 at the same time."""
    for step in range(ctx.world_size):
        store(ptr, value, ctx.rank, (ctx.rank + 1 + step) % ctx.world_size, ctx.heap_bases, mask)


@triton.jit
def _store_part(tile, dst_view, rm, rn, within, ctx):
    ptr, mask = dst_view.tile_ptr_from_indices(rm, rn, tile.block_m, tile.block_n)
    store_to_all(ptr, tile.partial(dst_view), mask & within, ctx)


@triton.jit
def _store_columns(tile, dst_view, rm, rn, part, ctx):
    _store_part(tile, dst_view, rm, rn + ctx.rank * part, (rn < part)[None, :], ctx)


class Moves(AggregateMethods):
    """Methods of every device context that move tiles."""

    @triton.jit
    def all_gather(self, tile, dst_view, dim: tl.constexpr):
        """Store a tile to all ranks, at its place in the caller's part of `dst_view`.

        Complete on all ranks after a barrier; a second barrier must come before `dst_view` is written again.

        Args:
            tile: `Tile` of the caller's own part.
            dst_view: the whole, symmetric: the ranks' parts below each other (dim 0) or side by side (dim 1).
            dim: 0: part r begins at row r * p, p = M / world_size rounded up, and the last parts may be shorter;
                1: the same with columns.
        """
        tl.static_assert(dim == 0 or dim == 1, "dim of all_gather is 0 (rows) or 1 (columns)")
        rm, rn = tile.indices()
        if dim == 0:
            part = tl.cdiv(dst_view.M, self.world_size)
            _store_part(tile, dst_view, rm + self.rank * part, rn, (rm < part)[:, None], self)
        else:
            part = tl.cdiv(dst_view.N, self.world_size)
            if part % _WIDE == 0:
                _store_columns(tile, dst_view, rm, rn, part // _WIDE * _WIDE, self)  # the compiler sees its alignment
            else:
                _store_columns(tile, dst_view, rm, rn, part, self)

    @triton.jit
    def gather(self, tile, src_view, source_rank, hint: tl.constexpr = None):
        """Return a tile of source_rank's `src_view`; 0 beyond the tensor.

        Args:
            tile: `TileView`.
            src_view: symmetric, complete on source_rank.
            source_rank: rank whose memory is read.
            hint: as in `load`.
        """
        ptr, mask = src_view.tile_ptr(tile)
        return load(ptr, self.rank, source_rank, self.heap_bases, mask, 0, None, False, hint)

    @triton.jit
    def all_to_all(self, tile, src_view, dst_view, N_per_rank):
        """Fill a tile of the caller's `dst_view`; its columns s * N_per_rank and following come from rank s.

        They are columns rank * N_per_rank and following there.  Reads the other ranks: a barrier must come before, and
        another one before `src_view` is written again.

        Args:
            tile: `TileView` of `dst_view`; may span the parts of several ranks.
            src_view: M x (world_size * N_per_rank), symmetric.
            dst_view: the same shape, the caller's own.
            N_per_rank: columns that each rank sends to each.
        """
        columns = self.world_size * N_per_rank
        tl.device_assert(
            (columns <= dst_view.N) & (columns <= src_view.N),
            "all_to_all: the tensors must have world_size * N_per_rank columns",
        )
        rm, rn = tile.indices()
        to, to_mask = dst_view.tile_ptr_from_indices(rm, rn, tile.block_m, tile.block_n)
        first = tile.pid_n * tile.block_n // N_per_rank
        last = tl.minimum((tile.pid_n * tile.block_n + tile.block_n - 1) // N_per_rank, self.world_size - 1)
        for source in range(first, last + 1):
            column = rn - source * N_per_rank
            mine = ((column >= 0) & (column < N_per_rank))[None, :]
            origin, origin_mask = src_view.tile_ptr_from_indices(
                rm, self.rank * N_per_rank + column, tile.block_m, tile.block_n
            )
            mask = to_mask & origin_mask & mine
            tl.store(to, load(origin, self.rank, source, self.heap_bases, mask), mask=mask)
