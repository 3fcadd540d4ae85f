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
        """What the pointers in this handle point to (through a block, if to one), or the scalar type itself."""
        scalar = self.dtype.scalar
        return scalar.element_ty.scalar if scalar.is_ptr() else scalar

    def clone(self) -> Handle:
        """Copy the array."""
        return Handle(self.data.copy(), self.dtype)

    def set_attr(self, key: str, value: Any) -> None:
        """Hints to the compiler have no effect."""


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


class _Fields(dict[str, Any]):
    """Attributes of a type's tensors; some cannot be copied, but the type must be."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return nothing, ()


def wrap(data: Array, type_: Any) -> Any:
    """Make a tensor around an array."""
    return wrap_handle(Handle(data, type_.scalar), type_)


def wrap_handle(handle: Any, type_: Any) -> Any:
    """Make a tensor.  Much cheaper than the constructor, which computes shape and size anew for every tensor."""
    fields = type_.__dict__.get("_iris_fields")
    if fields is None:
        fields = type_._iris_fields = _Fields(tl.tensor(None, type_).__dict__)
    tensor = _new(tl.tensor)
    tensor.__dict__.update(fields)
    tensor.handle = handle
    return tensor
