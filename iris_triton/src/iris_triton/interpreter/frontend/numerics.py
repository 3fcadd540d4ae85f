"""Number formats that numpy does not have, and arithmetic where numpy and GPUs disagree.

bfloat16 values are kept as uint16 bit patterns and fp8 values as uint8; arithmetic on them is done in float32 and
rounded to nearest, ties to even, after every operation, as on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[Any]

_SIGN16 = np.uint32(16)


def bf16_to_f32(bits: Array) -> Array:
    """Widen bfloat16 bit patterns (uint16) to float32; exact."""
    return (bits.astype(np.uint32) << _SIGN16).view(np.float32)


def f32_to_bf16(values: Array) -> Array:
    """Round float32 to bfloat16 bit patterns (uint16), to nearest, ties to even; NaN stays NaN."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> _SIGN16) & np.uint32(1)))
    result = (rounded >> _SIGN16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        result[nan] = 0x7FC0
    return result


def to_bf16(values: Array) -> Array:
    """Convert any numbers to bfloat16 bit patterns by way of float32, as GPUs do."""
    return f32_to_bf16(values.astype(np.float32))


def float_to_int(values: Array, dtype: np.dtype[Any]) -> Array:
    """Truncate towards zero; out of range saturates and NaN becomes 0, as GPUs convert."""
    info = np.iinfo(dtype)
    with np.errstate(all="ignore"):
        truncated = np.trunc(values)
        # float(info.max) may round up to the first value that does not fit, so the comparison is >=.
        too_large, too_small = truncated >= float(info.max), truncated <= float(info.min)
        safe = np.where(too_large | too_small | np.isnan(truncated), 0, truncated)
        result = safe.astype(dtype)
    result[too_large] = info.max
    result[too_small] = info.min
    return result


def int_div(left: Array, right: Array) -> Array:
    """Divide integers as C does: towards zero.  Division by zero gives 0 instead of a trap."""
    result: Array = (left - np.fmod(left, right)) // right  # without the remainder there is nothing to round
    return result


def umulhi(left: Array, right: Array) -> Array:
    """Upper half of the product of the operands' bit patterns, taken as unsigned."""
    dtype, nbytes = left.dtype, left.dtype.itemsize
    wide: Any = np.dtype(f"u{2 * nbytes}") if nbytes < 8 else object  # object: Python's integers
    a, b = (np.ascontiguousarray(x).view(f"u{nbytes}").astype(wide) for x in np.broadcast_arrays(left, right))
    high: Array = ((a * b) >> (8 * nbytes)).astype(f"u{nbytes}")
    return high.view(dtype)


def fma(x: Array, y: Array, z: Array) -> Array:
    """x * y + z with one rounding (float16, float32); float64 rounds twice.

    The product of two float32 is exact in float64.  Rounding the float64 sum to odd before the last rounding to
    float32 makes the two roundings act as one.
    """
    if z.dtype == np.float64:
        return x * y + z
    product = np.multiply(x, y, dtype=np.float64)
    wide_z = z.astype(np.float64)
    total = product + wide_z
    rest = product - (total - wide_z) + (wide_z - (total - (total - wide_z)))
    total = np.ascontiguousarray(total)
    bits = total.view(np.int64)
    nudge = (rest != 0) & np.isfinite(total) & ((bits & 1) == 0)
    outward = np.where(rest * np.sign(total) >= 0, 1, -1)
    return (bits + np.where(nudge, outward, 0)).view(np.float64).astype(z.dtype)


# -- fp8 --------------------------------------------------------------------------------------------------------------
_TORCH = {
    "fp8e5": torch.float8_e5m2,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}


@functools.cache
def fp8_values(name: str) -> Array:
    """Return the 256 values of one of Triton's 8-bit floats as float32, indexed by bit pattern."""
    values: Array = torch.arange(256, dtype=torch.uint8).view(_TORCH.get(name, torch.float8_e4m3fn)).float().numpy()
    if name == "fp8e4b15":  # as fp8e4nv with another bias, and every pattern is a number
        values[[0x7F, 0xFF]] = 480, -480
        values = values / np.float32(2**8)
    return values


def fp8_to_f32(bits: Array, name: str) -> Array:
    """Widen fp8 bit patterns (uint8) to float32; exact."""
    result: Array = fp8_values(name)[bits]
    return result


@functools.cache
def _fp8_positive(name: str) -> tuple[Array, Array]:
    """Finite values of the positive half in ascending order, and the midpoints between them."""
    values = fp8_values(name)[:128].astype(np.float64)
    values = values[np.isfinite(values)]
    return values, (values[1:] + values[:-1]) / 2


def to_fp8(values: Array, name: str, *, towards_zero: bool = False) -> Array:
    """Round to fp8 bit patterns (uint8): to nearest, ties to even, or towards zero; too large becomes the largest."""
    wide = values.astype(np.float64)
    magnitude = np.abs(wide)
    finite, midpoints = _fp8_positive(name)
    if towards_zero:
        code = np.searchsorted(finite, magnitude, side="right") - 1
    else:
        low = np.searchsorted(midpoints, magnitude, side="left")  # a tie stays below ...
        tie = np.append(midpoints, np.inf)[low] == magnitude
        code = low + (tie & (low % 2 == 1))  # ... unless the value below is odd
    code = np.minimum(code, len(finite) - 1)
    negative = np.signbit(wide)
    if np.isnan(fp8_values(name)[0x80]):  # there is no minus zero
        negative &= code != 0
    result = (code | np.where(negative, 0x80, 0)).astype(np.uint8)
    nan = np.isnan(wide)
    if nan.any():
        patterns = np.flatnonzero(np.isnan(fp8_values(name)))
        result[nan] = patterns[0] if len(patterns) else 0x7F
    return result
