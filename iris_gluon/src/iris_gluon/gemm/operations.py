"""The algorithms for `ctx.ops` on Hopper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_gluon.gemm.gather_product import HopperCopyEngine, HopperFetch
from iris_gluon.gemm.push_product import HopperPush
from iris_gluon.gemm.reduce_product import HopperReduce

if TYPE_CHECKING:
    from iris_core.protocols import FusedOperation


def operations() -> list[FusedOperation]:
    """Return the algorithms."""
    return [
        HopperReduce("matmul_all_reduce"),
        HopperReduce("matmul_reduce_scatter"),
        HopperPush(),
        HopperFetch(),
        HopperCopyEngine(pushes=False),
        HopperCopyEngine(pushes=True),
    ]
