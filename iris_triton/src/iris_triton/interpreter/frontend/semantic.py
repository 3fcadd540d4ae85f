"""Triton's semantic layer with the parts replaced that only make sense for a compiler: regions and hints.

`ArrayRegions` serves any kernel language on top of that layer; `CpuSemantic` is Triton's own.

A reduction's or scan's combine function is compiled for scalars.  Here it runs on whole arrays: its arguments are
tensors of scalar type whose arrays have many elements, one per independent combination.  A combine function that
branches on its arguments cannot be run so; it is then run element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from iris_triton import _compat
from iris_triton.interpreter.frontend.typefacts import block_type
from iris_triton.interpreter.frontend.values import Array, Handle, signless, unsigned, wrap, wrap_handle
from iris_triton.interpreter.state import current


class AmbiguousConditionError(TypeError):
    """A branch depends on a value with several elements."""


class _Region:
    """Arguments and results of one run of a combine function; plays operation, region and block of the IR at once."""

    def __init__(self, arguments: Sequence[Handle]) -> None:
        self._arguments = arguments
        self.results: list[Handle] = []

    def get_region(self, index: int) -> _Region:
        return self

    def arg(self, index: int) -> Handle:
        return self._arguments[index]


Combine = Callable[[list[Array], list[Array]], list[Array]]


class _TensorMaker(type):
    def __call__(cls, handle: Any, type_: Any) -> Any:
        return wrap_handle(handle, type_)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, tl.tensor)


class _Tensor(metaclass=_TensorMaker):
    """tl.tensor to the semantic layer, which makes its results with it; only faster."""


class ArrayRegions:
    """Reductions, scans and elementwise functions on arrays, and hints; mixed into a semantic layer."""

    tensor = _Tensor

    # What the semantic layer has.
    broadcast_tensors: Callable[..., Any]

    def reduced_type(self, type_: Any, axis: int) -> Any:
        """The type of a reduction's result: a block without one dimension, or a scalar."""
        shape = tuple(int(n) for i, n in enumerate(type_.shape) if i != axis)
        return block_type(type_.scalar, shape) if shape else type_.scalar

    def reduce_arrays(self, inputs: Any, axis: int, region_builder_fn: Any) -> tuple[Any, ...]:
        """Reduce tensors of one shape along an axis."""
        known = _known_reduction(_compat.combine_function(region_builder_fn), inputs, axis)
        if known is None:
            combine = self._combine(inputs, region_builder_fn)
            parts = [np.moveaxis(value.handle.data, axis, -1) for value in inputs]
            while (length := parts[0].shape[-1]) > 1:  # pairs of neighbours: keeps the order of the elements
                left, right = [p[..., 0 : length - 1 : 2] for p in parts], [p[..., 1:length:2] for p in parts]
                combined = combine(left, right)
                rest = [[p[..., length - 1 :]] if length % 2 else [] for p in parts]
                parts = [np.concatenate([c, *r], axis=-1) for c, r in zip(combined, rest, strict=True)]
            known = [p[..., 0] for p in parts]
        types = [self.reduced_type(value.type, axis) for value in inputs]
        return tuple(_as_tensor(data, type_) for data, type_ in zip(known, types, strict=True))

    def associative_scan(self, inputs: Any, axis: int, region_builder_fn: Any, reverse: bool) -> tuple[Any, ...]:
        shape = tuple(inputs[0].type.shape)
        axis = axis % len(shape)
        reverse = bool(reverse.value if isinstance(reverse, tl.constexpr) else reverse)
        parts = [np.moveaxis(value.handle.data, axis, -1) for value in inputs]
        if reverse:
            parts = [p[..., ::-1] for p in parts]
        known = _find(_compat.combine_function(region_builder_fn), _SCANS) if _in_numpy(inputs[0].type.scalar) else None
        if known is not None:
            parts = [known.accumulate(parts[0], axis=-1, dtype=parts[0].dtype)]
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
        model = inputs[0].type
        flat = [(value.handle.data.reshape(-1), value.type.scalar) for value in inputs]
        rows: list[Any] = []
        for start in range(0, flat[0][0].size, pack):
            places = range(start, start + pack)
            results = function(*(wrap(data[i : i + 1], scalar) for data, scalar in flat for i in places))
            rows.append(results if isinstance(results, (tuple, tl.tuple)) else (results,))
        made = []
        for k, first in enumerate(rows[0][::pack]):
            parts = [each.handle.data for row in rows for each in row[k * pack : (k + 1) * pack]]
            type_ = model.with_element_ty(first.type) if model.is_block() else first.type
            made.append(_as_tensor(np.concatenate(parts), type_))
        return tuple(made)

    def multiple_of(self, value: Any, values: Any) -> Any:
        return value

    max_contiguous = max_constancy = multiple_of


