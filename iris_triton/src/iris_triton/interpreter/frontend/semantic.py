"""Triton's semantic layer with the regions replaced, which only make sense for a compiler.

A reduction's or scan's combine function is compiled for scalars.  Here it runs on whole arrays: its arguments are
tensors of scalar type whose arrays have many elements, one per independent combination.  A combine function that
branches on its arguments cannot be run so; it is then run element by element.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import triton.language as tl

from iris_triton import _compat
from iris_triton.interpreter.frontend import values
from iris_triton.interpreter.frontend.values import Array, Handle, facts_of, wrap
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.state import current


class AmbiguousConditionError(TypeError):
    """A branch depends on a value with several elements."""


class _Region:
    """Arguments and results of one run of a combine function; plays operation, region and block of the IR at once."""

    def __init__(self, arguments: Sequence[Handle]) -> None:
        self._arguments = arguments
        self.results: list[Handle] = []

    def get_region(self, index: int) -> Self:
        return self

    def arg(self, index: int) -> Handle:
        return self._arguments[index]


Combine = Callable[[list[Array], list[Array]], list[Array]]

_CONVERTED = {  # kinds of types (`TypeFacts.kind`) that numpy converts as a GPU does, and to what
    "bool": ("int", "unsigned", "float", "half"),
    "int": ("int", "unsigned", "float", "half"),
    "float": ("float", "half"),
    "half": ("float",),
}

_ADDRESSES = (("pointer", "int"), ("int", "pointer"), ("pointer", "pointer"))


class _TensorMaker(type):
    def __call__(cls, handle: Any, type_: Any) -> Any:
        return values.wrap_handle(handle, type_)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, tl.tensor)


class _Tensor(metaclass=_TensorMaker):
    """tl.tensor to the semantic layer, which makes its results with it; only faster."""


class ArrayRegions:
    """Reductions, scans and elementwise functions on arrays; mixed into a semantic layer."""

    tensor = _Tensor

    broadcast_tensors: Callable[..., Any]  # of the semantic layer, as those that follow
    reshape: Callable[..., Any]
    _check_same_layout: Callable[..., None]

    def cast(self, value: Any, type_: Any, fp_downcast_rounding: Any = None) -> Any:
        """Convert at once what numpy converts as a GPU does."""
        source, target = facts_of(value.type), facts_of(type_.scalar)
        if source.scalar is target.scalar:
            return value
        data = value.handle.data
        if fp_downcast_rounding is None and target.kind in _CONVERTED.get(source.kind, ()):
            return wrap(data.astype(target.kept), target.like(source.form))
        if (source.kind, target.kind) in _ADDRESSES and data.dtype.itemsize == target.kept.itemsize:
            data = accesses.plain(data) if target.kind == "int" else data
            return wrap(data.view(target.kept), target.like(source.form))
        return super().cast(value, type_, fp_downcast_rounding)  # type: ignore[misc]

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Spread a scalar over a block at once."""
        left, right = facts_of(lhs.type), facts_of(rhs.type)
        if left.form is None and right.form is not None:
            return wrap(np.full(right.form.shape, lhs.handle.data[0]), left.block(right.form)), rhs
        if left.form is not None and right.form is None:
            return lhs, wrap(np.full(left.form.shape, rhs.handle.data[0]), right.block(left.form))
        return super().broadcast_impl_value(lhs, rhs)  # type: ignore[misc]

    def reduced_type(self, type_: Any, axis: int) -> Any:
        """Return the type of a reduction's result: a block without one dimension, or a scalar."""
        shape = tuple(int(n) for i, n in enumerate(type_.shape) if i != axis)
        return values.block_type(type_.scalar, shape) if shape else type_.scalar

    def reduction(self, inputs: Any, axis: int | None, region_builder_fn: Any) -> tuple[Any, ...]:
        """Reduce tensors of one shape along an axis, or altogether."""
        if axis is None:
            inputs = tuple(self.reshape(value, [value.numel.value], can_reorder=False) for value in inputs)
            axis = 0
        shape = tuple(inputs[0].type.shape)
        if not 0 <= axis < len(shape):
            raise ValueError(f"expected reduction axis to be in the range [0, {len(shape)}) but got {axis}")
        self._check_same_layout(inputs)
        if any(tuple(value.type.shape) != shape for value in inputs):
            raise ValueError("all reduction inputs must have the same shape")
        numpy, parts = _numpy_combine(region_builder_fn, inputs, axis)
        if numpy is not None:
            parts = [values.signless(numpy.reduce(parts[0], axis=-1, dtype=parts[0].dtype))]
        else:
            combine = self._combine(inputs, region_builder_fn)
            while (length := parts[0].shape[-1]) > 1:  # pairs of neighbours: keeps the order of the elements
                left, right = [p[..., 0 : length - 1 : 2] for p in parts], [p[..., 1:length:2] for p in parts]
                combined = combine(left, right)
                rest = [[p[..., length - 1 :]] if length % 2 else [] for p in parts]
                parts = [np.concatenate([c, *r], axis=-1) for c, r in zip(combined, rest, strict=True)]
            parts = [p[..., 0] for p in parts]
        pairs = zip(parts, inputs, strict=True)
        return tuple(_as_tensor(data, self.reduced_type(value.type, axis)) for data, value in pairs)

    def associative_scan(self, inputs: Any, axis: int, region_builder_fn: Any, reverse: bool) -> tuple[Any, ...]:
        axis = axis % len(inputs[0].type.shape)
        reverse = bool(getattr(reverse, "value", reverse))
        numpy, parts = _numpy_combine(region_builder_fn, inputs, axis)
        if reverse:
            parts = [p[..., ::-1] for p in parts]
        if numpy is not None:
            parts = [values.signless(numpy.accumulate(parts[0], axis=-1, dtype=parts[0].dtype))]
        else:
            combine, step = self._combine(inputs, region_builder_fn), 1
            while step < parts[0].shape[-1]:
                combined = combine([p[..., :-step] for p in parts], [p[..., step:] for p in parts])
                parts = [np.concatenate([p[..., :step], c], axis=-1) for p, c in zip(parts, combined, strict=True)]
                step *= 2
        if reverse:
            parts = [p[..., ::-1] for p in parts]
        return tuple(
            _as_tensor(np.ascontiguousarray(np.moveaxis(p, -1, axis)), value.type)
            for p, value in zip(parts, inputs, strict=True)
        )

    def _combine(self, inputs: Any, region_builder: Any) -> Combine:
        types = [value.type.scalar for value in inputs]
        kept = [value.handle.data.dtype for value in inputs]

        def run(arrays: list[Array]) -> list[Array]:
            outer = current.region
            handles = [Handle(a, value.handle.dtype) for a, value in zip(arrays, [*inputs, *inputs], strict=True)]
            region = current.region = _Region(handles)
            try:
                region_builder(region)
            finally:
                current.region = outer
            if len(region.results) != len(types):
                raise ValueError(f"the combine function returned {len(region.results)} values, not {len(types)}")
            return [h.data.astype(k, copy=False) for h, k in zip(region.results, kept, strict=True)]

        def combine(left: list[Array], right: list[Array]) -> list[Array]:
            shape = left[0].shape
            if left[0].size == 0:
                return left
            try:
                return [np.broadcast_to(result, shape) for result in run([*left, *right])]
            except AmbiguousConditionError:
                flat = [a.reshape(-1) for a in (*left, *right)]
                rows = [run([a[i : i + 1] for a in flat]) for i in range(flat[0].size)]
                return [np.concatenate(column).reshape(shape) for column in zip(*rows, strict=True)]

        return combine

    def map_elementwise(self, inputs: Any, function: Callable[..., Any], pack: int) -> tuple[Any, ...]:
        """Call `function` with scalars, `pack` neighbouring elements of every input at a time."""
        inputs = self.broadcast_tensors(*inputs)
        type_ = inputs[0].type
        flat = [(value.handle.data.reshape(-1), value.type.scalar) for value in inputs]
        rows: list[Any] = []
        for start in range(0, flat[0][0].size, pack):
            places = range(start, start + pack)
            results = function(*(wrap(data[i : i + 1], scalar) for data, scalar in flat for i in places))
            rows.append(results if isinstance(results, (tuple, tl.tuple)) else (results,))
        made = []
        for k in range(0, len(rows[0]), pack):
            data = np.concatenate([each.handle.data for row in rows for each in row[k : k + pack]])
            scalar = rows[0][k].type
            made.append(_as_tensor(data, type_.with_element_ty(scalar) if type_.is_block() else scalar))
        return tuple(made)


