"""Tile-level collectives: all_reduce, reduce_scatter, all_gather, gather and all_to_all inside a user's kernel.

They are methods of `DeviceContext` and of Gluon's `IrisDeviceCtx`; see docs/tiles.md.

    views        Tile, TileView, TensorView, and the functions that they are made of
    protocol     who has arrived, and when memory is free again
    moves        all_gather, gather, all_to_all
    reductions   all_reduce and reduce_scatter
    locks        the words that they need: host side

Importing this package pulls in neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_triton.tiles.locks import check_locks as check_locks
    from iris_triton.tiles.locks import lock_words as lock_words
    from iris_triton.tiles.locks import make_locks as make_locks
    from iris_triton.tiles.reductions import AllReduceConfig as AllReduceConfig
    from iris_triton.tiles.views import TensorView as TensorView
    from iris_triton.tiles.views import Tile as Tile
    from iris_triton.tiles.views import TileView as TileView
    from iris_triton.tiles.views import chiplet_transform_chunked as chiplet_transform_chunked
    from iris_triton.tiles.views import compute_tile_indices as compute_tile_indices
    from iris_triton.tiles.views import compute_tile_offsets as compute_tile_offsets
    from iris_triton.tiles.views import make_tensor_view as make_tensor_view
    from iris_triton.tiles.views import offset_ptr as offset_ptr
    from iris_triton.tiles.views import tile_layout as tile_layout
    from iris_triton.tiles.views import tile_ptr as tile_ptr

_HOMES = {
    "AllReduceConfig": "reductions",
    "TensorView": "views",
    "Tile": "views",
    "TileView": "views",
    "check_locks": "locks",
    "chiplet_transform_chunked": "views",
    "compute_tile_indices": "views",
    "compute_tile_offsets": "views",
    "lock_words": "locks",
    "make_locks": "locks",
    "make_tensor_view": "views",
    "offset_ptr": "views",
    "tile_layout": "views",
    "tile_ptr": "views",
}

__all__ = [
    "AllReduceConfig",
    "TensorView",
    "Tile",
    "TileView",
    "check_locks",
    "chiplet_transform_chunked",
    "compute_tile_indices",
    "compute_tile_offsets",
    "lock_words",
    "make_locks",
    "make_tensor_view",
    "offset_ptr",
    "tile_layout",
    "tile_ptr",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value  # kernels look the functions up often
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