class CpuSemantic(ArrayRegions, _compat.TritonSemantic):  # type: ignore[misc]
    """Checks and promotes types as the compiler does; computes through `CpuBuilder`."""

    def reduction(self, inputs: Any, axis: int | None, region_builder_fn: Any) -> tuple[Any, ...]:
        if axis is None:
            inputs = tuple(self.reshape(value, [value.numel.value], can_reorder=True) for value in inputs)
            axis = 0
        shape = tuple(inputs[0].type.shape)
        if any(tuple(value.type.shape) != shape for value in inputs):
            raise ValueError("all inputs of a reduction must have the same shape")
        return self.reduce_arrays(inputs, axis, region_builder_fn)


def _as_tensor(data: Array, type_: Any) -> Any:
    shape = tuple(int(n) for n in type_.shape) if type_.is_block() else (1,)
    return wrap(np.asarray(data).reshape(shape), type_)


def _known(functions: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Combine functions of Triton's own that this version has; in pairs, as hashing a jitted function is expensive."""
    return [(getattr(tl.standard, name), known) for name, known in functions.items() if hasattr(tl.standard, name)]


_BITWISE = _known({"_xor_combine": np.bitwise_xor, "_or_combine": np.bitwise_or})
_ORDERING = _known({"_elementwise_max": (np.fmax, np.maximum), "_elementwise_min": (np.fmin, np.minimum)})
_PICKING = _known(
    {
        f"_arg{way}_combine_tie_break_{tie}": getattr(np, f"arg{way}")
        for way in ("max", "min")
        for tie in ("left", "fast")
    }
)
_SCANS = _known({"_sum_combine": np.add, "_prod_combine": np.multiply})


def _find(function: Any, known: list[tuple[Any, Any]]) -> Any:
    for each, numpy in known:
        if each is function:
            return numpy
    return None


def _in_numpy(scalar: Any) -> bool:
    """Whether numpy computes with numbers of a type as they are kept."""
    if scalar.is_floating():
        return scalar != tl.bfloat16 and bool(scalar.primitive_bitwidth > 8)
    return bool(scalar.is_int() and scalar.primitive_bitwidth >= 8)


def _known_reduction(function: Any, inputs: Any, axis: int) -> list[Array] | None:
    """Reduce with numpy where it gives the combine function's result; None where it does not."""
    data, scalar = inputs[0].handle.data, inputs[0].type.scalar
    if not _in_numpy(scalar):
        return None
    floating = scalar.is_floating()
    if _find(function, _SCANS) is np.add:
        return [np.add.reduce(data, axis=axis, dtype=data.dtype)]
    if bitwise := not floating and _find(function, _BITWISE):
        return [bitwise.reduce(data, axis=axis)]
    ordered = unsigned(data) if not floating and scalar.is_int_unsigned() else data
    if ordering := _find(function, _ORDERING):
        return [signless(ordering[0 if floating else 1].reduce(ordered, axis=axis))]
    pick = _find(function, _PICKING)
    if pick is None or (floating and np.isnan(data).any()):
        return None
    where = np.expand_dims(pick(ordered, axis=axis), axis)
    return [np.take_along_axis(value.handle.data, where, axis).squeeze(axis) for value in inputs]
