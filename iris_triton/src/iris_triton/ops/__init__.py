"""Algorithms for `ctx.ops` (see docs/ops.md), and the names that scripts of the reference system look for here.

Imports nothing until a backend or a script asks for something.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_triton.rocm_iris import names

if TYPE_CHECKING:
    from iris_core.protocols import FusedOperation

TABLES = Path(__file__).parent / "tables"
"""Folder with the tables that come with these algorithms, measured ones and models."""


def operations() -> list[FusedOperation]:
    """Return the algorithms."""
    from iris_triton.ops.copy_engine import CopyEngineGather, CopyEngineReduce
    from iris_triton.ops.gathering import Fetch, Pull, Push
    from iris_triton.ops.reducing import Accumulate, Reduce, Ring

    return [
        Reduce("matmul_all_reduce", "two_shot"),
        Reduce("matmul_all_reduce", "one_shot"),
        Accumulate("atomic"),
        Accumulate("spinlock"),
        Ring(),
        Reduce("matmul_reduce_scatter", "push"),
        Push(),
        Fetch(),
        Pull(),
        CopyEngineGather(pushes=False),
        CopyEngineGather(pushes=True),
        CopyEngineReduce("matmul_reduce_scatter"),
        CopyEngineReduce("matmul_all_reduce"),
    ]


def __getattr__(name: str) -> Any:
    return names.find("iris.ops", name)


def __dir__() -> list[str]:
    return sorted({*globals(), *names.NAMED["iris.ops"]})
