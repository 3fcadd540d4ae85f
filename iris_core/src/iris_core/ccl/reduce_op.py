"""Reductions: our names, torch's, and which element types each one works on."""

from __future__ import annotations

import enum
import operator
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
        op: a ReduceOp or its number, one of torch.distributed (its name counts, not its number), a name ("sum"), or
            None for SUM.

    Raises:
        ArgumentError: there is no such reduction.
    """
    if op is None:
        return ReduceOp.SUM
    kind = getattr(op, "op", op)  # torch's ReduceOp is an object around a member of its enumeration
    name = (kind if isinstance(kind, str) else str(getattr(kind, "name", ""))).upper()
    if name in ReduceOp.__members__:
        return ReduceOp[name]
    number = None if name or isinstance(op, bool) else _as_int(op)
    if number is not None and number in tuple(ReduceOp):
        return ReduceOp(number)
    known = ", ".join(each.name for each in ReduceOp)
    raise ArgumentError(f"op={op!r} is no reduction; known are {known}, as ReduceOp or as torch.distributed.ReduceOp")


def _as_int(value: Any) -> int | None:
    """The number that an integer of any library is; None for anything else."""
    try:
        return operator.index(value)
    except TypeError:
        return None


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
