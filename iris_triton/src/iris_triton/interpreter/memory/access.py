"""Reading and writing many elements at once through numpy.

Triton's native load and store go through memory element by element.  Where all elements lie in one accessible range, a
numpy array over that range does it several times faster.  Elements that are not aligned to their size, and ranges that
are unknown because checks are off, take the native way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from iris_triton import _compat

if TYPE_CHECKING:
    from iris_triton.interpreter.memory.regions import Array, Region


def load(
    region: Region | None, addresses: Array, mask: Array | None, fill: Array | None, dtype: np.dtype[Any]
) -> Array:
    """Read elements; lanes that are masked off get `fill`, or 0 without one.

    Args:
        region: a range that all active lanes lie in, or None.
        addresses: uint64 array.
        mask: bool array of the same shape, or None for all lanes.
        fill: array of `dtype` that broadcasts to the shape, or None.
        dtype: type of the elements.
    """
    shape = addresses.shape
    indices = None
    if region is not None:
        indices = region.indices(addresses if mask is None else addresses[mask], dtype.itemsize)
        if indices is not None and mask is None:
            return region.view(dtype).take(indices)
    result: Array = np.zeros(shape, dtype) if fill is None else np.broadcast_to(fill, shape).astype(dtype)
    if region is not None and indices is not None:
        result[mask] = region.view(dtype).take(indices)
        return result
    loaded: Array = _compat.native.load(addresses, np.ones(shape, np.bool_) if mask is None else mask, result, dtype)
    return loaded


def store(region: Region | None, addresses: Array, mask: Array | None, data: Array) -> None:
    """Write elements of active lanes; arguments as for `load`, `data` has the addresses' shape."""
    if region is not None:
        indices = region.indices(addresses if mask is None else addresses[mask], data.dtype.itemsize)
        if indices is not None:
            region.view(data.dtype)[indices] = data if mask is None else data[mask]
            return
    _compat.native.store(addresses, data, np.ones(addresses.shape, np.bool_) if mask is None else mask)
