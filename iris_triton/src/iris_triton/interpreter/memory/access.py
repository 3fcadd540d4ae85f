"""Reading and writing many elements at once through numpy.

Triton's native load and store go through memory element by element.  Where all elements lie in one accessible range, a
numpy array over that range does it several times faster.  Elements that are not aligned to their size, and ranges that
are unknown because checks are off, take the native way.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iris_triton import _compat

Array = NDArray[Any]


class Window:
    """An accessible range, seen as arrays of any element type.

    The arrays do not keep the memory alive: a window is used only while its range is known to be live.
    """

    __slots__ = ("_views", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self._views: dict[np.dtype[Any], Array] = {}

    def view(self, dtype: np.dtype[Any]) -> Array:
        """The range as elements of `dtype`, beginning at its first byte; a rest that is too short is left out."""
        found = self._views.get(dtype)
        if found is None:
            count = (self.end - self.start) // dtype.itemsize
            raw = (ctypes.c_ubyte * (count * dtype.itemsize)).from_address(self.start)
            found = self._views[dtype] = np.frombuffer(memoryview(raw), dtype)
        return found

    def indices(self, addresses: Array, itemsize: int) -> Array | None:
        """Element indices of addresses; None if one of them is not a whole number of elements from the start."""
        offsets = (addresses - np.uint64(self.start)).view(np.int64)
        if itemsize == 1:
            return offsets
        if int(np.bitwise_or.reduce(offsets, axis=None)) & (itemsize - 1):
            return None
        return offsets >> (itemsize.bit_length() - 1)


def load(
    window: Window | None, addresses: Array, mask: Array | None, fill: Array | None, dtype: np.dtype[Any]
) -> Array:
    """Read elements; lanes that are masked off get `fill`, or 0 without one.

    Args:
        window: a range that all active lanes lie in, or None.
        addresses: uint64 array.
        mask: bool array of the same shape, or None for all lanes.
        fill: array of `dtype` that broadcasts to the shape, or None.
        dtype: type of the elements.
    """
    shape = addresses.shape
    if window is not None:
        if mask is None:
            indices = window.indices(addresses, dtype.itemsize)
            if indices is not None:
                return window.view(dtype).take(indices)
        else:
            indices = window.indices(addresses[mask], dtype.itemsize)
            if indices is not None:
                result = np.zeros(shape, dtype) if fill is None else np.broadcast_to(fill, shape).astype(dtype)
                result[mask] = window.view(dtype).take(indices)
                return result
    active = np.ones(shape, np.bool_) if mask is None else mask
    other = np.zeros(shape, dtype) if fill is None else np.broadcast_to(fill, shape).astype(dtype)
    loaded: Array = _compat.native.load(addresses, active, other, dtype)
    return loaded


def store(window: Window | None, addresses: Array, mask: Array | None, data: Array) -> None:
    """Write elements of active lanes; arguments as for `load`, `data` has the addresses' shape."""
    if window is not None:
        active = addresses if mask is None else addresses[mask]
        indices = window.indices(active, data.dtype.itemsize)
        if indices is not None:
            window.view(data.dtype)[indices] = data if mask is None else data[mask]
            return
    _compat.native.store(addresses, data, np.ones(addresses.shape, np.bool_) if mask is None else mask)
