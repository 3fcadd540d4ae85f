"""Tensor factories on the symmetric heap, with torch's own semantics.

Shapes, strides, element types and most errors are torch's: every factory first asks torch what it would make, on the
meta device, where that costs no memory.  Then the block is allocated and filled in place, so no temporary of full size
exists.  Arguments are checked before anything is allocated; should filling fail all the same, the block is freed again.

All factories share, besides their options:

    Symmetric: every rank calls the factory with the same sizes and dtype, in the same order with other allocations
        and frees.
    Raises:
        DeviceError: another device was asked for.
        LayoutError: another layout was asked for.
        ArgumentError: `out` has the wrong number of elements or the wrong dtype, or a range cannot be.
        NotOnHeapError: `out` is not on the heap.
        HeapExhaustedError: no free block is large enough; the heap can be used as before.
        HeapClosedError: the context is closed.
        RuntimeError, TypeError: as torch raises them for the same arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any, TypedDict, Unpack

import torch

from iris_core.device.targets import same_device
from iris_core.errors import ArgumentError, DeviceError, LayoutError, UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.heap.streams import uncompiled

Fill = Callable[[torch.Tensor], object] | None
Scalar = bool | int | float | complex | torch.Tensor  # a tensor without dimensions stands for its value
Generator = torch.Generator | None
Device = str | int | torch.device | None  # None for the context's own
_META = torch.device("meta")  # for asking torch what it would make
_CONTINUOUS = ("rand", "randn", "uniform")  # distributions
_CUTS_OFF = not torch.arange(0, 0.5, dtype=torch.int64, device="cpu").numel()  # arange of integers: before torch 2.15


class Options(TypedDict, total=False):
    """Options that every factory takes by keyword."""

    dtype: torch.dtype | None  #: element type; torch's rules where it is None (that of `out`, if given)
    layout: torch.layout | None  #: torch.strided, the only one that the heap has
    device: Device  #: None, or this context's own device
    requires_grad: bool  #: whether autograd should record operations on the result; False by default


class FactoryOptions(Options, total=False):
    """`Options`, and those of factories that do not copy another tensor's layout."""

    #: a tensor on the heap to fill instead of allocating one, with as many elements as asked for; if its shape differs,
    #: a view of it with the requested shape is returned and `out` keeps its own
    out: torch.Tensor | None


class SizedOptions(FactoryOptions, total=False):
    """`FactoryOptions`, and those of factories that take sizes as positional arguments."""

    #: instead of the positional arguments, which are sizes one by one or as one (nested) tuple or list; `()` makes a
    #: tensor without dimensions
    size: Sequence[int] | None
    pin_memory: bool  #: must be False; UnsupportedError otherwise


class LikeOptions(Options, total=False):
    """`Options`, and those of factories that copy another tensor's layout."""

    memory_format: torch.memory_format  #: torch.preserve_format, the default, keeps the order of strides