class CpuSemantic(ArrayRegions, _compat.TritonSemantic):  # type: ignore[misc]
    """Checks and promotes types as the compiler does; computes through `CpuBuilder`."""

    @functools.cache  # noqa: B019 - one instance per process, never freed
    def arange(self, start: Any, end: Any) -> Any:
        """Cache the values: they are the same every time, and tensors never change: one tensor per range."""
        return super().arange(start, end)

    def _check_same_layout(self, inputs: Any) -> None:
        """Blocks of Triton have no layout."""


def _as_tensor(data: Array, type_: Any) -> Any:
    shape = tuple(int(n) for n in type_.shape) if type_.is_block() else (1,)
    return wrap(np.asarray(data).reshape(shape), type_)


_NUMPY = (  # combine functions of Triton, and numpy's for integers and floats; a list, as hashing is slow
    (tl.standard._sum_combine, (np.add, np.add)),
    (tl.standard._prod_combine, (np.multiply, np.multiply)),
    (tl.standard._elementwise_max, (np.maximum, np.fmax)),
    (tl.standard._elementwise_min, (np.minimum, np.fmin)),
)


def numpy_for(function: Any, is_floating: bool) -> Any:
    """Return numpy's function that does what a combine function does; None if there is none."""
    return next((functions[is_floating] for each, functions in _NUMPY if each is function), None)


def _numpy_combine(region_builder: Any, inputs: Any, axis: int) -> tuple[Any, list[Array]]:
    """Return numpy's function that does what the region combines with, or None, and the arrays, with the axis last."""
    scalar = inputs[0].type.scalar
    arrays = [np.moveaxis(value.handle.data, axis, -1) for value in inputs]
    if scalar.primitive_bitwidth < 8 or scalar == tl.bfloat16 or (scalar.is_floating() and arrays[0].itemsize == 1):
        return None, arrays
    function = _compat.combine_function(region_builder)
    found = numpy_for(function, scalar.is_floating())
    if found is not None and scalar.is_int_unsigned():
        arrays[0] = values.unsigned(arrays[0])
    return found, arrays
