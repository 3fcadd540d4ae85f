"""Values of a running kernel: numpy arrays in place of the compiler's SSA values.

A `Handle` stands where the compiler has an IR value.  As in LLVM, integers carry no sign: they are kept in signed
arrays, and the operation says how it reads the bits.  Pointers are uint64 addresses, int1 is bool, bfloat16 and fp8 are
bit patterns (uint16, uint8).  A scalar is an array of shape (1,).  Arrays are never changed after they were made.

`wrap` makes the `tl.tensor` that the language works with.  Facts about a type are computed once (`TypeFacts`).
"""

import functools
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

from iris_core.errors import UnsupportedError

Array = NDArray[Any]

_NUMPY: dict[Any, np.dtype[Any]] = {
    tl.int1: np.dtype(np.bool_),
    **{getattr(tl, f"{u}int{bits}"): np.dtype(f"i{bits // 8}") for u in ("", "u") for bits in (8, 16, 32, 64)},
    **{getattr(tl, f"float{bits}"): np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    tl.bfloat16: np.dtype(np.uint16),
    **{getattr(tl, f"float8{kind}"): np.dtype(np.uint8) for kind in ("e5", "e5b16", "e4nv", "e4b8", "e4b15")},
}
_ADDRESS = np.dtype(np.uint64)

_UNSIGNED = {np.dtype(f"i{size}"): np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_SIGNED = {unsigned: signed for signed, unsigned in _UNSIGNED.items()}


class Handle:
    """An array and its scalar IR type; has the attributes of Triton's own TensorHandle that are used here."""

    __slots__ = ("data", "dtype")

    def __init__(self, data: Array, dtype: Any) -> None:
        self.data, self.dtype = data, dtype

    def get_element_ty(self) -> Any:
        """Return the scalar type that pointers in this handle point to, through blocks, or the scalar type itself."""
        scalar = self.dtype.scalar
        return scalar.element_ty.scalar if scalar.is_ptr() else scalar

    def clone(self) -> "Handle":
        return Handle(self.data.copy(), self.dtype)

    def set_attr(self, key: str, value: Any) -> None:
        """Hints to the compiler have no effect."""


def numpy_dtype(ir_type: Any) -> np.dtype[Any]:
    """Numpy type in which values of an IR type (scalar, block or pointer) are kept."""
    scalar = ir_type.scalar
    found = _ADDRESS if scalar.is_ptr() else _NUMPY.get(scalar)
    if found is None:
        raise UnsupportedError(f"the CPU executor has no values of type {scalar}")
    return found


def element_nbytes(ir_type: Any) -> int:
    """Bytes from one element to the next in memory."""
    scalar = ir_type.scalar
    return 8 if scalar.is_ptr() else max(1, int(scalar.primitive_bitwidth) // 8)


def unsigned(data: Array) -> Array:
    """Return the same bits, read as unsigned."""
    return data.view(_UNSIGNED.get(data.dtype, data.dtype))


def signless(data: Array) -> Array:
    """Return the same bits, in the type in which integers are kept."""
    return data.view(_SIGNED.get(data.dtype, data.dtype))


_KINDS = {tl.int1: "bool", tl.float16: "half", tl.float32: "float", tl.float64: "float"}
_NUMBERS = {tl.int32: np.int32, tl.int64: np.int64, tl.float32: np.float32}


class Form:
    """Shape of block types, and layout in a language that has them; one object each, so that `is` compares them."""

    __slots__ = ("layout", "make", "shape")

    def __init__(self, shape: tuple[int, ...], layout: Any, make: Callable[..., Any]) -> None:
        self.shape, self.layout, self.make = shape, layout, make


_form: Callable[[tuple[int, ...], Any, Any], Form] = functools.cache(Form)


def plain_form(shape: tuple[int, ...]) -> Form:
    """Return the form of Triton's blocks of a shape."""
    return _form(shape, None, tl.block_type)


def _joint_form(left: Form, right: Form) -> Form | None:
    """Return the form of an elementwise operation's result; None if the semantic layer must decide."""
    if left.layout is not right.layout and left.layout != right.layout:
        return None
    pairs = [*zip(left.shape, right.shape, strict=False)]
    if len(left.shape) != len(right.shape) or any(a != b and a != 1 and b != 1 for a, b in pairs):
        return None
    return _form(tuple(b if a == 1 else a for a, b in pairs), left.layout, left.make)


class TypeFacts:
    """Facts about one type."""

    __slots__ = (
        "blocks", "element", "fields", "form", "kept", "kind", "number", "numpy", "pointee", "scalar", "step",
        "storable",
    )  # fmt: skip

    def __init__(self, type_: Any) -> None:
        scalar = self.scalar = type_.scalar
        self.kept: Any = _ADDRESS if scalar.is_ptr() else _NUMPY.get(scalar)  # numpy type of its arrays
        self.fields = tl.tensor(None, type_).__dict__  # attributes of its tensors
        self.form: Form | None = None  # of scalars
        self.blocks: dict[Form, Any] = {}  # types of blocks of the scalar type
        if type_.is_block():
            self.form = _form(tuple(int(n) for n in type_.shape), getattr(type_, "layout", None), type(type_))
            self.blocks = facts_of(scalar).blocks
        self.step = 0
        self.number: type[Any] | None = None  # numpy type of Python numbers next to this one
        self.storable = False  # whether a value of the pointee's type can be stored as it is
        self.element: Any = None  # what is loaded through a pointer, if it can be loaded as it is
        self.kind = ""  # what the fast paths may do with it
        if not scalar.is_ptr():
            self.kind, self.number = _KINDS.get(scalar, ""), _NUMBERS.get(scalar)
            if scalar.is_int() and not scalar.is_int1():
                self.kind = "unsigned" if scalar.is_int_unsigned() else "int"
        elif not scalar.element_ty.is_block():
            self.kind = "pointer"
            self.step = element_nbytes(scalar.element_ty)
            if not scalar.element_ty.is_int1() and not scalar.element_ty.is_ptr():
                self.element = scalar.element_ty
                self.numpy = numpy_dtype(self.element)
                self.pointee = facts_of(self.element)
                self.storable = not scalar.is_const()

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        """Leave the facts out of copies of a type: some cannot be copied, and forms are compared as objects."""
        return type(None), ()

    def block(self, form: Form) -> Any:
        """Return the block type with this scalar type, the same object every time, so that comparing types is cheap."""
        found = self.blocks.get(form)
        if found is None:
            layout = () if form.layout is None else (form.layout,)
            found = self.blocks[form] = form.make(self.scalar, list(form.shape), *layout)
            # Casts ask for it; making a type anew takes longer than converting a short block.
            found.with_element_ty = lambda scalar: facts_of(scalar).block(form)
        return found

    def joint(self, other: Self) -> Any:
        """Return the type with this scalar type of an operation on both; None if the semantic layer must decide."""
        form, beside = self.form, other.form
        if form is not beside and beside is not None:
            form = beside if form is None else _joint_form(form, beside)
            if form is None:
                return None
        return self.like(form)

    def like(self, form: Form | None) -> Any:
        """Return the type of this scalar type and a form; the scalar type itself for None."""
        return self.scalar if form is None else self.blocks.get(form) or self.block(form)


def facts_of(type_: Any) -> TypeFacts:
    """Return the facts of a type, computed once."""
    found: TypeFacts | None = type_.__dict__.get("_iris_facts")
    if found is None:
        found = type_._iris_facts = TypeFacts(type_)
    return found


def block_type(scalar: Any, shape: tuple[int, ...]) -> Any:
    """Return a block type of Triton, the same object every time."""
    return facts_of(scalar).block(plain_form(shape))


_new = tl.tensor.__new__


def wrap(data: Array, type_: Any) -> Any:
    """Make a tensor around an array."""
    return wrap_handle(Handle(data, type_.scalar), type_)


def wrap_handle(handle: Any, type_: Any) -> Any:
    """Make a tensor.  Much cheaper than the constructor, which computes shape and size anew for every tensor."""
    facts = type_.__dict__.get("_iris_facts") or facts_of(type_)
    tensor = _new(tl.tensor)
    tensor.__dict__.update(facts.fields)
    tensor.handle = handle
    return tensor
