"""Names of collectives for scripts of the reference system: `from iris_triton.ccl import Config`.

    Config                  how a collective is to run; fields can be assigned
    ReduceOp                reductions
    AllReduceWorkspace      what ctx.ccl.all_reduce returns
    extract_group_info      a group as first rank and stride
    all_gather, all_reduce, all_to_all, reduce_scatter
                            modules with the operations as functions: all_gather.all_gather(output, input, ctx)

Importing this package imports neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core.ccl.reduce_op import ReduceOp as ReduceOp
    from iris_triton.porting.collectives import AllReduceWorkspace as AllReduceWorkspace
    from iris_triton.porting.configs import Config as Config
    from iris_triton.porting.groups import extract_group_info as extract_group_info

_HOMES = {
    "AllReduceWorkspace": "iris_triton.porting.collectives",
    "Config": "iris_triton.porting.configs",
    "ReduceOp": "iris_core.ccl.reduce_op",
    "extract_group_info": "iris_triton.porting.groups",
}
_MODULES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")

__all__ = ["AllReduceWorkspace", "Config", "ReduceOp", "extract_group_info"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
