"""The most frequent builtins without the semantic layer, where their operands leave nothing to decide.

Each function returns NotImplemented in every other case, and the builtin itself runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from iris_triton.cpu.operators import POINTER, facts_of, unwrap
from iris_triton.cpu.state import current
from iris_triton.cpu.values import Array, wrap

if TYPE_CHECKING:
    from iris_triton.cpu.builder import CpuBuilder

_Tensor = tl.tensor


def _active(mask: Any, type_: Any) -> Any:
    """The array of a mask that needs no conversion or broadcast; NotImplemented for others."""
    if mask is None:
        return None
    if mask.__class__ is _Tensor:
        mask_type = mask.type
        if mask_type.scalar.is_int1() and mask_type.is_block() == type_.is_block():
            data: Array = mask.handle.data
            if not type_.is_block() or mask_type.shape == type_.shape:
                return data
    return NotImplemented


class FastPaths:
    """tl.program_id, tl.load and tl.store."""

    def __init__(self, builder: CpuBuilder) -> None:
        self._builder = builder

    def program_id(self, axis: Any) -> Any:
        """tl.program_id of a valid axis."""
        axis = unwrap(axis)
        if axis not in (0, 1, 2):
            return NotImplemented
        return wrap(np.array([current.program.pid[axis]], np.int32), tl.int32)

    def load(self, pointer: Any, mask: Any = None, other: Any = None, **hints: Any) -> Any:
        """tl.load of a block or scalar without cache hints."""
        if hints or pointer.__class__ is not _Tensor:
            return NotImplemented
        type_ = pointer.type
        facts = facts_of(type_)
        if facts.kind != POINTER or facts.element is None:
            return NotImplemented
        mask = unwrap(mask)
        active = _active(mask, type_)
        if active is NotImplemented:
            return NotImplemented
        other = unwrap(other)
        fill = None
        if other is not None:
            if mask is None or other.__class__ not in (int, float) or facts.numpy.kind not in "if":
                return NotImplemented
            if facts.numpy.kind == "i" and (other.__class__ is float or not -(2**7) <= other < 2**7):
                return NotImplemented
            fill = np.array(other, facts.numpy)
        data = self._builder.load(pointer.handle.data, active, fill, facts.numpy)
        return wrap(data, facts.pointee.block(type_.shape) if facts.is_block else facts.element)

    def store(self, pointer: Any, value: Any, mask: Any = None, **hints: Any) -> Any:
        """tl.store of a value of the pointer's type and shape without cache hints."""
        if hints or pointer.__class__ is not _Tensor or value.__class__ is not _Tensor:
            return NotImplemented
        type_ = pointer.type
        facts = facts_of(type_)
        if facts.kind != POINTER or facts.element is None or type_.scalar.is_const():
            return NotImplemented
        value_type = value.type
        scalar = value_type.scalar
        if scalar is not facts.element and scalar != facts.element:
            return NotImplemented
        if value_type.is_block() != facts.is_block or (facts.is_block and value_type.shape != type_.shape):
            return NotImplemented
        active = _active(unwrap(mask), type_)
        if active is NotImplemented:
            return NotImplemented
        self._builder.store(pointer.handle.data, active, value.handle.data)
        return None
