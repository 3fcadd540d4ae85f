"""Elementwise operations of the builder: arithmetic, comparisons, conversions, mathematical functions."""

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.frontend import numerics
from iris_triton.interpreter.frontend.values import Array, Handle, numpy_dtype, signless, unsigned

Operation = Callable[..., Handle]


def _on_integers(
    op: Callable[..., Array], dtype: Any = None, read: Callable[[Array], Array] | None = None
) -> Operation:
    """Make an operation on integers; `dtype` is the result's if not the operands', `read` says how to take them."""

    def method(self: Any, *operands: Handle) -> Handle:
        arrays = [handle.data if read is None else read(handle.data) for handle in operands]
        return Handle(signless(op(*arrays)), operands[0].dtype if dtype is None else dtype)

    return method


def _on_floats(op: Callable[..., Array], dtype: Any = None) -> Operation:
    """Make an operation on floating-point numbers; `dtype` is the result's if it is not the operands'."""

    def method(self: Any, *operands: Handle) -> Handle:
        kind = operands[0].dtype
        if kind == tl.bfloat16:
            wide = op(*[numerics.bf16_to_f32(handle.data) for handle in operands])
            return Handle(numerics.to_bf16(wide), kind) if dtype is None else Handle(wide, dtype)
        if operands[0].data.dtype == np.uint8:
            raise UnsupportedError(f"there is no arithmetic on {kind}: convert it with .to(tl.float32) first")
        return Handle(op(*[handle.data for handle in operands]), kind if dtype is None else dtype)

    return method


def _shift(op: Callable[..., Array], fill: Callable[[Array], Array]) -> Callable[..., Array]:
    """Make a shift whose result is defined for counts of the width or more, which numpy leaves to the processor."""

    def shift(data: Array, count: Array) -> Array:
        width = data.dtype.itemsize * 8
        if count.ndim == 0 and 0 <= count < width:
            return op(data, count)
        count = unsigned(count)
        result: Array = op(data, np.minimum(count, count.dtype.type(width - 1)).astype(data.dtype))
        too_far = count >= width
        return np.where(too_far, fill(data), result) if too_far.any() else result

    return shift


shift_left = _shift(np.left_shift, np.zeros_like)
shift_right = _shift(np.right_shift, lambda data: np.where(data < 0, -1, 0).astype(data.dtype))


