"""Gluon's semantic layer: its own checks of shapes and layouts, computing through `GluonBuilder`.

That a layout fits the launch, which the compiler checks when the IR is verified, is checked here with the same words.
"""

import dataclasses
import math
from functools import lru_cache, partial
from typing import Any

from iris_core.errors import UnsupportedError
from iris_gluon import _compat
from iris_gluon.interpreter import program
from iris_gluon.interpreter.builder import LaidOut
from iris_gluon.interpreter.cta import running_partition
from iris_gluon.interpreter.hopper.operations import numbers
from iris_gluon.interpreter.program import linear_layout, memory_layout
from iris_triton.interpreter.frontend.operators import unwrap
from iris_triton.interpreter.frontend.semantic import ArrayRegions
from iris_triton.interpreter.frontend.values import wrap_handle

_layouts = _compat.layouts


def _checked(name: str) -> Any:
    """Wrap a method with a layout among its arguments, which must fit the launch."""
    method = getattr(_compat.GluonSemantic, name)

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        for each in (*arguments, *named.values()):
            self.check_layout(each)
        return method(self, *arguments, **named)

    return call


def _inferred(name: str) -> Any:
    """Wrap a method whose result has a layout that follows from its first argument's."""
    method = getattr(_compat.GluonSemantic, name)
    return lambda self, input, *arguments, **named: method(self, _laid_out(input), *arguments, **named)


class CpuGluonSemantic(ArrayRegions, _compat.GluonSemantic):  # type: ignore[misc]
    """Checks types, shapes and layouts as the compiler does."""

    splat, set_auto_layout, shared_load = map(_checked, ("splat", "set_auto_layout", "shared_load"))

    def arange(self, start: Any, end: Any, layout: Any) -> Any:
        self.check_layout(layout)  # the launches of a cached one may differ in their warps
        return self._arange(start, end, layout)

    @lru_cache(maxsize=4096)  # noqa: B019 - one instance per process, never freed
    def _arange(self, start: int, end: int, layout: Any) -> Any:
        return super().arange(start, end, layout)

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        self.check_layout(layout)
        if assert_trivial:
            before, after = (self.to_linear_layout(each, value.type.shape) for each in (value.type.layout, layout))
            if _bases(before.value) != _bases(after.value):
                raise TypeError(
                    f"layout conversion from {value.type.layout} to {layout} is not trivial.\n"
                    f"The linear layouts are:\n{before}\n{after}"
                )
        return super().convert_layout(value, layout)

    def check_layout(self, layout: Any) -> None:
        if isinstance(layout, _compat.DistributedLayout):
            program.check_layout(layout)

    def to_linear_layout(self, layout: Any, shape: Any) -> Any:
        if isinstance(layout, (_layouts.AutoLayout, _layouts.DistributedLinearLayout)):
            return _compat.constexpr(layout)
        return _compat.constexpr(linear_layout(layout, numbers(shape)))

    def num_warps(self, generator: Any) -> Any:
        return _compat.constexpr(running_partition().warps)

    def num_ctas(self) -> Any:
        return _compat.constexpr(program.num_ctas())

    expand_dims, reshape, permute, split = map(_inferred, ("expand_dims", "reshape", "permute", "split"))

    def join(self, a: Any, b: Any) -> Any:
        a, b = self.broadcast_impl_value(a, b)
        return super().join(_laid_out(a), _laid_out(b))

    def reduced_type(self, type_: Any, axis: int) -> Any:
        shape = [int(n) for n in type_.shape]
        del shape[axis]
        auto = isinstance(type_.layout, _compat.AutoLayouts)
        layout = type_.layout if auto else _layouts.SliceLayout(axis, type_.layout)
        return _compat.distributed_type(type_.scalar, shape, layout) if shape else type_.scalar

    def memdesc_trans(self, mem_desc: Any, order: Any) -> Any:
        return super().memdesc_trans(_expecting("trans", mem_desc, order), order)

    def memdesc_reshape(self, mem_desc: Any, shape: Any) -> Any:
        return super().memdesc_reshape(_expecting("reshape", mem_desc, shape), shape)

    def warp_specialize(
        self, functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any, generator: Any
    ) -> Any:
        """Run the first function here and the others beside it; see `iris_gluon.interpreter.cta`."""
        pairs = [(unwrap(function), arguments) for function, arguments in functions_and_args]
        names = (f"partition {n} ({function.__name__})" for n, (function, _) in enumerate(pairs[1:], 1))
        default, *bodies = (partial(generator.call_JitFunction, each, tuple(given), {}) for each, given in pairs)
        workers = [*zip(names, map(int, worker_num_warps), bodies, strict=True)]
        return running_partition().cta.run_partitions(default, workers)


def _expecting(operation: str, memory: Any, arguments: Any) -> Any:
    """Return a descriptor of shared memory that knows the layout of the view that the compiler would make of it."""
    shape, given = numbers(memory.shape), numbers(arguments)
    same = math.prod(given) == math.prod(shape) if operation == "reshape" else len(given) == len(shape)
    if not same:
        return memory  # the semantic layer says why that cannot be
    if operation == "trans" and sorted(given) != list(range(len(shape))):
        raise ValueError(f"the order must be a permutation of {list(range(len(shape)))}, got {list(given)}")
    if isinstance(memory.layout, getattr(_layouts, "PaddedSharedLayout", ())):
        raise UnsupportedError("the CPU executor cannot reshape or permute shared memory with a PaddedSharedLayout")
    layout = memory_layout(operation, memory.layout, memory.dtype, shape, given)
    view, type_ = dataclasses.replace(memory.handle, inferred=layout), memory.type
    return _compat.core.shared_memory_descriptor(view, memory.dtype, memory.shape, memory.layout, type_.alloc_shape)


def _laid_out(tensor: Any) -> Any:
    layout = getattr(tensor.type, "layout", None)
    if layout is None:
        return tensor
    return wrap_handle(LaidOut(tensor.handle.data, tensor.handle.dtype, layout), tensor.type)


def _bases(linear: Any) -> tuple[Any, ...]:
    return linear.reg_bases, linear.lane_bases, linear.warp_bases, linear.block_bases