class TensorFactories:
    """The factories; a mixin for a class that has a `heap` and a `device`."""

    heap: SymmetricHeap
    device: str

    # -- constants ----------------------------------------------------------------------------------------------------
    def zeros(self, *sizes: Any, **options: Unpack[SizedOptions]) -> torch.Tensor:
        """Return a tensor of zeros on the heap; see `SizedOptions`."""
        return self._new("zeros", sizes, torch.Tensor.zero_, **options)

    def ones(self, *sizes: Any, **options: Unpack[SizedOptions]) -> torch.Tensor:
        """Return a tensor of ones on the heap; see `SizedOptions`."""
        return self._new("ones", sizes, lambda t: t.fill_(1), **options)

    def empty(
        self, *sizes: Any, memory_format: torch.memory_format = torch.contiguous_format, **options: Unpack[SizedOptions]
    ) -> torch.Tensor:
        """Return a tensor of undefined content on the heap; see `SizedOptions`.

        Args:
            memory_format: torch.contiguous_format, torch.channels_last or torch.channels_last_3d; not with `out`.
        """
        if options.get("out") is not None and memory_format is not torch.contiguous_format:
            raise ArgumentError("empty: memory_format= cannot be combined with out=, which has its strides already")
        return self._new("empty", sizes, None, None, memory_format, **options)

    def full(self, size: Any, fill_value: Scalar, **options: Unpack[FactoryOptions]) -> torch.Tensor:
        """Return a tensor with one value everywhere on the heap; see `FactoryOptions`.

        Args:
            size: sizes as a (nested) tuple or list, or one number.
            fill_value: the value; without `dtype` it decides the type: bool, int64, the default dtype, or complex.
        """
        value = _number(fill_value)
        options["dtype"] = torch.full((), value, dtype=_dtype(options), device="cpu").dtype  # which value must fit
        return self._new("full", (size,), lambda t: t.fill_(value), **options)

    # -- like another tensor ------------------------------------------------------------------------------------------
    def zeros_like(self, input: torch.Tensor, **options: Unpack[LikeOptions]) -> torch.Tensor:
        """Return zeros on the heap with the shape of `input`; see `LikeOptions`.

        Args:
            input: a tensor anywhere; its shape, dtype and strides count, not its device.
        """
        return self._like("zeros_like", input, torch.Tensor.zero_, **options)

    def ones_like(self, input: torch.Tensor, **options: Unpack[LikeOptions]) -> torch.Tensor:
        """Return ones on the heap with the shape of `input`; see `zeros_like`."""
        return self._like("ones_like", input, lambda t: t.fill_(1), **options)

    def empty_like(self, input: torch.Tensor, **options: Unpack[LikeOptions]) -> torch.Tensor:
        """Return a tensor of undefined content on the heap with the shape of `input`; see `zeros_like`."""
        return self._like("empty_like", input, None, **options)

    def full_like(self, input: torch.Tensor, fill_value: Scalar, **options: Unpack[LikeOptions]) -> torch.Tensor:
        """Return a tensor with one value everywhere on the heap with the shape of `input`; see `zeros_like`.

        Args:
            fill_value: the value; the dtype is that of `input` unless given.
        """
        value = _number(fill_value)
        torch.full((), value, dtype=options.get("dtype") or input.dtype, device="cpu")  # refuses what does not fit
        return self._like("full_like", input, lambda t: t.fill_(value), **options)

    # -- ranges -------------------------------------------------------------------------------------------------------
    def arange(
        self, start: Scalar | None = None, end: Scalar | None = None, step: Scalar = 1,
        **options: Unpack[FactoryOptions],
    ) -> torch.Tensor:  # fmt: skip
        """Return start, start + step, ... up to but without end; see `FactoryOptions`.

        `arange(end)` counts from 0.  Without `dtype` the result is int64 if all three are integers, else of the default
        dtype.  A range from a number to itself is empty, as in torch.

        Raises:
            ArgumentError: the step is 0 or leads away from the end, or a bound is not finite.
        """
        if end is None:
            start, end = None, start
        if end is None:
            raise TypeError("arange() needs at least its end")
        first, last, by = _number(0 if start is None else start), _number(end), _number(step)
        length, options["dtype"] = _range_length(first, last, by, _dtype(options))
        fill = lambda t: torch.arange(first, last, by, out=t, device=t.device)
        return self._new("arange", (length,), fill, **options)

    def linspace(
        self, start: Scalar, end: Scalar, steps: int | Sequence[int], out: torch.Tensor | None = None,
        **options: Unpack[Options],
    ) -> torch.Tensor:  # fmt: skip
        """Return evenly spaced values from start to end, both included; see `FactoryOptions`.

        Args:
            start: first value.
            end: last value.
            steps: how many values; of a (nested) tuple or list the product counts.
        """
        count: Any = steps
        while isinstance(count, (tuple, list)):
            count = count[0] if len(count) == 1 else math.prod(count)
        first, last = _number(start), _number(end)
        if options.get("dtype") is None and out is None:
            complex_bound = isinstance(first, complex) or isinstance(last, complex)
            options["dtype"] = torch.full((), 1j if complex_bound else 1.0, device="cpu").dtype
        fill = lambda t: torch.linspace(first, last, count, out=t, device=t.device)
        return self._new("linspace", (count,), fill, out=out, **options)

    # -- random numbers -----------------------------------------------------------------------------------------------
    def rand(self, *sizes: Any, generator: Generator = None, **options: Unpack[SizedOptions]) -> torch.Tensor:
        """Return uniform random numbers from [0, 1) on the heap, the same as torch.rand with the same seed.

        See `SizedOptions`.  The ranks' generators are their own: same seed, same numbers.

        Args:
            generator: source of the numbers, on this device; torch's default one if None.

        Raises:
            UnsupportedError: the dtype is not floating or complex.
        """
        return self._new("rand", sizes, lambda t: t.uniform_(0, 1, generator=generator), generator, **options)

    def randn(self, *sizes: Any, generator: Generator = None, **options: Unpack[SizedOptions]) -> torch.Tensor:
        """Return normal random numbers on the heap, the same as torch.randn with the same seed; see `rand`."""
        return self._new("randn", sizes, lambda t: t.normal_(0, 1, generator=generator), generator, **options)

    def randint(
        self, *args: Any, low: int | None = None, high: int | None = None, size: Sequence[int] | None = None,
        generator: Generator = None, **options: Unpack[FactoryOptions],
    ) -> torch.Tensor:  # fmt: skip
        """Return random integers from [low, high) on the heap, the same as torch.randint with the same seed.

        See `FactoryOptions`, and `rand` for `generator`.

        Args:
            args: `(high, size)` or `(low, high, size)`; each may be given by keyword instead.
            low: smallest value, 0 if not given.
            high: one more than the largest value.
            size: sizes as a tuple or list.

        Raises:
            ArgumentError: not two or three of low, high and size.
        """
        lowest, highest, shape = _randint_arguments(args, low, high, size)
        options["dtype"] = _dtype(options) or torch.int64
        fill = lambda t: t.random_(lowest, highest, generator=generator)
        return self._new("randint", (shape,), fill, generator, **options)

    def uniform(
        self, size: Any, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None, *,
        generator: Generator = None, requires_grad: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Return uniform random numbers from [low, high) on the heap, the same as `Tensor.uniform_` makes.

        See `FactoryOptions`, and `rand` for `generator`.

        Args:
            size: sizes as a (nested) tuple or list, or one number.
            low: lower bound.
            high: upper bound, not below `low`.
            dtype: a floating type; torch's default dtype if None.

        Raises:
            ArgumentError: the bounds are the wrong way round or not finite.
            UnsupportedError: the dtype is not floating or complex.
        """
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ArgumentError(f"uniform: low must not be above high, and both finite; got {low} and {high}")
        fill = lambda t: t.uniform_(low, high, generator=generator)
        return self._new("uniform", (size,), fill, generator, dtype=dtype, requires_grad=requires_grad)

    # -- what they share ----------------------------------------------------------------------------------------------
    def _new(
        self, name: str, sizes: tuple[Any, ...], fill: Fill, generator: Generator = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        /,  # what comes before is not among the options of every factory
        *, size: Sequence[int] | None = None, pin_memory: bool = False, out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None, layout: torch.layout | None = torch.strided, device: Device = None,
        requires_grad: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Check the options, and make the tensor that torch would make of them."""
        self._check_place(name, device, layout)
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
        if bool(sizes) is (size is not None):
            raise TypeError(f"{name}() needs its size, either by position or by keyword")
        sizes = sizes or (size,)
        while len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
            sizes = tuple(sizes[0])
        if dtype is None and out is not None:
            dtype = out.dtype
        like = torch.empty(sizes, dtype=dtype, device=_META, requires_grad=requires_grad, memory_format=memory_format)
        if name in _CONTINUOUS and not (like.dtype.is_floating_point or like.dtype.is_complex):
            raise UnsupportedError(
                f"{name}: needs a floating or complex dtype, not {like.dtype}; use randint for integers"
            )
        return self._make(name, like, out, requires_grad, fill)

    def _like(self, name: str, input: torch.Tensor, fill: Fill, **options: Unpack[LikeOptions]) -> torch.Tensor:
        """Check the options, and make what torch's `<name>` would make."""
        how: Any = dict(options)
        if unknown := how.keys() - LikeOptions.__annotations__.keys():
            raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
        self._check_place(name, how.pop("device", None), how.pop("layout", None) or input.layout)
        like = torch.empty_like(input, layout=torch.strided, device=_META, **how)
        return self._make(name, like, None, like.requires_grad, fill)

    def _check_place(self, name: str, device: Device, layout: torch.layout | None) -> None:
        if device is not None and not same_device(torch.device(device), self.device):
            raise DeviceError(
                f"Device mismatch: requested device {device} but Iris instance is on device {self.device}. "
                f"The symmetric heap lies on {self.device}: leave device out, or open another context "
                f"with device={str(device)!r}"
            )
        if layout not in (None, torch.strided):
            raise LayoutError(f"{name}: the symmetric heap has torch.strided tensors only, not {layout}")

    @uncompiled
    def _make(
        self, name: str, like: torch.Tensor, out: torch.Tensor | None, requires_grad: bool, fill: Fill
    ) -> torch.Tensor:
        """Allocate what `like` describes, or take `out`, and fill it."""
        if out is not None:
            result = self._checked_output(out, like)
        else:
            shape = tuple(like.shape)
            result = self.heap.empty_strided(shape, like.stride(), like.dtype, (name, shape, like.dtype))
        try:
            if fill is not None:
                fill(result)
        except BaseException:
            if out is None:
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
        self.heap.offset_of(out, "out")
        return out if out.shape == like.shape else out.view(like.shape)


# -- arguments -------------------------------------------------------------------------------------------------------
def _dtype(options: FactoryOptions) -> torch.dtype | None:
    """Return the element type that was asked for, by itself or with `out`."""
    dtype, out = options.get("dtype"), options.get("out")
    return out.dtype if dtype is None and out is not None else dtype


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
    are_whole = all(isinstance(value, Integral) for value in values)
    dtype = dtype or (torch.int64 if are_whole else torch.get_default_dtype())
    in_integers = dtype is torch.int64 and (are_whole or _CUTS_OFF)  # else torch counts in double precision
    if in_integers:
        start, end, step = int(start), int(end), int(step)
    if step == 0:
        raise ArgumentError("arange: step must be non-zero")
    if (step > 0 and start > end) or (step < 0 and start < end):
        raise ArgumentError(
            f"arange: upper bound and lower bound inconsistent with step sign ({start} to {end} by {step})"
        )
    if in_integers:
        return -((start - end) // step), dtype
    return math.ceil((float(end) - float(start)) / float(step)), dtype


def _randint_arguments(args: tuple[Any, ...], low: Any, high: Any, size: Any) -> tuple[int, int, Any]:
    """Sort out `([low,] high, size)` with any of them by keyword."""
    values = list(args)
    size = values.pop() if size is None and values else size
    high = values.pop() if high is None and values else high
    low = values.pop() if low is None and values else low
    if values or high is None or size is None:
        raise ArgumentError("randint() takes (high, size) or (low, high, size)")
    lowest, highest = 0 if low is None else low, high
    for bound in (lowest, highest):
        if isinstance(bound, bool) or not isinstance(bound, Integral):
            raise TypeError(f"randint: bounds must be integers, not {bound!r}")
    if lowest >= highest:
        raise ArgumentError(f"randint: low must be less than high, got {lowest} and {highest}")
    return int(lowest), int(highest), size


def as_sent(value: Any) -> Any:
    """Convert tensors, arrays and numeric lists to numpy arrays; return anything else as it is."""
    import numpy as np

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # numpy has no bfloat16
    if isinstance(value, list) and value and all(isinstance(each, int | float | complex) for each in value):
        array = np.asarray(value)
        return value if array.dtype == object else array
    return value
