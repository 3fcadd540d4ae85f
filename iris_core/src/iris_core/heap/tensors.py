"""Tensor factories on the symmetric heap, with torch's own semantics.

Shapes, strides, element types and most errors are torch's: every factory first asks torch what it would make, on the
meta device, where that costs no memory.  Then the block is allocated and filled in place, so no temporary of full size
exists.  Arguments are checked before anything is allocated; should filling fail all the same, the block is freed again.

What all factories have in common:

    Symmetric: every rank calls the factory with the same sizes and dtype, in the same order with other allocations
        and frees.
    Args:
        sizes: sizes one by one or as one (nested) tuple or list; `()` makes a tensor without dimensions.
        size: the same by keyword.
        out: a tensor on the heap to fill instead of allocating one.  It must have as many elements as asked for; if its
            shape differs, a view of it with the requested shape is returned and `out` keeps its own.
        dtype: element type; torch's rules where it is None (that of `out`, if given).
        layout: torch.strided, the only one that the heap has.
        device: None, or this context's own device.
        requires_grad: whether autograd should record operations on the result.
    Raises:
        DeviceError: another device was asked for.
        LayoutError: another layout was asked for.
        ArgumentError: `out` has the wrong number of elements or the wrong dtype, or a range cannot be.
        NotOnHeapError: `out` is not on the heap.
        HeapExhaustedError: no room; the heap can be used as before.
        HeapClosedError: the context is closed.
        RuntimeError, TypeError: as torch raises them for the same arguments.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

from iris_core.device.targets import same_device
from iris_core.errors import ArgumentError, DeviceError, LayoutError, NotOnHeapError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.heap.heap import SymmetricHeap


Scalar = bool | int | float | complex | torch.Tensor  # a tensor without dimensions stands for its value
Device = str | int | torch.device | None  # None for the context's own
_META = torch.device("meta")  # for asking torch what it would make


class TensorFactories:
    """The factories; a mixin for a class that has a `heap` and a `device`."""

    heap: SymmetricHeap
    device: str

    # -- constants ----------------------------------------------------------------------------------------------------
    def zeros(
        self,
        *sizes: Any,
        size: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Return a tensor of zeros on the heap; see the module for what all factories share."""
        self._check_options("zeros", device, layout)
        like = _like_size("zeros", sizes, size, dtype, out, requires_grad)
        return self._make("zeros", like, out, requires_grad, torch.Tensor.zero_)

    def ones(
        self,
        *sizes: Any,
        size: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Return a tensor of ones on the heap; see the module for what all factories share."""
        self._check_options("ones", device, layout)
        like = _like_size("ones", sizes, size, dtype, out, requires_grad)
        return self._make("ones", like, out, requires_grad, lambda t: t.fill_(1))

    def empty(
        self,
        *sizes: Any,
        size: Sequence[int] | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> torch.Tensor:
        """Return a tensor of undefined content on the heap; see the module for what all factories share.

        Args:
            pin_memory: must be False.
            memory_format: torch.contiguous_format, torch.channels_last or torch.channels_last_3d; not with `out`.

        Raises:
            UnsupportedError: `pin_memory` is True.
        """
        self._check_options("empty", device, layout, pin_memory)
        if out is not None and memory_format is not torch.contiguous_format:
            raise ArgumentError("empty: memory_format= cannot be combined with out=, which has its strides already")
        like = _like_size("empty", sizes, size, dtype, out, requires_grad, memory_format)
        return self._make("empty", like, out, requires_grad, None)

    def full(
        self,
        size: Any,
        fill_value: Scalar,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Return a tensor with one value everywhere on the heap; see the module for what all factories share.

        Args:
            size: sizes as a (nested) tuple or list, or one number.
            fill_value: the value; without `dtype` it decides the type: bool, int64, the default dtype, or complex.
        """
        self._check_options("full", device, layout)
        if dtype is None and out is not None:
            dtype = out.dtype
        value = _number(fill_value)
        # one element on the CPU: torch infers the type and refuses values that do not fit
        sample = torch.full((), value, dtype=dtype, device="cpu")
        like = _like_size("full", (size,), None, sample.dtype, out, requires_grad)
        return self._make("full", like, out, requires_grad, lambda t: t.fill_(value))

    # -- like another tensor ------------------------------------------------------------------------------------------
    def zeros_like(
        self,
        input: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Device = None,
        requires_grad: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        """Return zeros on the heap with the shape of `input`; see the module for what all factories share.

        Args:
            input: a tensor anywhere; its shape, dtype and strides count, not its device.
            memory_format: torch.preserve_format keeps the order of strides.
        """
        like = self._like("zeros_like", input, dtype, layout, device, requires_grad, memory_format)
        return self._make("zeros_like", like, None, requires_grad, torch.Tensor.zero_)

    def ones_like(
        self,
        input: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Device = None,
        requires_grad: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        """Return ones on the heap with the shape of `input`; see `zeros_like`."""
        like = self._like("ones_like", input, dtype, layout, device, requires_grad, memory_format)
        return self._make("ones_like", like, None, requires_grad, lambda t: t.fill_(1))

    def empty_like(
        self,
        input: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Device = None,
        requires_grad: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        """Return a tensor of undefined content on the heap with the shape of `input`; see `zeros_like`."""
        like = self._like("empty_like", input, dtype, layout, device, requires_grad, memory_format)
        return self._make("empty_like", like, None, requires_grad, None)

    def full_like(
        self,
        input: torch.Tensor,
        fill_value: Scalar,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: Device = None,
        requires_grad: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
    ) -> torch.Tensor:
        """Return a tensor with one value everywhere on the heap with the shape of `input`; see `zeros_like`.

        Args:
            fill_value: the value; the dtype is that of `input` unless given.
        """
        like = self._like("full_like", input, dtype, layout, device, requires_grad, memory_format)
        value = _number(fill_value)
        torch.full((), value, dtype=like.dtype, device="cpu")  # refuses values that do not fit
        return self._make("full_like", like, None, requires_grad, lambda t: t.fill_(value))

    # -- ranges -------------------------------------------------------------------------------------------------------
    def arange(
        self,
        start: Scalar | None = None,
        end: Scalar | None = None,
        step: Scalar = 1,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Return start, start + step, ... up to but without end; see the module for what all factories share.

        `arange(end)` counts from 0.  Without `dtype` the result is int64 if all three are integers, else of the default
        dtype.  A range from a number to itself is empty, as in torch.

        Raises:
            ArgumentError: the step is 0 or leads away from the end, or a bound is not finite.
        """
        self._check_options("arange", device, layout)
        if end is None:
            start, end = None, start
        if end is None:
            raise TypeError("arange() needs at least its end")
        first, last, by = _number(0 if start is None else start), _number(end), _number(step)
        dtype = out.dtype if dtype is None and out is not None else dtype
        length, dtype = _range_length(first, last, by, dtype)
        like = torch.empty(length, dtype=dtype, device=_META, requires_grad=requires_grad)
        return self._make(
            "arange", like, out, requires_grad, lambda t: torch.arange(first, last, by, out=t, device=t.device)
        )

    def linspace(
        self,
        start: Scalar,
        end: Scalar,
        steps: int | Sequence[int],
        out: torch.Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Return evenly spaced values from start to end, both included; see the module for what all factories share.

        Args:
            start: first value.
            end: last value.
            steps: how many values; of a (nested) tuple or list the product counts.
        """
        self._check_options("linspace", device, layout)
        count: Any = steps
        while isinstance(count, (tuple, list)):
            count = count[0] if len(count) == 1 else math.prod(count)
        first, last = _number(start), _number(end)
        dtype = out.dtype if dtype is None and out is not None else dtype
        if dtype is None:
            complex_bound = isinstance(first, complex) or isinstance(last, complex)
            dtype = torch.full((), 1j if complex_bound else 1.0, device="cpu").dtype
        like = torch.empty(count, dtype=dtype, device=_META, requires_grad=requires_grad)
        return self._make(
            "linspace", like, out, requires_grad, lambda t: torch.linspace(first, last, count, out=t, device=t.device)
        )

    # -- random numbers -----------------------------------------------------------------------------------------------
    def rand(
        self,
        *sizes: Any,
        size: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Return uniform random numbers from [0, 1) on the heap, the same as torch.rand with the same seed.

        See the module for what all factories share.  The ranks' generators are their own: same seed, same numbers.

        Args:
            generator: source of the numbers, on this device; torch's default one if None.
            pin_memory: must be False.

        Raises:
            UnsupportedError: `pin_memory` is True, or the dtype is not floating or complex.
        """
        self._check_options("rand", device, layout, pin_memory, generator)
        like = _like_size("rand", sizes, size, dtype, out, requires_grad)
        _check_inexact("rand", like.dtype)
        return self._make("rand", like, out, requires_grad, lambda t: t.uniform_(0, 1, generator=generator))

    def randn(
        self,
        *sizes: Any,
        size: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Return normal random numbers on the heap, the same as torch.randn with the same seed; see `rand`."""
        self._check_options("randn", device, layout, pin_memory, generator)
        like = _like_size("randn", sizes, size, dtype, out, requires_grad)
        _check_inexact("randn", like.dtype)
        return self._make("randn", like, out, requires_grad, lambda t: t.normal_(0, 1, generator=generator))

    def randint(
        self,
        *args: Any,
        low: int | None = None,
        high: int | None = None,
        size: Sequence[int] | None = None,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Return random integers from [low, high) on the heap, the same as torch.randint with the same seed.

        See the module for what all factories share, and `rand` for `generator`.

        Args:
            args: `(high, size)` or `(low, high, size)`; each may be given by keyword instead.
            low: smallest value, 0 if not given.
            high: one more than the largest value.
            size: sizes as a tuple or list.
            dtype: int64 if None and there is no `out`.

        Raises:
            ArgumentError: not two or three of low, high and size.
        """
        lowest, highest, shape = _randint_arguments(args, low, high, size)
        self._check_options("randint", device, layout, generator=generator)
        if dtype is None:
            dtype = torch.int64 if out is None else out.dtype
        like = _like_size("randint", (shape,), None, dtype, None, requires_grad)
        return self._make(
            "randint", like, out, requires_grad, lambda t: t.random_(lowest, highest, generator=generator)
        )

    def uniform(
        self,
        size: Any,
        low: float = 0.0,
        high: float = 1.0,
        dtype: torch.dtype | None = None,
        *,
        generator: torch.Generator | None = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """Return uniform random numbers from [low, high) on the heap, the same as `Tensor.uniform_` makes.

        See the module for what all factories share, and `rand` for `generator`.

        Args:
            size: sizes as a (nested) tuple or list, or one number.
            low: lower bound.
            high: upper bound, not below `low`.
            dtype: a floating type; torch's default dtype if None.

        Raises:
            ArgumentError: the bounds are the wrong way round or not finite.
            UnsupportedError: the dtype is not floating or complex.
        """
        self._check_options("uniform", generator=generator)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ArgumentError(f"uniform: low must not be above high, and both finite; got {low} and {high}")
        like = _like_size("uniform", (size,), None, dtype, None, requires_grad)
        _check_inexact("uniform", like.dtype)
        return self._make("uniform", like, None, requires_grad, lambda t: t.uniform_(low, high, generator=generator))

    # -- what they share ----------------------------------------------------------------------------------------------
    def _check_options(
        self,
        name: str,
        device: Device = None,
        layout: torch.layout = torch.strided,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if device is not None and not same_device(torch.device(device), self.device):
            raise DeviceError(
                f"Device mismatch: requested device {device} but Iris instance is on device {self.device}. "
                f"The symmetric heap lies on {self.device}: leave device out, or open another context "
                f"with device={str(device)!r}"
            )
        if layout is not torch.strided:
            raise LayoutError(f"{name}: the symmetric heap has torch.strided tensors only, not {layout}")
        if pin_memory:
            raise UnsupportedError(
                f"{name}: the symmetric heap cannot be pinned; leave pin_memory out, and copy through "
                "torch.empty(..., pin_memory=True) where a transfer needs pinned memory"
            )
        if generator is not None and not same_device(generator.device, self.device):
            raise DeviceError(
                f"{name}: the generator is on {generator.device}, but Iris instance is on device {self.device}; "
                f"make it with torch.Generator(device={self.device!r})"
            )

    def _like(
        self,
        name: str,
        input: torch.Tensor,
        dtype: torch.dtype | None,
        layout: torch.layout | None,
        device: Device,
        requires_grad: bool,
        memory_format: torch.memory_format,
    ) -> torch.Tensor:
        """Return what torch's `<name>` would make, without its memory."""
        self._check_options(name, device, input.layout if layout is None else layout)
        how: Any = {"dtype": dtype, "requires_grad": requires_grad, "memory_format": memory_format}
        return torch.empty_like(input, layout=torch.strided, device=_META, **how)

    def _make(
        self,
        name: str,
        like: torch.Tensor,
        out: torch.Tensor | None,
        requires_grad: bool,
        fill: Callable[[torch.Tensor], object] | None,
    ) -> torch.Tensor:
        """Allocate what `like` describes, or take `out`, and fill it."""
        shape = tuple(like.shape)
        if out is not None:
            result = self._checked_output(out, like)
            if fill is not None:
                fill(result)
        else:
            result = self.heap.empty_strided(shape, like.stride(), like.dtype, (name, shape, like.dtype))
            if fill is not None:
                try:
                    fill(result)
                except BaseException:
                    self.heap.free(result)
                    raise
        return result.requires_grad_() if requires_grad else result

    def _checked_output(self, out: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if out.numel() != like.numel():
            raise ArgumentError(
                f"The output tensor has {out.numel()} elements, but {like.numel()} are required (shape "
                f"{tuple(out.shape)}, but {tuple(like.shape)} is asked for)"
            )
        if out.dtype != like.dtype:
            raise ArgumentError(f"The output tensor has dtype {out.dtype}, but {like.dtype} is required")
        if not self.heap.is_symmetric(out):
            raise NotOnHeapError(
                "The output tensor is not on the symmetric heap; make it with this context (empty, zeros, ...)"
            )
        return out if out.shape == like.shape else out.view(like.shape)


# -- arguments -------------------------------------------------------------------------------------------------------
def _like_size(
    name: str,
    sizes: tuple[Any, ...],
    size: Sequence[int] | None,
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
    requires_grad: bool,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> torch.Tensor:
    """Return what torch would make for a size, without its memory."""
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
    return torch.empty(sizes, dtype=dtype, device=_META, requires_grad=requires_grad, memory_format=memory_format)


def _check_inexact(name: str, dtype: torch.dtype) -> None:
    """Raise UnsupportedError unless random numbers of this dtype can be drawn from a continuous distribution."""
    if not (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedError(f"{name}: needs a floating or complex dtype, not {dtype}; use randint for integers")


def _number(value: Scalar) -> Any:
    """Return the value of a tensor without dimensions; anything else as it is, for torch to judge."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _range_length(start: Any, end: Any, step: Any, dtype: torch.dtype | None) -> tuple[int, torch.dtype]:
    """Return how many elements torch.arange makes, and of what type.

    Worked out here because torch's answer on the meta device imports sympy, which takes half a second.
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


def _randint_arguments(args: tuple[Any, ...], low: Any, high: Any, size: Any) -> tuple[int, int, Any]:
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
