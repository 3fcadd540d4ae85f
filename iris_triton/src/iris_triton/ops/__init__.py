"""Algorithms for `ctx.ops` (see docs/ops.md).  Imports nothing until a backend asks for them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_core.protocols import FusedOperation

TABLES = Path(__file__).parent / "tables"
"""Folder with the tables that were measured with these algorithms."""


def operations() -> list[FusedOperation]:
    """Return the algorithms."""
    from iris_triton.ops.gathering import Fetch, Pull, Push
    from iris_triton.ops.reducing import Reduce

    return [
        Reduce("matmul_all_reduce", "two_shot"),
        Reduce("matmul_all_reduce", "one_shot"),
        Reduce("matmul_reduce_scatter", "push"),
        Push(),
        Fetch(),
        Pull(),
    ]
