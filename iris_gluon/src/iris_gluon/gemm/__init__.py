"""GEMM in Gluon: a persistent core for Hopper that fused kernels build on, and a tile product for every target.

- `multiply_tiles`: the core: TMA, wgmma, partitions of warps; takes an order and a sink
- `RowGroups`: the usual order of tiles
- `StoreTile`, `ScatterTile`: sinks: to one matrix; to the same place on every rank (`scatter_tile` makes it)
- `AddBias`: a sink that adds a bias and hands on to another
- `multiply_tile`: a tile on any target, in the layout `tile_layout`
- `matmul`: C = A @ B with the core, from the host
- `GemmConfig`, `choose_config`: how the core is launched, and the choice by shape
- `unsupported`: why the core cannot multiply given matrices
"""

from iris_gluon.gemm.hopper import multiply_tiles
from iris_gluon.gemm.launch import GemmConfig, choose_config, descriptor, matmul, unsupported
from iris_gluon.gemm.order import RowGroups
from iris_gluon.gemm.portable import multiply_tile, tile_layout
from iris_gluon.gemm.sinks import AddBias, ScatterTile, StoreTile, scatter_tile

__all__ = [
    "AddBias",
    "GemmConfig",
    "RowGroups",
    "ScatterTile",
    "StoreTile",
    "choose_config",
    "descriptor",
    "matmul",
    "multiply_tile",
    "multiply_tiles",
    "scatter_tile",
    "tile_layout",
    "unsupported",
]
