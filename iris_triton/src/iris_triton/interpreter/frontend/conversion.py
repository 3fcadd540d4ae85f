"""Between kernels and CPU entries: tensors become numpy values, and numpy values tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from iris_triton.interpreter.frontend.elementwise import as_float
from iris_triton.interpreter.frontend.values import signless, unsigned, wrap

if TYPE_CHECKING:
    from collections.abc import Callable

_TRITON = {
    np.dtype(np.bool_): tl.int1,
    **{np.dtype(f"{u}int{bits}"): getattr(tl, f"{u}int{bits}") for u in ("", "u") for bits in (8, 16, 32, 64)},
    **{np.dtype(f"float{bits}"): getattr(tl, f"float{bits}") for bits in (16, 32, 64)},
}


def to_numpy(value: Any) -> Any:
    """Give a CPU entry what it computes with: see `iris_triton.interpreter.entries.cpu_entry`."""
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, tuple):
        return tuple(to_numpy(item) for item in value)
    if not isinstance(value, tl.tensor):
        return value
    scalar = value.type.scalar
    data = as_float(value.handle) if scalar.is_floating() else value.handle.data
    if scalar.is_int() and scalar.is_int_unsigned():
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
