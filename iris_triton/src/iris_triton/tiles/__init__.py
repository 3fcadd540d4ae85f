"""Tile-level collectives: all_reduce, reduce_scatter, all_gather, gather and all_to_all inside a user's kernel.

They are methods of `DeviceContext` and of Gluon's `IrisDeviceCtx`; see docs/tiles.md.
"""

from iris_triton.tiles.locks import check_locks, lock_words, make_locks
from iris_triton.tiles.reductions import AllReduceConfig
from iris_triton.tiles.views import (
    TensorView,
    Tile,
    TileView,
    chiplet_transform_chunked,
    compute_tile_indices,
    compute_tile_offsets,
    make_tensor_view,
    offset_ptr,
    tile_layout,
    tile_ptr,
)

__all__ = [
    "AllReduceConfig", "TensorView", "Tile", "TileView", "check_locks", "chiplet_transform_chunked",
    "compute_tile_indices", "compute_tile_offsets", "lock_words", "make_locks", "make_tensor_view", "offset_ptr",
    "tile_layout", "tile_ptr",
]  # fmt: skip
