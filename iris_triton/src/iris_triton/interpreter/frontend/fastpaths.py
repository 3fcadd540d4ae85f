"""The most frequent builtins without the semantic layer, where their operands leave nothing to decide.

Each function returns NotImplemented in every other case, and the builtin itself runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from iris_triton.interpreter.frontend.operators import unwrap
from iris_triton.interpreter.frontend.typefacts import BOOL, POINTER, TypeFacts, facts_of
from iris_triton.interpreter.frontend.values import wrap
from iris_triton.interpreter.state import current

if TYPE_CHECKING:
    from iris_triton.interpreter.frontend.builder import CpuBuilder

_Tensor = tl.tensor


def _active(mask: Any, pointer: TypeFacts) -> Any:
    """The array of a mask that needs no conversion or broadcast; NotImplemented for others."""
    if mask is None:
        return None
    if mask.__class__ is _Tensor:
        facts = facts_of(mask.type)
        if facts.kind == BOOL and facts.form is pointer.form:
            return mask.handle.data
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
        facts = facts_of(pointer.type)
        if facts.kind != POINTER or facts.element is None:
            return NotImplemented
        mask = unwrap(mask)
        active = _active(mask, facts)
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
        return wrap(data, facts.pointee.like(facts.form))

    def store(self, pointer: Any, value: Any, mask: Any = None, **hints: Any) -> Any:
        """tl.store of a value of the pointer's type and shape without cache hints."""
        if hints or pointer.__class__ is not _Tensor or value.__class__ is not _Tensor:
            return NotImplemented
        facts = facts_of(pointer.type)
        if not facts.storable:
            return NotImplemented
        given = facts_of(value.type)
        if given.scalar is not facts.element and given.scalar != facts.element:
            return NotImplemented
        if given.form is not facts.form:
            return NotImplemented
        active = _active(unwrap(mask), facts)
        if active is NotImplemented:
            return NotImplemented
        self._builder.store(pointer.handle.data, active, value.handle.data)
        return None
