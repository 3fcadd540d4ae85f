"""Algorithms in Gluon for `ctx.ops` (see docs/ops.md).  Imports nothing until a backend asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_core.protocols import FusedOperation


def operations() -> list[FusedOperation]:
    """Return the algorithms."""
    from iris_gluon.ops.algorithms import HopperCopyEngine, HopperFetch, HopperPush, HopperReduce

    return [
        HopperReduce("matmul_all_reduce"),
        HopperReduce("matmul_reduce_scatter"),
        HopperPush(),
        HopperFetch(),
        HopperCopyEngine(pushes=False),
        HopperCopyEngine(pushes=True),
    ]
