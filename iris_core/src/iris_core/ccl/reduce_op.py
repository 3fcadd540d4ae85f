"""Reductions: our names, torch's, and which element types each one works on."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from iris_core.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    import torch


class ReduceOp(enum.IntEnum):
    """How the elements of the ranks become one."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BAND = 4
    BOR = 5
    BXOR = 6
    AVG = 7


_BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
REDUCIBLE = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
"""torch's names of the element types that can be reduced."""


def reduce_op(op: Any) -> ReduceOp:
    """Return the `ReduceOp` that an argument means.

    Args:
        op: a ReduceOp or its number, one of torch.distributed, a name ("sum"), or None for SUM.

    Raises:
        ArgumentError: there is no such reduction.
    """
    if op is None:
        return ReduceOp.SUM
    if isinstance(op, int) and not isinstance(op, bool) and op in tuple(ReduceOp):
        return ReduceOp(op)
    name = (op if isinstance(op, str) else str(getattr(op, "name", ""))).upper()
    if name in ReduceOp.__members__:
        return ReduceOp[name]
    known = ", ".join(each.name for each in ReduceOp)
    raise ArgumentError(f"op={op!r} is no reduction; known are {known}, as ReduceOp or as torch.distributed.ReduceOp")


def check_reducible(what: str, op: ReduceOp, dtype: torch.dtype) -> None:
    """Raise unless a reduction is defined for an element type.

    Raises:
        UnsupportedError: elements of this type are moved, not reduced.
        ArgumentError: the reduction does not fit the type.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in REDUCIBLE:
        raise UnsupportedError(f"{what}: elements of {dtype} cannot be reduced; these can: {', '.join(REDUCIBLE)}")
    if op in _BITWISE and dtype.is_floating_point:
        raise ArgumentError(f"{what}: {op.name} works on integers and bool, not on {dtype}")
    if op is ReduceOp.AVG and name == "bool":
        raise ArgumentError(f"{what}: AVG does not work on bool; use SUM or MAX for 'any', PRODUCT or MIN for 'all'")
