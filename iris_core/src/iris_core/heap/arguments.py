"""Arguments of the tensor factories: sizes, devices, ranges."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

Scalar = bool | int | float | complex | torch.Tensor
"""A number, or a tensor without dimensions that stands for its value."""

Device = str | int | torch.device | None
"""A device as torch takes it; None stands for the context's own."""

META = torch.device("meta")
"""Tensors without memory: for asking torch what it would make."""


def like_size(
    name: str,
    sizes: tuple[Any, ...],
    size: Sequence[int] | None,
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
    requires_grad: bool,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """What torch would make for a size, without its memory."""
    if size is not None:
        if sizes:
            raise TypeError(f"{name}() got its size twice, by position and by keyword")
        sizes = (size,)
    elif not sizes:
        raise TypeError(f"{name}() needs a size")
    while len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = tuple(sizes[0])
    if dtype is None and out is not None:
        dtype = out.dtype
    return torch.empty(sizes, dtype=dtype, device=META, requires_grad=requires_grad, memory_format=memory_format)


def same_device(device: torch.device, own: str) -> bool:
    """Whether a requested device is this context's own; without an index any device of the kind is."""
    mine = torch.device(own)
    return device.type == mine.type and (device.index is None or device.index == (mine.index or 0))


def check_inexact(name: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedError unless random numbers of this dtype can be drawn from a continuous distribution."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedError(f"{name}: needs a floating or complex dtype, not {dtype}; use randint for integers")


def number(value: Scalar) -> Any:
    """The value of a tensor without dimensions; anything else as it is, torch knows what to say to it."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def range_length(start: Any, end: Any, step: Any, dtype: torch.dtype | None) -> tuple[int, torch.dtype]:
    """Return how many elements torch.arange makes, and of what type.

    Worked out here because torch's answer on the meta device imports sympy, which takes half a second.

    Raises:
        TypeError: something is not a real number.
        ArgumentError: the step is 0 or leads away from the end, or a bound is not finite.
    """
    values = (start, end, step)
    if not all(isinstance(value, Real) for value in values):
        raise TypeError(f"arange: start, end and step must be real numbers, not {start!r}, {end!r} and {step!r}")
    if not (math.isfinite(start) and math.isfinite(end)):
        raise ArgumentError(f"arange: unsupported range: {start} -> {end}")
    if dtype is None:
        dtype = torch.int64 if all(isinstance(value, Integral) for value in values) else torch.get_default_dtype()
    if dtype is torch.int64:  # torch counts in integers then, in double precision otherwise
        start, end, step = int(start), int(end), int(step)
    if step == 0:
        raise ArgumentError("arange: step must be non-zero")
    if (step > 0 and start > end) or (step < 0 and start < end):
        raise ArgumentError(
            f"arange: upper bound and lower bound inconsistent with step sign ({start} to {end} by {step})"
        )
    if dtype is torch.int64:
        return -((start - end) // step), dtype
    return math.ceil((float(end) - float(start)) / float(step)), dtype


def randint_arguments(args: tuple[Any, ...], low: Any, high: Any, size: Any) -> tuple[int, int, Any]:
    """Sort out `([low,] high, size)` with any of them by keyword."""
    names = {1: ("high",), 2: ("high", "size"), 3: ("low", "high", "size")}.get(len(args), ())
    if len(args) == 2 and size is not None:
        names = ("low", "high")
    if len(args) == 1 and high is not None:
        names = ("low",) if size is not None else ("size",)
    given = {"low": low, "high": high, "size": size}
    for name, value in zip(names, args, strict=False):
        if given[name] is not None:
            raise ArgumentError(f"randint() got {name} twice, by position and by keyword")
        given[name] = value
    if len(args) > 3 or given["high"] is None or given["size"] is None:
        raise ArgumentError("randint() takes (high, size) or (low, high, size)")
    lowest, highest = 0 if given["low"] is None else given["low"], given["high"]
    for bound in (lowest, highest):
        if isinstance(bound, bool) or not isinstance(bound, Integral):
            raise TypeError(f"randint: bounds must be integers, not {bound!r}")
    if lowest >= highest:
        raise ArgumentError(f"randint: low must be less than high, got {lowest} and {highest}")
    return int(lowest), int(highest), given["size"]
