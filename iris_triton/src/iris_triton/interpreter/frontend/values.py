"""Values of a running kernel: numpy arrays in place of the compiler's SSA values.

A `Handle` stands where the compiler has an IR value.  As in LLVM, integers carry no sign: they are kept in signed
arrays, and the operation says how it reads the bits.  Pointers are uint64 addresses, int1 is bool, bfloat16 and fp8 are
bit patterns (uint16, uint8).  A scalar is an array of shape (1,).  Arrays are never changed after they were made.

`wrap` makes the `tl.tensor` that the language works with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

from iris_core.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

Array = NDArray[Any]

_NUMPY = {
    tl.int1: np.dtype(np.bool_),
    tl.int8: np.dtype(np.int8),
    tl.int16: np.dtype(np.int16),
    tl.int32: np.dtype(np.int32),
    tl.int64: np.dtype(np.int64),
    tl.uint8: np.dtype(np.int8),
    tl.uint16: np.dtype(np.int16),
    tl.uint32: np.dtype(np.int32),
    tl.uint64: np.dtype(np.int64),
    tl.float16: np.dtype(np.float16),
    tl.float32: np.dtype(np.float32),
    tl.float64: np.dtype(np.float64),
    tl.bfloat16: np.dtype(np.uint16),
    tl.float8e5: np.dtype(np.uint8),
    tl.float8e5b16: np.dtype(np.uint8),
    tl.float8e4nv: np.dtype(np.uint8),
    tl.float8e4b8: np.dtype(np.uint8),
    tl.float8e4b15: np.dtype(np.uint8),
}
_ADDRESS = np.dtype(np.uint64)

_UNSIGNED: dict[np.dtype[Any], np.dtype[Any]] = {
    np.dtype(np.int8): np.dtype(np.uint8),
    np.dtype(np.int16): np.dtype(np.uint16),
    np.dtype(np.int32): np.dtype(np.uint32),
    np.dtype(np.int64): np.dtype(np.uint64),
}
_SIGNED: dict[np.dtype[Any], np.dtype[Any]] = {unsigned: signed for signed, unsigned in _UNSIGNED.items()}


class Handle:
    """An array and its scalar IR type; has the attributes that Triton's own TensorHandle has."""

    __slots__ = ("attr", "data", "dtype")

    def __init__(self, data: Array, dtype: Any) -> None:
        self.data, self.dtype = data, dtype
        self.attr: dict[str, Any] = {}

    def get_element_ty(self) -> Any:
        """What the pointers in this handle point to (through a block, if to one), or the scalar type itself."""
        scalar = self.dtype.scalar
        return scalar.element_ty.scalar if scalar.is_ptr() else scalar

    def clone(self) -> Handle:
        """Copy the array."""
        return Handle(self.data.copy(), self.dtype)

    def set_attr(self, key: str, value: Any) -> None:
        """Note a hint to the compiler, which has no effect here."""
        self.attr[key] = value


def numpy_dtype(ir_type: Any) -> np.dtype[Any]:
    """Numpy type in which values of an IR type (scalar, block or pointer) are kept."""
    scalar = ir_type.scalar
    if scalar.is_ptr():
        return _ADDRESS
    found = _NUMPY.get(scalar)
    if found is None:
        raise UnsupportedError(f"the CPU executor has no values of type {scalar}")
    return found


def element_nbytes(ir_type: Any) -> int:
    """Bytes from one element to the next in memory."""
    scalar = ir_type.scalar
    return 8 if scalar.is_ptr() else max(1, int(scalar.primitive_bitwidth) // 8)


def unsigned(data: Array) -> Array:
    """The same bits, read as unsigned."""
    target = _UNSIGNED.get(data.dtype)
    return data if target is None else data.view(target)


def signless(data: Array) -> Array:
    """The same bits, in the type in which integers are kept."""
    target = _SIGNED.get(data.dtype)
    return data if target is None else data.view(target)


def bit_view(data: Array, target: np.dtype[Any]) -> Array:
    """Reinterpret elements as another type of the same size."""
    if data.dtype == target:
        return data
    if data.dtype.itemsize != target.itemsize:
        raise UnsupportedError(f"a bitcast cannot change the size of elements ({data.dtype} to {target})")
    return data.view(target)


# -- tensors ----------------------------------------------------------------------------------------------------------
_new = tl.tensor.__new__


def nothing() -> None:
    """What a copy of a type, perhaps in another process, has of all that is kept on the type here."""


class _Fields:
    """Attributes of a type's tensors; some cannot be copied, but the type must be."""

    __slots__ = ("attributes",)

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.attributes = attributes

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return nothing, ()


def wrap(data: Array, type_: Any) -> Any:
    """Make a tensor around an array."""
    return wrap_handle(Handle(data, type_.scalar), type_)


def wrap_handle(handle: Any, type_: Any) -> Any:
    """Make a tensor.  Much cheaper than the constructor, which computes shape and size anew for every tensor."""
    fields = type_.__dict__.get("_iris_fields")
    if fields is None:
        fields = _Fields(tl.tensor(None, type_).__dict__)
        type_._iris_fields = fields
    tensor = _new(tl.tensor)
    tensor.__dict__.update(fields.attributes)
    tensor.handle = handle
    return tensor
