"""Number formats that numpy does not have, and arithmetic where numpy and GPUs disagree.

bfloat16 values are kept as uint16 bit patterns and fp8 values as uint8; arithmetic on them is done in float32 and
rounded to nearest, ties to even, after every operation, as on a GPU.

Functions of the vendors' math libraries (tl.extra.libdevice) go by the symbols that Triton picks by the argument types.
`__nv_tanhf` and `__nv_tanh` are one here: numpy keeps the precision of its argument.  What numpy or torch.special has
under the same name needs no entry.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from iris_core.errors import UnsupportedError

Array = NDArray[Any]

_SIGN16 = np.uint32(16)


def bf16_to_f32(bits: Array) -> Array:
    """Widen bfloat16 bit patterns (uint16) to float32; exact."""
    return (bits.astype(np.uint32) << _SIGN16).view(np.float32)


def to_bf16(values: Array) -> Array:
    """Convert numbers to bfloat16 bit patterns (uint16) by way of float32, as GPUs do; to nearest, ties to even."""
    values = np.ascontiguousarray(values, np.float32)
    bits = values.view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> _SIGN16) & np.uint32(1)))
    result = (rounded >> _SIGN16).astype(np.uint16)
    result[np.isnan(values)] = 0x7FC0
    return result


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
    return (left - np.fmod(left, right)) // right  # without the remainder there is nothing to round


def umulhi(left: Array, right: Array) -> Array:
    """Upper half of the product of the operands' bit patterns, taken as unsigned."""
    dtype, nbytes = left.dtype, left.dtype.itemsize
    wide: Any = np.dtype(f"u{2 * nbytes}") if nbytes < 8 else object  # object: Python's integers
    a, b = (np.ascontiguousarray(x).view(f"u{nbytes}").astype(wide) for x in np.broadcast_arrays(left, right))
    high: Array = ((a * b) >> (8 * nbytes)).astype(f"u{nbytes}")
    return high.view(dtype)


def fma(x: Array, y: Array, z: Array) -> Array:
    """Return x * y + z, rounded once (float16, float32), as the float64 sum is rounded to odd; float64 rounds twice."""
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


def to_fp8(values: Array, name: str, *, towards_zero: bool = False) -> Array:
    """Round to fp8 bit patterns (uint8): to nearest, ties to even, or towards zero; too large becomes the largest."""
    all_values = fp8_values(name)
    wide = values.astype(np.float64)
    magnitude, positive = np.abs(wide), all_values[:128].astype(np.float64)
    finite = positive[np.isfinite(positive)]
    if towards_zero:
        code = np.searchsorted(finite, magnitude, side="right") - 1
    else:
        midpoints = np.append((finite[1:] + finite[:-1]) / 2, np.inf)
        code = np.searchsorted(midpoints, magnitude, side="left")  # a tie stays below ...
        code += (midpoints[np.minimum(code, len(finite) - 1)] == magnitude) & (code % 2 == 1)  # ... an odd value
    code = np.minimum(code, len(finite) - 1)
    negative = np.signbit(wide) & ((code != 0) | ~np.isnan(all_values[0x80]))  # some have no minus zero
    nan = next(iter(np.flatnonzero(np.isnan(all_values))), 0x7F)
    return np.where(np.isnan(wide), nan, code | np.where(negative, 0x80, 0)).astype(np.uint8)


def _torch(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    """Make a function that torch has and numpy has not; halves are computed in float32."""

    def call(*arguments: Array) -> Array:
        kept = arguments[0].dtype
        wide = [np.ascontiguousarray(a, np.float32 if kept == np.float16 else None) for a in arguments]
        return function(*map(torch.from_numpy, wide)).numpy().astype(kept, copy=False)

    return call


erf = _torch(torch.erf)

_SPECIAL = {  # names in torch.special that differ
    **{"cyl_bessel_i0": "i0", "cyl_bessel_i1": "i1", "lgamma": "gammaln", "normcdf": "ndtr", "normcdfinv": "ndtri"},
    **{name: f"bessel_{name}" for name in ("j0", "j1", "y0", "y1")},
}

_FUNCTIONS: dict[str, Callable[..., Array]] = {
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")},
    "llabs": np.abs,
    "finite": np.isfinite,
    **dict.fromkeys(["fma", "fma_rn", "fmaf_rn"], fma),
    **dict.fromkeys(["umulhi", "umul64hi"], umulhi),
    **{"add_rn": np.add, "sub_rn": np.subtract, "mul_rn": np.multiply, "div_rn": np.divide, "fdivide": np.divide},
    **{"rcp_rn": np.reciprocal, "sqrt_rn": np.sqrt, "max": np.maximum, "min": np.minimum, "nearbyint": np.rint},
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "pow": np.power,
    "remainder": lambda x, y: x - y * np.rint(x / y),  # numpy's own has another sign
    "round": lambda x: np.trunc(x + np.copysign(x.dtype.type(0.5), x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


def _find(name: str) -> Callable[..., Array] | None:
    found = _FUNCTIONS.get(name)
    if found is None and isinstance(getattr(np, name, None), np.ufunc):
        found = getattr(np, name)
    special = getattr(torch.special, _SPECIAL.get(name, name), None)
    return _torch(special) if found is None and special is not None else found


def call_libdevice(symbol: str, arguments: list[Array]) -> Array:
    """Compute a function of a vendor's library ("__nv_tanhf", "__ocml_tanh_f32"), if it is known."""
    name = re.sub(r"^__(nv|ocml)_(fast_)?|_f(16|32|64)$", "", symbol)
    others = (name.removesuffix("f"), name.removesuffix("d"), name[1:] if name.endswith("_rn") else "")
    function = next(filter(None, map(_find, (name, *others))), None)
    if function is None:
        raise UnsupportedError(
            f"the CPU executor has no implementation of the library function {symbol}: put the call into a jitted "
            "function of its own and register what the CPU shall do instead with iris_triton.interpreter.cpu_entry"
        )
    return function(*arguments)
