"""Atomic operations on raw addresses, exact between processes.

Triton's native functions do 32 and 64 bit integers and floating-point addition as real atomic instructions.  What they
lack is built here from compare-and-swap: addition of 16-bit floats.  Exchange of floats is exchange of their bits.

Lanes that are masked off do nothing and return 0.  `scope` has no meaning on the CPU: everything is system scope.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.frontend import numerics

Array = NDArray[Any]

_FADD = _compat.ir.ATOMIC_OP.FADD
_XCHG = _compat.ir.ATOMIC_OP.XCHG
_UNSIGNED_OPS = (_compat.ir.ATOMIC_OP.UMIN, _compat.ir.ATOMIC_OP.UMAX)


def rmw(op: Any, addresses: Array, values: Array, mask: Array, sem: Any, element: Any) -> Array:
    """Read, modify and write every lane whose mask is set; returns the old values, 0 for the other lanes.

    `op` and `sem` are the IR's operation and memory order, `element` the Triton type of the elements; addresses
    (uint64), operands and mask have one shape.
    """
    if op == _FADD and values.dtype.itemsize == 2:
        return _add_16_bit(addresses, values, mask, _native(sem), element)
    native_op = _compat.NATIVE_OPS.get(op)
    if native_op is None:
        raise UnsupportedError(f"atomic operation {op} has no CPU implementation")
    kept = values.dtype
    if op == _XCHG and kept.kind == "f":
        values = values.view(f"i{kept.itemsize}")
    elif op in _UNSIGNED_OPS:
        values = values.view(f"u{kept.itemsize}")
    old: Array = _compat.native.atomic_rmw(native_op, addresses, values, mask, _native(sem)).view(kept)
    if not mask.all():
        old[~mask] = 0
    return old


def cas(addresses: Array, expected: Array, desired: Array, sem: Any) -> Array:
    """Replace every element that equals `expected` by `desired`; returns the old values."""
    kept = expected.dtype
    bits = np.dtype(f"i{kept.itemsize}")  # floats are compared by their bits, as on GPUs
    shape = addresses.shape
    expected, desired = (np.ascontiguousarray(np.broadcast_to(x, shape)).view(bits) for x in (expected, desired))
    result: Array = _compat.native.atomic_cas(addresses, expected, desired, _native(sem)).view(kept)
    return result


def _native(sem: Any) -> Any:
    try:
        return _compat.NATIVE_SEMS[sem]
    except KeyError:
        raise UnsupportedError(f"memory order {sem} has no CPU implementation") from None


def _add_16_bit(addresses: Array, values: Array, mask: Array, sem: Any, element: Any) -> Array:
    def add(left: Array, right: Array) -> Array:
        if element == tl.bfloat16:
            return numerics.f32_to_bf16(numerics.bf16_to_f32(left) + numerics.bf16_to_f32(right))
        return (left.view(np.float16) + right.view(np.float16)).view(np.uint16)

    flat, operands = addresses.reshape(-1), np.ascontiguousarray(values).reshape(-1).view(np.uint16)
    old = np.zeros(flat.shape, np.uint16)
    for lane in np.flatnonzero(mask):
        address = flat[lane : lane + 1].copy()
        seen = _compat.native.load(address, np.ones(1, bool), np.zeros(1, np.uint16), np.dtype(np.uint16))
        while (swapped := _compat.native.atomic_cas(address, seen, add(seen, operands[lane : lane + 1]), sem)) != seen:
            seen = swapped
        old[lane] = seen[0]
    return old.view(values.dtype).reshape(addresses.shape)
