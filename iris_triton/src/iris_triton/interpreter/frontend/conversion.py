"""Between kernels and CPU entries: tensors become numpy values, and numpy values tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from iris_triton.interpreter.frontend import numerics
from iris_triton.interpreter.frontend.values import signless, unsigned, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

_TRITON = {
    np.dtype(np.bool_): tl.int1,
    np.dtype(np.int8): tl.int8,
    np.dtype(np.int16): tl.int16,
    np.dtype(np.int32): tl.int32,
    np.dtype(np.int64): tl.int64,
    np.dtype(np.uint8): tl.uint8,
    np.dtype(np.uint16): tl.uint16,
    np.dtype(np.uint32): tl.uint32,
    np.dtype(np.uint64): tl.uint64,
    np.dtype(np.float16): tl.float16,
    np.dtype(np.float32): tl.float32,
    np.dtype(np.float64): tl.float64,
}


def to_numpy(value: Any) -> Any:
    """Give a CPU entry what it computes with: see `iris_triton.interpreter.entries.cpu_entry`."""
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, tuple):
        return tuple(to_numpy(item) for item in value)
    if not isinstance(value, tl.tensor):
        return value
    data, scalar = value.handle.data, value.type.scalar
    if scalar == tl.bfloat16:
        data = numerics.bf16_to_f32(data)
    elif scalar.is_floating() and scalar.primitive_bitwidth == 8:
        data = numerics.fp8_to_f32(data, scalar.name)
    elif scalar.is_int() and scalar.is_int_unsigned():
        data = unsigned(data)
    return data if value.type.is_block() else data.reshape(-1)[0]


def from_numpy(value: Any, block_type: Callable[[Any, tuple[int, ...]], Any]) -> Any:
    """Make a tensor of what a CPU entry returned; `block_type` makes the types of blocks."""
    if value is None or isinstance(value, tl.tensor):
        return value
    if isinstance(value, tuple):
        return tuple(from_numpy(item, block_type) for item in value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = np.int32(value) if -(2**31) <= value < 2**31 else np.int64(value)
    elif isinstance(value, float):
        value = np.float32(value)
    data = np.asarray(value)
    scalar = _TRITON.get(data.dtype)
    if scalar is None:
        raise TypeError(f"a CPU entry returned {type(value).__name__} of {data.dtype}, which is no Triton type")
    if data.ndim == 0:
        return wrap(signless(data.reshape(1)), scalar)
    return wrap(signless(np.ascontiguousarray(data)), block_type(scalar, data.shape))
