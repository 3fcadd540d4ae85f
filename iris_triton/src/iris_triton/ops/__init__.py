"""Algorithms for `ctx.ops` (see docs/ops.md), and the names that scripts of the reference system look for here.

Imports nothing until a backend or a script asks for something.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core.ops.workspace import FusedWorkspace as FusedWorkspace
    from iris_core.protocols import FusedOperation
    from iris_triton.porting.configs import FusedConfig as FusedConfig
    from iris_triton.porting.operations import all_gather_matmul as all_gather_matmul
    from iris_triton.porting.operations import all_gather_matmul_hbm_buffer as all_gather_matmul_hbm_buffer
    from iris_triton.porting.operations import (
        all_gather_matmul_hbm_buffer_preamble as all_gather_matmul_hbm_buffer_preamble,
    )
    from iris_triton.porting.operations import all_gather_matmul_preamble as all_gather_matmul_preamble
    from iris_triton.porting.operations import matmul_all_gather as matmul_all_gather
    from iris_triton.porting.operations import matmul_all_gather_preamble as matmul_all_gather_preamble
    from iris_triton.porting.operations import matmul_all_reduce as matmul_all_reduce
    from iris_triton.porting.operations import matmul_all_reduce_preamble as matmul_all_reduce_preamble
    from iris_triton.porting.operations import matmul_reduce_scatter as matmul_reduce_scatter
    from iris_triton.porting.operations import matmul_reduce_scatter_preamble as matmul_reduce_scatter_preamble

TABLES = Path(__file__).parent / "tables"
"""Folder with the tables that were measured with these algorithms."""

_FUNCTIONS = (
    "all_gather_matmul",
    "all_gather_matmul_hbm_buffer",
    "all_gather_matmul_hbm_buffer_preamble",
    "all_gather_matmul_preamble",
    "matmul_all_gather",
    "matmul_all_gather_preamble",
    "matmul_all_reduce",
    "matmul_all_reduce_preamble",
    "matmul_reduce_scatter",
    "matmul_reduce_scatter_preamble",
)
_HOMES = {
    "FusedConfig": "iris_triton.porting.configs",
    "FusedWorkspace": "iris_core.ops.workspace",
    **dict.fromkeys(_FUNCTIONS, "iris_triton.porting.operations"),
}


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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
