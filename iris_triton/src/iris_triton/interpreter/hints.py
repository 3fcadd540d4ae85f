"""Checks of kernels' compiler hints: tl.assume, tl.multiple_of, tl.max_contiguous."""

import warnings
from typing import Any

import numpy as np
import triton.language as tl

from iris_triton.interpreter.frontend.operators import unwrap
from iris_triton.interpreter.frontend.values import element_nbytes
from iris_triton.interpreter.state import DEVICE_FUNCTIONS, Line, current, here

_refuted: set[Line] = set()


def refute(message: str) -> None:
    """Report a promise of the running kernel that is not true: an AssertionError, or a warning, once for each line."""
    if current.launch.raise_hints:
        raise AssertionError(message)
    line = here(DEVICE_FUNCTIONS)
    if line not in _refuted:
        _refuted.add(line)
        text = f"kernel {current.launch.kernel!r}, {line}: {message}; compiled for a GPU, the kernel may go wrong by it"
        warnings.warn_explicit(text, RuntimeWarning, line.file, line.number)


def check_hint(name: str, value: Any, values: Any) -> Any:
    """tl.multiple_of and the like: checked for form, and for truth where loads and stores go by them."""
    values = unwrap(values)
    numbers = [unwrap(n) for n in (values if isinstance(values, (tuple, list, tl.tuple)) else [values])]
    if not all(isinstance(n, int) for n in numbers):
        raise TypeError(f"tl.{name} needs constant integers, got {numbers}")
    if len(numbers) != max(1, len(value.shape)):
        raise ValueError(f"tl.{name} needs one number per dimension of shape {list(value.shape)}, got {numbers}")
    # Of integers more is promised than is meant: tl.max_contiguous(row % rows, BLOCK), `rows` being no multiple of it.
    # A single pointer may be promised something before it is known to be used.
    if name != "max_constancy" and isinstance(value, tl.tensor) and value.type.is_block() and value.dtype.is_ptr():
        for axis, number in enumerate(numbers):
            if number > 1:
                _check(name, value.handle.data, axis, number, element_nbytes(value.dtype.element_ty))
    return value


def _check(name: str, addresses: Any, axis: int, number: int, step: int) -> None:
    """As the compiler takes a promise: it is about the first element of every run of neighbours along an axis."""
    moved = np.moveaxis(addresses, axis, -1)
    first = np.ones(moved.shape, np.bool_)
    first[..., 1:] = moved[..., 1:] != moved[..., :-1] + np.uint64(step)
    if name == "multiple_of":
        if wrong := moved[first & (moved % np.uint64(number) != 0)].tolist():
            refute(
                f"tl.multiple_of, or a hint, promises addresses that are multiples of {number} bytes: "
                f"{wrong[0]:#x} is {wrong[0] % number} bytes behind one"
            )
    else:
        wrong = np.flatnonzero(first & (np.arange(moved.shape[-1]) % number != 0))
        if wrong.size:
            before, after = moved.reshape(-1)[wrong[0] - 1 : wrong[0] + 1].tolist()
            refute(
                f"tl.max_contiguous, or a hint, promises groups of {number} neighbouring elements along axis {axis}: "
                f"{after:#x} is not {step} bytes behind {before:#x}"
            )
