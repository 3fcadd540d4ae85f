"""Offsets of int32 that have wrapped: what the checker knows of them.

Sums, differences and products of int32 that do not fit are kept beside the array that they have become, as they are
exactly, as long as only these three, and changes of the shape, work on them.  A pointer to which such an offset is
added has a bit for each lane, which its access takes off (see `iris_triton.checker.given_views`).  What goes through
anything else, such as `%` or `&`, is no longer known: hashes and rings wrap on purpose.
"""

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from iris_triton.interpreter.frontend.values import Array, facts_of, wrap

WRAPPED = np.uint64(1 << 60)  # added to pointers that an offset which has wrapped leads to
_INT32 = np.dtype(np.int32)
_OPERATORS = {"Add": np.add, "Sub": np.subtract, "Mult": np.multiply}

_known: dict[int, tuple[Any, Array]] = {}  # by the identity of an array: a weak reference to it, and what it should be


def _keep(data: Array, exact: Array) -> None:
    key = id(data)
    _known[key] = weakref.ref(data, lambda _: _known.pop(key, None)), exact


def _exact(data: Array) -> Array | None:
    """Return the array that one of int32 should be; None if it is what it should be, or that is not known."""
    owner: Any
    for owner in (data, data.base):
        found = _known.get(id(owner))
        if found is not None and found[0]() is owner:
            break
    else:
        return None
    if owner is data:
        return found[1]
    begin = (data.__array_interface__["data"][0] - owner.__array_interface__["data"][0]) // _INT32.itemsize
    steps = [2 * stride for stride in data.strides]  # of int64
    return np.lib.stride_tricks.as_strided(found[1].reshape(-1)[begin:], data.shape, steps)


def _operand(value: Any) -> Any:
    """Return an operand as int64, or as it is if it is a Python number; None for what is neither."""
    if value.__class__ is not tl.tensor:
        return value if value.__class__ is int else None
    data = value.handle.data
    if data.dtype != _INT32:
        return None
    exact = _exact(data)
    return data.astype(np.int64) if exact is None else exact


def watched(name: str, operator: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return an operator of `Operators.table` that keeps what does not fit."""
    ufunc = _OPERATORS.get(name)
    if ufunc is None:
        return operator

    def run(left: Any, right: Any) -> Any:
        result = operator(left, right)
        if result.__class__ is not tl.tensor:
            return result
        facts, data = facts_of(result.type), result.handle.data
        if facts.kind == "pointer":
            offset = right if right.__class__ is tl.tensor and right.handle.data.dtype == _INT32 else left
            is_block = offset.__class__ is tl.tensor and offset.handle.data.dtype == _INT32
            exact = _exact(offset.handle.data) if is_block else None
            if exact is None:
                return result
            return wrap(data | (exact != offset.handle.data) * WRAPPED, result.type)
        if facts.kind == "int" and data.dtype == _INT32:
            one, other = _operand(left), _operand(right)
            if one is not None and other is not None:
                exact = ufunc(one, other)
                if (exact != data).any():
                    _keep(data, np.ascontiguousarray(np.broadcast_to(exact, data.shape)))
        return result

    return run
