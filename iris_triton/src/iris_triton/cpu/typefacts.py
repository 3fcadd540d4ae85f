"""What the fast paths need to know of Triton's types, computed once per type and kept on the type object."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl

from iris_triton.cpu.values import element_nbytes, numpy_dtype

# Kinds of scalar types, by what the fast paths may do with them.
SLOW, BOOL, INT, UNSIGNED, FLOAT, HALF, POINTER = range(7)


class TypeFacts:
    """What the fast paths need to know of a type; kept on the type object."""

    __slots__ = ("blocks", "element", "is_block", "kind", "number", "numpy", "pointee", "scalar", "shape", "step")

    def __init__(self, type_: Any) -> None:
        scalar = type_.scalar
        self.scalar = scalar
        self.is_block = type_.is_block()
        self.shape: tuple[int, ...] = tuple(int(n) for n in type_.shape) if self.is_block else ()
        self.blocks: dict[tuple[int, ...], Any] = {}
        self.step = 0
        self.number: type[Any] | None = None  # numpy type of Python numbers next to this one
        self.element: Any = None  # what is loaded through a pointer, if it can be loaded as it is
        if scalar.is_ptr():
            self.kind = SLOW if scalar.element_ty.is_block() else POINTER
            if self.kind == POINTER:
                self.step = element_nbytes(scalar.element_ty)
                if not scalar.element_ty.is_int1() and not scalar.element_ty.is_ptr():
                    self.element = scalar.element_ty
                    self.numpy = numpy_dtype(self.element)
                    self.pointee = facts_of(self.element)
        elif scalar.is_int1():
            self.kind = BOOL
        elif scalar.is_int():
            self.kind = UNSIGNED if scalar.is_int_unsigned() else INT
            if scalar in (tl.int32, tl.int64):
                self.number = np.int32 if scalar == tl.int32 else np.int64
        elif scalar in (tl.float16, tl.float32, tl.float64):
            self.kind = HALF if scalar == tl.float16 else FLOAT
            self.number = np.float32 if scalar == tl.float32 else None
        else:
            self.kind = SLOW

    def block(self, shape: tuple[int, ...]) -> Any:
        """The block type with this scalar type."""
        found = self.blocks.get(shape)
        if found is None:
            found = self.blocks[shape] = tl.block_type(self.scalar, list(shape))
        return found


def facts_of(type_: Any) -> TypeFacts:
    """The facts of a type, computed once."""
    found: TypeFacts | None = type_.__dict__.get("_iris_facts")
    if found is None:
        found = TypeFacts(type_)
        scalar = type_.scalar
        if scalar is not type_:
            found.blocks = facts_of(scalar).blocks
        type_._iris_facts = found
    return found


def block_type(scalar: Any, shape: tuple[int, ...]) -> Any:
    """Return a block type, the same object every time, so that comparing types is cheap."""
    return facts_of(scalar).block(shape)