class ElementwiseOps:
    """Mixed into the builder in front of Triton's own."""

    create_shl = _on_integers(shift_left)
    create_lshr = _on_integers(shift_right, read=unsigned)
    create_ashr = _on_integers(shift_right)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if z.dtype == tl.bfloat16:
            wide = [numerics.bf16_to_f32(handle.data).astype(np.float64) for handle in (x, y, z)]
            return Handle(numerics.to_bf16(wide[0] * wide[1] + wide[2]), tl.bfloat16)
        return Handle(numerics.fma(x.data, y.data, z.data), z.dtype)

    def create_clampf(self, value: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
        keeps_nan = propagate_nan == _compat.ir.PROPAGATE_NAN.ALL
        lower, upper = (np.minimum, np.maximum) if keeps_nan else (np.fmin, np.fmax)
        return _on_floats(lambda x, low, high: lower(upper(x, low), high))(self, value, low, high)

    def create_fp_to_si(self, value: Handle, dst_type: Any) -> Handle:
        return Handle(numerics.float_to_int(as_float(value), numpy_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_ui(self, value: Handle, dst_type: Any) -> Handle:
        target = np.dtype(f"u{numpy_dtype(dst_type).itemsize}")
        return Handle(signless(numerics.float_to_int(as_float(value), target)), dst_type.scalar)

    def create_fp_to_fp(self, value: Handle, dst_type: Any, rounding: Any) -> Handle:
        towards_zero = rounding == _compat.ir.ROUNDING_MODE.RTZ
        return _convert_to_float(as_float(value), dst_type, towards_zero=towards_zero)

    def create_int_cast(self, value: Handle, dst_type: Any, is_signed: bool) -> Handle:
        kept = numpy_dtype(dst_type)
        data = value.data if is_signed else unsigned(value.data)
        if kept == np.bool_:  # truncation to one bit, not a comparison with 0
            return Handle((data & 1).astype(np.bool_), dst_type.scalar)
        return Handle(data.astype(kept), dst_type.scalar)


def as_float(handle: Handle) -> Array:
    """Floating-point numbers in a type that numpy has."""
    if handle.dtype == tl.bfloat16:
        return numerics.bf16_to_f32(handle.data)
    if handle.data.dtype == np.uint8:
        return numerics.fp8_values(handle.dtype.name)[handle.data]
    return handle.data


def _convert_to_float(data: Array, dst_type: Any, *, towards_zero: bool = False) -> Handle:
    scalar = dst_type.scalar
    if scalar.primitive_bitwidth == 8:
        return Handle(numerics.to_fp8(data, scalar.name, towards_zero=towards_zero), scalar)
    if scalar == tl.bfloat16:
        if towards_zero:
            wide = np.ascontiguousarray(data, np.float32)
            bits = (wide.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
            return Handle(np.where(np.isnan(wide), np.uint16(0x7FC0), bits), scalar)
        return Handle(numerics.to_bf16(data), scalar)
    kept = numpy_dtype(dst_type)
    result = data.astype(kept)
    if towards_zero:
        too_far = np.abs(result.astype(np.float64)) > np.abs(data.astype(np.float64))
        result = np.where(too_far, np.nextafter(result, kept.type(0)), result)
    return Handle(result, scalar)


_INTEGERS: dict[str, Callable[..., Array]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "iabs": np.abs, "umulhi": numerics.umulhi},
    **{"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor},
    **{"sdiv": numerics.int_div, "srem": np.fmod, "minsi": np.minimum, "maxsi": np.maximum},
}
_UNSIGNED = {"udiv": np.floor_divide, "urem": np.remainder, "minui": np.minimum, "maxui": np.maximum}
_FLOATS: dict[str, Callable[..., Array]] = {
    **{"fadd": np.add, "fsub": np.subtract, "fmul": np.multiply, "frem": np.fmod, "fneg": np.negative, "fabs": np.abs},
    **dict.fromkeys(["fdiv", "precise_divf", "approx_divf"], np.divide),
    **{"minimumf": np.minimum, "maximumf": np.maximum, "minnumf": np.fmin, "maxnumf": np.fmax},
    **{name: getattr(np, name) for name in ("exp", "exp2", "log", "log2", "sqrt", "sin", "cos", "floor", "ceil")},
    **{"precise_sqrt": np.sqrt, "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype, copy=False), "erf": numerics.erf},
}
_ORDERS = {"LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal}
_OPERATIONS = {
    **{name: _on_integers(op) for name, op in _INTEGERS.items()},
    **{name: _on_integers(op, read=unsigned) for name, op in _UNSIGNED.items()},
    **{name: _on_floats(op) for name, op in _FLOATS.items()},
    **{f"fcmpO{name}": _on_floats(op, dtype=tl.int1) for name, op in (*_ORDERS.items(), ("EQ", np.equal))},
    **{f"icmpS{name}": _on_integers(op, dtype=tl.int1) for name, op in _ORDERS.items()},
    **{f"icmpU{name}": _on_integers(op, read=unsigned, dtype=tl.int1) for name, op in _ORDERS.items()},
    "fcmpUNE": _on_floats(np.not_equal, dtype=tl.int1),
    "icmpEQ": _on_integers(np.equal, dtype=tl.int1),
    "icmpNE": _on_integers(np.not_equal, dtype=tl.int1),
    "select": lambda self, condition, x, y: Handle(np.where(condition.data, x.data, y.data), x.dtype),
    "si_to_fp": lambda self, value, dst_type: _convert_to_float(value.data, dst_type),
    "ui_to_fp": lambda self, value, dst_type: _convert_to_float(unsigned(value.data), dst_type),
    **dict.fromkeys(["fp_ext", "fp_trunc"], lambda self, value, dst_type: _convert_to_float(as_float(value), dst_type)),
}
for _name, _operation in _OPERATIONS.items():
    setattr(ElementwiseOps, f"create_{_name}", _operation)
