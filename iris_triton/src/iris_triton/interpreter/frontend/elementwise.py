"""Elementwise operations of the builder: arithmetic, comparisons, conversions, mathematical functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_triton import _compat
from iris_triton.interpreter.frontend import numerics
from iris_triton.interpreter.frontend.libdevice import erf
from iris_triton.interpreter.frontend.values import Array, Handle, numpy_dtype, signless, unsigned

Binary = Callable[[Any, Handle, Handle], Handle]
Unary = Callable[[Any, Handle], Handle]


def _plain(op: Callable[..., Array]) -> Binary:
    def method(self: Any, left: Handle, right: Handle) -> Handle:
        return Handle(op(left.data, right.data), left.dtype)

    return method


def _floating(op: Callable[..., Array]) -> Binary:
    def method(self: Any, left: Handle, right: Handle) -> Handle:
        if left.dtype == tl.bfloat16:
            wide = op(numerics.bf16_to_f32(left.data), numerics.bf16_to_f32(right.data))
            return Handle(numerics.f32_to_bf16(wide), tl.bfloat16)
        _refuse_fp8(left)
        return Handle(op(left.data, right.data), left.dtype)

    return method


def _floating_comparison(op: Callable[..., Array]) -> Binary:
    def method(self: Any, left: Handle, right: Handle) -> Handle:
        if left.dtype == tl.bfloat16:
            return Handle(op(numerics.bf16_to_f32(left.data), numerics.bf16_to_f32(right.data)), tl.int1)
        _refuse_fp8(left)
        return Handle(op(left.data, right.data), tl.int1)

    return method


def _comparison(op: Callable[..., Array]) -> Binary:
    def method(self: Any, left: Handle, right: Handle) -> Handle:
        return Handle(op(left.data, right.data), tl.int1)

    return method


def _unsigned_comparison(op: Callable[..., Array]) -> Binary:
    def method(self: Any, left: Handle, right: Handle) -> Handle:
        return Handle(op(unsigned(left.data), unsigned(right.data)), tl.int1)

    return method


def _unsigned(op: Callable[..., Array]) -> Binary:
    def method(self: Any, left: Handle, right: Handle) -> Handle:
        return Handle(signless(op(unsigned(left.data), unsigned(right.data))), left.dtype)

    return method


def _function(op: Callable[..., Array]) -> Unary:
    def method(self: Any, value: Handle) -> Handle:
        if value.dtype == tl.bfloat16:
            return Handle(numerics.f32_to_bf16(op(numerics.bf16_to_f32(value.data))), tl.bfloat16)
        _refuse_fp8(value)
        return Handle(op(value.data), value.dtype)

    return method


def _refuse_fp8(handle: Handle) -> None:
    if handle.data.dtype == np.uint8 and handle.dtype.is_floating():
        raise UnsupportedError(f"there is no arithmetic on {handle.dtype}: convert it with .to(tl.float32) first")


def _shift(op: Callable[..., Array], fill: Callable[[Array], Array], view: Callable[[Array], Array]) -> Binary:
    """A shift whose result is defined for counts of the width or more, which numpy leaves to the processor."""

    def method(self: Any, left: Handle, right: Handle) -> Handle:
        data, count = view(left.data), unsigned(right.data)
        width = data.dtype.itemsize * 8
        safe = np.minimum(count, count.dtype.type(width - 1)).astype(data.dtype)
        result = op(data, safe)
        too_far = count >= width
        if too_far.any():
            result = np.where(too_far, fill(data), result)
        return Handle(signless(result), left.dtype)

    return method


def _zeros(data: Array) -> Array:
    return np.zeros_like(data)


def _signs(data: Array) -> Array:
    return np.where(data < 0, -1, 0).astype(data.dtype)


def _same(data: Array) -> Array:
    return data


class ElementwiseOps:
    """Mixed into the builder in front of Triton's own."""

    create_add = _plain(np.add)
    create_sub = _plain(np.subtract)
    create_mul = _plain(np.multiply)
    create_and = _plain(np.bitwise_and)
    create_or = _plain(np.bitwise_or)
    create_xor = _plain(np.bitwise_xor)
    create_sdiv = _plain(numerics.int_div)
    create_srem = _plain(numerics.int_rem)
    create_udiv = _unsigned(np.floor_divide)
    create_urem = _unsigned(np.remainder)
    create_minsi = _plain(np.minimum)
    create_maxsi = _plain(np.maximum)
    create_minui = _unsigned(np.minimum)
    create_maxui = _unsigned(np.maximum)
    create_umulhi = _plain(numerics.umulhi)
    create_shl = _shift(np.left_shift, _zeros, _same)
    create_lshr = _shift(np.right_shift, _zeros, unsigned)
    create_ashr = _shift(np.right_shift, _signs, _same)

    create_fadd = _floating(np.add)
    create_fsub = _floating(np.subtract)
    create_fmul = _floating(np.multiply)
    create_fdiv = _floating(np.divide)
    create_precise_divf = _floating(np.divide)
    create_approx_divf = _floating(np.divide)
    create_frem = _floating(np.fmod)
    create_minimumf = _floating(np.minimum)
    create_maximumf = _floating(np.maximum)
    create_minnumf = _floating(np.fmin)
    create_maxnumf = _floating(np.fmax)

    create_fcmpOLT = _floating_comparison(np.less)
    create_fcmpOLE = _floating_comparison(np.less_equal)
    create_fcmpOGT = _floating_comparison(np.greater)
    create_fcmpOGE = _floating_comparison(np.greater_equal)
    create_fcmpOEQ = _floating_comparison(np.equal)
    create_fcmpUNE = _floating_comparison(np.not_equal)
    create_icmpEQ = _comparison(np.equal)
    create_icmpNE = _comparison(np.not_equal)
    create_icmpSLT = _comparison(np.less)
    create_icmpSLE = _comparison(np.less_equal)
    create_icmpSGT = _comparison(np.greater)
    create_icmpSGE = _comparison(np.greater_equal)
    create_icmpULT = _unsigned_comparison(np.less)
    create_icmpULE = _unsigned_comparison(np.less_equal)
    create_icmpUGT = _unsigned_comparison(np.greater)
    create_icmpUGE = _unsigned_comparison(np.greater_equal)

    create_fneg = _function(np.negative)
    create_fabs = _function(np.abs)
    create_exp = _function(np.exp)
    create_exp2 = _function(np.exp2)
    create_log = _function(np.log)
    create_log2 = _function(np.log2)
    create_sqrt = _function(np.sqrt)
    create_precise_sqrt = _function(np.sqrt)
    create_sin = _function(np.sin)
    create_cos = _function(np.cos)
    create_floor = _function(np.floor)
    create_ceil = _function(np.ceil)
    create_rsqrt = _function(lambda x: (1 / np.sqrt(x)).astype(x.dtype, copy=False))
    create_erf = _function(erf)
    create_iabs = _function(np.abs)

    def create_fma(self, x: Handle, y: Handle, z: Handle) -> Handle:
        if z.dtype == tl.bfloat16:
            wide = [numerics.bf16_to_f32(handle.data).astype(np.float64) for handle in (x, y, z)]
            return Handle(numerics.to_bf16(wide[0] * wide[1] + wide[2]), tl.bfloat16)
        return Handle(numerics.fma(x.data, y.data, z.data), z.dtype)

    def create_clampf(self, value: Handle, low: Handle, high: Handle, propagate_nan: Any) -> Handle:
        if propagate_nan == _compat.ir.PROPAGATE_NAN.ALL:
            return self.create_minimumf(self.create_maximumf(value, low), high)
        return self.create_minnumf(self.create_maxnumf(value, low), high)

    def create_select(self, condition: Handle, left: Handle, right: Handle) -> Handle:
        return Handle(np.where(condition.data, left.data, right.data), left.dtype)

    # -- conversions --------------------------------------------------------------------------------------------------
    def create_si_to_fp(self, value: Handle, dst_type: Any) -> Handle:
        return _convert_to_float(value.data, dst_type)

    def create_ui_to_fp(self, value: Handle, dst_type: Any) -> Handle:
        return _convert_to_float(unsigned(value.data), dst_type)

    def create_fp_to_si(self, value: Handle, dst_type: Any) -> Handle:
        return Handle(numerics.float_to_int(_as_numpy_float(value), numpy_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_ui(self, value: Handle, dst_type: Any) -> Handle:
        kept = numpy_dtype(dst_type)
        data = numerics.float_to_int(_as_numpy_float(value), np.dtype(f"u{kept.itemsize}"))
        return Handle(signless(data), dst_type.scalar)

    def create_fp_ext(self, value: Handle, dst_type: Any) -> Handle:
        return _convert_to_float(_as_numpy_float(value), dst_type)

    create_fp_trunc = create_fp_ext

    def create_fp_to_fp(self, value: Handle, dst_type: Any, rounding: Any) -> Handle:
        towards_zero = rounding == _compat.ir.ROUNDING_MODE.RTZ
        return _convert_to_float(_as_numpy_float(value), dst_type, towards_zero=towards_zero)

    def create_int_cast(self, value: Handle, dst_type: Any, is_signed: bool) -> Handle:
        kept = numpy_dtype(dst_type)
        data = value.data if is_signed else unsigned(value.data)
        if kept == np.bool_:  # truncation to one bit, not a comparison with 0
            return Handle((data & 1).astype(np.bool_), dst_type.scalar)
        return Handle(data.astype(kept), dst_type.scalar)


def _as_numpy_float(handle: Handle) -> Array:
    if handle.dtype == tl.bfloat16:
        return numerics.bf16_to_f32(handle.data)
    if handle.data.dtype == np.uint8:
        return numerics.fp8_to_f32(handle.data, handle.dtype.name)
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
