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

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_gluon.gemm.hopper import multiply_tiles
from iris_gluon.gemm.launch import GemmConfig, choose_config, descriptor, matmul, unsupported
from iris_gluon.gemm.order import RowGroups
from iris_gluon.gemm.portable import multiply_tile, tile_layout
from iris_gluon.gemm.sinks import AddBias, ScatterTile, StoreTile, scatter_tile

if TYPE_CHECKING:
    from iris_core.protocols import FusedOperation

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


def operations() -> list[FusedOperation]:
    """Return the algorithms for `ctx.ops`; imports them only now."""
    from iris_gluon.gemm.gather_product import HopperCopyEngine, HopperFetch
    from iris_gluon.gemm.push_product import HopperPush
    from iris_gluon.gemm.reduce_product import HopperReduce

    gather = "all_gather_matmul"
    return [
        HopperReduce("matmul_reduce_scatter", "hopper_push"),
        HopperPush("matmul_all_gather", "hopper_push"),
        HopperFetch(gather, "hopper_fetch"),
        HopperCopyEngine(gather, "hopper_copy_engine", pushes=False),
        HopperCopyEngine(gather, "hopper_copy_engine_push", pushes=True),
    ]
