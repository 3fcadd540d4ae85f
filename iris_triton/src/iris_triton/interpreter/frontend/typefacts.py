"""What the fast paths need to know of Triton's types, computed once per type and kept on the type object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from iris_triton.interpreter.frontend.values import element_nbytes, nothing, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

# Kinds of scalar types, by what the fast paths may do with them.
SLOW, BOOL, INT, UNSIGNED, FLOAT, HALF, POINTER = range(7)


undecided_layouts: set[type] = set()
"""Classes of layouts that a pass of a compiler chooses later; who stores through pointers with one asks the semantic
layer, which knows whether it can."""


class Form:
    """What the block types of different elements share: shape, and layout in a language that has them.

    There is one object per form, so that comparing forms is comparing objects.
    """

    __slots__ = ("layout", "make", "shape")

    def __init__(self, shape: tuple[int, ...], layout: Any, make: Callable[..., Any]) -> None:
        self.shape, self.layout, self.make = shape, layout, make

    def of(self, scalar: Any) -> Any:
        """Make a block type of this form."""
        shape = list(self.shape)
        return self.make(scalar, shape) if self.layout is None else self.make(scalar, shape, self.layout)

    def reshaped(self, shape: tuple[int, ...]) -> Form:
        """The form with another shape and the same layout."""
        return _form(shape, self.layout, self.make)


_forms: dict[tuple[tuple[int, ...], Any], Form] = {}


def _form(shape: tuple[int, ...], layout: Any, make: Callable[..., Any]) -> Form:
    found = _forms.get((shape, layout))
    if found is None:
        found = _forms.setdefault((shape, layout), Form(shape, layout, make))
    return found


def plain_form(shape: tuple[int, ...]) -> Form:
    """The form of Triton's blocks of a shape."""
    return _form(shape, None, tl.block_type)


def joint_form(left: Form, right: Form) -> Form | None:
    """The form of an elementwise operation's result; None if the semantic layer must decide."""
    if left is right:
        return left
    if left.layout is not right.layout and left.layout != right.layout:
        return None
    shape, other = left.shape, right.shape
    if shape == other:
        return left
    if len(shape) != len(other):
        return None
    for a, b in zip(shape, other, strict=True):
        if a != b and a != 1 and b != 1:
            return None
    return left.reshaped(tuple(b if a == 1 else a for a, b in zip(shape, other, strict=True)))


class TypeFacts:
    """What the fast paths need to know of a type; kept on the type object."""

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
        """Copies of a type, in other processes, too, have no facts yet: forms are compared as objects."""
        return nothing, ()

    def block(self, form: Form) -> Any:
        """The block type with this scalar type, the same object every time, so that comparing types is cheap."""
        found = self.blocks.get(form)
        if found is None:
            found = self.blocks[form] = form.of(self.scalar)
            # Casts ask for it; making a type anew takes longer than converting a short block.
            found.with_element_ty = lambda scalar: facts_of(scalar).block(form)
        return found

    def like(self, form: Form | None) -> Any:
        """The type of this scalar type and a form; the scalar type itself for None."""
        return self.scalar if form is None else self.block(form)


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
