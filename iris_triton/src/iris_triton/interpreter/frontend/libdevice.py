"""Functions of the vendors' math libraries (tl.extra.libdevice), by the symbols that Triton calls.

Triton picks the symbol by the argument types, and so checks them.  `__nv_tanhf` and `__nv_tanh` are one entry here:
numpy keeps the precision of its argument.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from iris_core.errors import UnsupportedError
from iris_triton.interpreter.frontend import numerics

if TYPE_CHECKING:
    from collections.abc import Callable

Array = NDArray[Any]


def _torch(function: Callable[..., torch.Tensor]) -> Callable[..., Array]:
    """A function that torch has and numpy has not; halves are computed in float32."""

    def call(*arguments: Array) -> Array:
        kept = arguments[0].dtype
        wide = [
            torch.from_numpy(np.ascontiguousarray(a, np.float32 if kept == np.float16 else None)) for a in arguments
        ]
        result: Array = function(*wide).numpy().astype(kept, copy=False)
        return result

    return call


erf = _torch(torch.erf)


def _rounded(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: numerics.float_to_int(function(x), np.dtype(np.int32 if x.dtype.itemsize <= 4 else np.int64))


def _count_leading_zeros(x: Array) -> Array:
    bits = x.view(f"u{x.dtype.itemsize}")
    result = np.full(x.shape, x.dtype.itemsize * 8, np.int32)
    while bits.any():
        result -= bits != 0
        bits = bits >> bits.dtype.type(1)
    return result


def _reverse_bits(x: Array) -> Array:
    raw = np.ascontiguousarray(x)[..., None].view(np.uint8)
    bits = np.unpackbits(raw, axis=-1, bitorder="little")[..., ::-1]
    return np.packbits(bits, axis=-1, bitorder="little").view(x.dtype)[..., 0]


def _mulhi(a: Array, b: Array) -> Array:
    """Upper half of the signed product: the unsigned one, less each operand where the other is negative."""
    high = numerics.umulhi(a, b)
    return high - np.where(a < 0, b, a.dtype.type(0)) - np.where(b < 0, a, a.dtype.type(0))


def _tgamma(x: Array) -> Array:
    positive = np.exp(_torch(torch.lgamma)(np.abs(x)))
    with np.errstate(all="ignore"):
        # Reflection gives the sign and value left of zero.
        reflected = -np.pi / (x * np.sin(np.pi * x) * positive)
        return np.where(x > 0, positive, np.where(x == np.floor(x), np.nan, reflected)).astype(x.dtype)


_NUMPY = (
    *("cos", "cosh", "sin", "sinh", "tan", "tanh", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2"),
    *("ceil", "floor", "rint", "trunc", "sqrt", "cbrt", "hypot", "copysign", "fmax", "fmin", "fmod", "ldexp"),
    *("nextafter", "isnan", "isinf", "signbit"),
)
_TORCH_SPECIAL = {
    **{name: name for name in ("erf", "erfc", "erfcx", "erfinv")},
    **{"cyl_bessel_i0": "i0", "cyl_bessel_i1": "i1", "lgamma": "gammaln", "normcdf": "ndtr", "normcdfinv": "ndtri"},
    **{name: f"bessel_{name}" for name in ("j0", "j1", "y0", "y1")},
}
_FUNCTIONS: dict[str, Callable[..., Array]] = {
    **{name: getattr(np, name) for name in _NUMPY},
    **{f"{name}d": getattr(np, name) for name in ("isinf", "isnan", "signbit")},
    **{f"a{name}": getattr(np, f"arc{name}") for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")},
    **{name: _torch(getattr(torch.special, special)) for name, special in _TORCH_SPECIAL.items()},
    **dict.fromkeys(["abs", "fabs", "llabs"], np.abs),
    **dict.fromkeys(["finite", "isfinited"], np.isfinite),
    **dict.fromkeys(["brev", "brevll"], _reverse_bits),
    **dict.fromkeys(["clz", "clzll"], _count_leading_zeros),
    **dict.fromkeys(["popc", "popcll"], lambda x: np.bitwise_count(x.view(f"u{x.dtype.itemsize}")).astype(np.int32)),
    **dict.fromkeys(["fma", "fma_rn", "fmaf_rn"], numerics.fma),
    **dict.fromkeys(["mulhi", "mul64hi"], _mulhi),
    **dict.fromkeys(["umulhi", "umul64hi"], numerics.umulhi),
    "cospi": lambda x: np.cos(x * x.dtype.type(np.pi)),
    "exp10": lambda x: np.power(x.dtype.type(10), x),
    "fast_fdivide": np.divide,
    "fdim": lambda x, y: np.maximum(x - y, x.dtype.type(0)),
    "ilogb": lambda x: (np.frexp(x)[1] - 1).astype(np.int32),
    "llrint": _rounded(np.rint),
    "llround": _rounded(lambda x: np.trunc(x + np.copysign(0.5, x))),
    "logb": lambda x: (np.frexp(x)[1] - 1).astype(x.dtype),
    "max": np.maximum,
    "min": np.minimum,
    "mul24": np.multiply,
    "nearbyint": np.rint,
    "pow": np.power,
    "powi": lambda x, n: np.power(x, n.astype(x.dtype)),
    "rcbrt": lambda x: 1 / np.cbrt(x),
    "remainder": lambda x, y: x - y * np.rint(x / y),
    "rhypot": lambda x, y: 1 / np.hypot(x, y),
    "round": lambda x: np.trunc(x + np.copysign(x.dtype.type(0.5), x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sad": lambda x, y, z: np.abs(x - y) + z,
    "saturate": lambda x: np.clip(np.nan_to_num(x, nan=0.0), x.dtype.type(0), x.dtype.type(1)),
    "sinpi": lambda x: np.sin(x * x.dtype.type(np.pi)),
    "tgamma": _tgamma,
}
for _name in ("cos", "exp", "exp10", "log", "log10", "log2", "sin", "tan", "pow", "tanh"):
    _FUNCTIONS[f"fast_{_name}"] = _FUNCTIONS[_name]
_ROUNDED = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "sqrt": np.sqrt,
    "rcp": np.reciprocal,
}
for _name, _op in _ROUNDED.items():
    for _prefix in ("", "f", "d"):
        _FUNCTIONS[f"{_prefix}{_name}_rn"] = _op


def call_libdevice(symbol: str, arguments: list[Array]) -> Array:
    """Compute a function of a vendor's library ("__nv_tanhf", "__ocml_tanh_f32"), if it is in the table."""
    name = symbol.removeprefix("__nv_").removeprefix("__ocml_")
    for suffix in ("_f32", "_f64", "_f16"):
        name = name.removesuffix(suffix)
    function = _FUNCTIONS.get(name) or _FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise UnsupportedError(
            f"the CPU executor has no implementation of the library function {symbol}: put the call into a jitted "
            "function of its own and register what the CPU shall do instead with iris_triton.interpreter.cpu_entry"
        )
    return function(*arguments)
