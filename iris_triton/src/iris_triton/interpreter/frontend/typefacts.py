"""Facts about Triton's types for the fast paths, computed once per type and kept on the type object."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from iris_triton.interpreter.frontend.values import element_nbytes, nothing, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

# Kinds of scalar types, by what the fast paths may do with them.
SLOW, BOOL, INT, UNSIGNED, FLOAT, HALF, POINTER = range(7)


undecided_layouts: set[type] = set()
"""Classes of layouts that a pass of a compiler chooses later; the semantic layer decides about stores with them."""


class Form:
    """Shape of block types, and layout in a language that has them; one object each, so that `is` compares them."""

    __slots__ = ("layout", "make", "shape")

    def __init__(self, shape: tuple[int, ...], layout: Any, make: Callable[..., Any]) -> None:
        self.shape, self.layout, self.make = shape, layout, make

    def of(self, scalar: Any) -> Any:
        """Make a block type of this form."""
        shape = list(self.shape)
        return self.make(scalar, shape) if self.layout is None else self.make(scalar, shape, self.layout)


_form: Callable[[tuple[int, ...], Any, Any], Form] = functools.cache(Form)


def plain_form(shape: tuple[int, ...]) -> Form:
    """The form of Triton's blocks of a shape."""
    return _form(shape, None, tl.block_type)


def _joint_form(left: Form, right: Form) -> Form | None:
    """The form of an elementwise operation's result; None if the semantic layer must decide."""
    if left.layout is not right.layout and left.layout != right.layout:
        return None
    shape, other = left.shape, right.shape
    if len(shape) != len(other) or any(a != b and a != 1 and b != 1 for a, b in zip(shape, other, strict=True)):
        return None
    joint = tuple(b if a == 1 else a for a, b in zip(shape, other, strict=True))
    return _form(joint, left.layout, left.make)


class TypeFacts:
    """Facts about one type."""

    __slots__ = ("blocks", "element", "form", "kind", "number", "numpy", "pointee", "scalar", "step", "storable")

    def __init__(self, type_: Any) -> None:
        scalar = type_.scalar
        self.scalar = scalar
        self.form: Form | None = None  # of scalars
        if type_.is_block():
            self.form = _form(tuple(int(n) for n in type_.shape), getattr(type_, "layout", None), type(type_))
        self.blocks: dict[Form, Any] = {}
        self.step = 0
        self.number: type[Any] | None = None  # numpy type of Python numbers next to this one
        self.storable = False  # whether a value of the pointee's type can be stored as it is
        self.element: Any = None  # what is loaded through a pointer, if it can be loaded as it is
        if scalar.is_ptr():
            self.kind = SLOW if scalar.element_ty.is_block() else POINTER
            if self.kind == POINTER:
                self.step = element_nbytes(scalar.element_ty)
                if not scalar.element_ty.is_int1() and not scalar.element_ty.is_ptr():
                    self.element = scalar.element_ty
                    self.numpy = numpy_dtype(self.element)
                    self.pointee = facts_of(self.element)
                    decided = self.form is None or type(self.form.layout) not in undecided_layouts
                    self.storable = decided and not scalar.is_const()
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

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Leave the facts out of copies of a type, as forms are compared as objects."""
        return nothing, ()

    def block(self, form: Form) -> Any:
        """The block type with this scalar type, the same object every time, so that comparing types is cheap."""
        found = self.blocks.get(form)
        if found is None:
            found = self.blocks[form] = form.of(self.scalar)
            # Casts ask for it; making a type anew takes longer than converting a short block.
            found.with_element_ty = lambda scalar: facts_of(scalar).block(form)
        return found

    def joint(self, other: TypeFacts) -> Any:
        """The type with this scalar type of an operation on both; None if the semantic layer must decide."""
        form, beside = self.form, other.form
        if form is not beside and beside is not None:
            form = beside if form is None else _joint_form(form, beside)
            if form is None:
                return None
        return self.scalar if form is None else self.blocks.get(form) or self.block(form)

    def like(self, form: Form | None) -> Any:
        """The type of this scalar type and a form; the scalar type itself for None."""
        return self.scalar if form is None else self.blocks.get(form) or self.block(form)


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
    """Return a block type of Triton, the same object every time."""
    return facts_of(scalar).block(plain_form(shape))
