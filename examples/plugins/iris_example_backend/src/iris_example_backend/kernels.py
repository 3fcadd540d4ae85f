"""Kernels: Python functions, started as kernel[grid](...), whose tensors arrive as pointers.

The programs of a grid run one after another in the calling thread.  So a program may wait for other ranks, but not for
a later program of its own launch.
"""

from __future__ import annotations

import functools
import itertools
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from iris_core.errors import ArgumentError, IrisError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_program: ContextVar[tuple[int, ...]] = ContextVar("program")


class BoundsError(IrisError, IndexError):
    """A kernel reads or writes beyond the end, or before the beginning, of a tensor."""


class Pointer:
    """Elements of a tensor: `pointer + i` is i elements further on, and i may be a block of numbers.

    Attributes:
        array: all elements of the tensor in their order, in the tensor's own memory.
        index: which of them are meant: an array of int64, without dimensions for one element.
    """

    def __init__(self, array: NDArray[Any], index: Any = 0) -> None:
        self.array = array
        self.index: NDArray[np.int64] = np.asarray(index, dtype=np.int64)

    def __add__(self, distance: Any) -> Pointer:
        return Pointer(self.array, self.index + distance)

    def lanes(self, mask: Any = None) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return index and mask as blocks of one shape, after checking what the mask lets through.

        Raises:
            BoundsError: an index lies outside the tensor.
        """
        index, active = np.broadcast_arrays(self.index, np.asarray(True if mask is None else mask, dtype=np.bool_))
        beyond = active & ((index < 0) | (index >= self.array.size))  # numpy takes -1 for the last element
        if beyond.any():
            raise BoundsError(f"element {index[beyond].flat[0]} of a tensor of {self.array.size} elements")
        return index, active

    def load(self, mask: Any = None, other: Any = None) -> Any:
        """Return the elements; where the mask is False, `other` or 0."""
        index, active = self.lanes(mask)
        values = np.full(index.shape, 0 if other is None else other, self.array.dtype)
        values[active] = self.array[index[active]]
        return values[()]

    def store(self, value: Any, mask: Any = None) -> None:
        """Set the elements where the mask is True; the value is converted to their type."""
        index, active = self.lanes(mask)
        values = np.broadcast_to(np.asarray(value), index.shape)
        self.array[index[active]] = values[active].astype(self.array.dtype)


def kernel(function: Callable[..., None]) -> Kernel:
    """Make a function a kernel; to be used as a decorator."""
    return Kernel(function)


class Kernel:
    """What `kernel` makes: `kernel[grid](*args)` calls the function once per program of the grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.fn = function
        self.__doc__ = function.__doc__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        pointers = [_argument(value) for value in args]
        named = {name: _argument(value) for name, value in kwargs.items()}
        for program in itertools.product(*map(range, grid)):
            token = _program.set(program)
            try:
                self.fn(*pointers, **named)
            finally:
                _program.reset(token)


def program_id(axis: int) -> int:
    """Return where in the grid the calling program is."""
    return _program.get()[axis]


def _argument(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_contiguous():
        raise ArgumentError(f"a kernel takes contiguous tensors, not one with strides {value.stride()}")
    if value.dtype is torch.bfloat16:
        raise UnsupportedError("numpy has no bfloat16, so kernels of this backend have none: use float32")
    return Pointer(value.detach().numpy().reshape(-1))
