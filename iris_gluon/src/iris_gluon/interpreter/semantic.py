"""Gluon's semantic layer: its own checks of shapes and layouts, computing through `GluonBuilder`.

What the compiler checks later, when the IR is verified, is checked here with the same words: that a layout fits the
launch, and that the operands of atomics agree.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

from iris_core.errors import UnsupportedError
from iris_gluon import _compat
from iris_gluon.interpreter import program
from iris_gluon.interpreter.builder import LaidOut
from iris_gluon.interpreter.hopper.memory_ops import partition
from iris_gluon.interpreter.inference import bank_conflicts, linear_layout, memory_layout
from iris_triton.interpreter.frontend.operators import unwrap
from iris_triton.interpreter.frontend.semantic import ArrayRegions
from iris_triton.interpreter.frontend.values import wrap_handle
from iris_triton.interpreter.source import here

_layouts = _compat.layouts


def _checked(name: str) -> Any:
    """A method whose last argument is a layout, which must fit the launch."""
    method = getattr(_compat.GluonSemantic, name)

    def call(self: CpuGluonSemantic, *arguments: Any, **named: Any) -> Any:
        self.check_layout(named["layout"] if "layout" in named else arguments[-1])
        return method(self, *arguments, **named)

    return call


def _inferred(name: str) -> Any:
    """A method whose result has a layout that follows from its first argument's."""
    method = getattr(_compat.GluonSemantic, name)
    return lambda self, input, *arguments, **named: method(self, _laid_out(input), *arguments, **named)


class CpuGluonSemantic(ArrayRegions, _compat.GluonSemantic):  # type: ignore[misc]
    """Checks types, shapes and layouts as the compiler does."""

    # -- layouts that fit the launch ----------------------------------------------------------------------------------
    arange, splat, set_auto_layout, shared_load = map(_checked, ("arange", "splat", "set_auto_layout", "shared_load"))

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        self.check_layout(layout)
        _check_decided("convert_layout", value)
        result = super().convert_layout(value, layout)
        if assert_trivial and not self._same_places(value.type.layout, layout, value.type.shape):
            raise TypeError(
                f"layout conversion from {value.type.layout} to {layout} is not trivial.\nThe linear layouts are:\n"
                f"{self.to_linear_layout(value.type.layout, value.type.shape)}\n"
                f"{self.to_linear_layout(layout, value.type.shape)}"
            )
        return result

    def check_layout(self, layout: Any) -> None:
        """Refuse a layout that does not fit the launch."""
        if isinstance(layout, _compat.DistributedLayout):
            program.check_layout(layout)

    def _same_places(self, one: Any, other: Any, shape: Any) -> bool:
        return _bases(self.to_linear_layout(one, shape).value) == _bases(self.to_linear_layout(other, shape).value)

    def to_linear_layout(self, layout: Any, shape: Any) -> Any:
        if isinstance(layout, (_layouts.AutoLayout, _layouts.DistributedLinearLayout)):
            return _compat.constexpr(layout)
        sizes = tuple(int(n) for n in shape)
        linear = linear_layout(layout, sizes, num_warps=program.num_warps(), warp_size=program.warp_size())
        return _compat.constexpr(linear)

    def num_warps(self, generator: Any) -> Any:
        return _compat.constexpr(program.num_warps())

    def num_ctas(self) -> Any:
        return _compat.constexpr(program.num_ctas())

    # -- layouts of results -------------------------------------------------------------------------------------------
    expand_dims, reshape, permute, split = map(_inferred, ("expand_dims", "reshape", "permute", "split"))

    def join(self, a: Any, b: Any) -> Any:
        a, b = self.broadcast_impl_value(a, b)
        return super().join(_laid_out(a), _laid_out(b))

    def reduced_type(self, type_: Any, axis: int) -> Any:
        shape = [int(n) for n in type_.shape]
        del shape[axis]
        if not shape:
            return type_.scalar
        auto = isinstance(type_.layout, _compat.AutoLayouts)
        return _compat.distributed_type(
            type_.scalar, shape, type_.layout if auto else _layouts.SliceLayout(axis, type_.layout)
        )

    def reduction(self, inputs: Any, axis: int | None, region_builder_fn: Any) -> tuple[Any, ...]:
        if axis is None:
            inputs = tuple(self.reshape(value, [value.numel.value], can_reorder=False) for value in inputs)
            axis = 0
        shape = inputs[0].type.shape
        if not 0 <= axis < len(shape):
            raise ValueError(f"expected reduction axis to be in the range [0, {len(shape)}) but got {axis}")
        self._check_same_layout(inputs)
        if any(value.type.shape != shape for value in inputs):
            raise ValueError("all reduction inputs must have the same shape")
        if len(shape) == 1:
            _check_decided("a reduction to a scalar", *inputs)
        return self.reduce_arrays(inputs, axis, region_builder_fn)

    # -- blocks whose layout nothing says -----------------------------------------------------------------------------
    def store(self, ptr: Any, val: Any, mask: Any, *options: Any) -> Any:
        if _has_auto_layout(ptr) and all(_has_auto_layout(each) or not _is_block(each) for each in (val, mask)):
            _check_decided("store", ptr)
        return super().store(ptr, val, mask, *options)

    def device_print(self, prefix: str, args: Any, hex: bool) -> Any:
        _check_decided("device_print", *args)
        return super().device_print(prefix, args, hex)

    def shared_store(self, mem_desc: Any, value: Any) -> None:
        _check_decided("a store to shared memory", value)
        super().shared_store(mem_desc, value)

    def allocate_shared(self, element_ty: Any, shape: Any, layout: Any, value: Any) -> Any:
        _check_decided("a store to shared memory", value)
        return super().allocate_shared(element_ty, shape, layout, value)

    # -- shared memory ------------------------------------------------------------------------------------------------
    def memdesc_trans(self, mem_desc: Any, order: Any) -> Any:
        return super().memdesc_trans(_expecting("trans", mem_desc, order), order)

    def memdesc_reshape(self, mem_desc: Any, shape: Any) -> Any:
        return super().memdesc_reshape(_expecting("reshape", mem_desc, shape), shape)

    def bank_conflicts(self, distr_ty: Any, shared_ty: Any) -> Any:
        return bank_conflicts(distr_ty, shared_ty, program.num_warps(), program.warp_size())

    # -- partitions ---------------------------------------------------------------------------------------------------
    def warp_specialize(
        self, functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any, generator: Any
    ) -> Any:
        """Run the first function here and the others beside it; see `iris_gluon.interpreter.cta`."""
        for function, _ in functions_and_args:
            if isinstance(function, _compat.constexpr):
                name = getattr(function.value, "__name__", function.value)
                raise TypeError(
                    f"{here()}: gl.warp_specialize cannot compile {name}, which is a constexpr argument of the kernel: "
                    "write the name of the function itself"
                )
        pairs = [(unwrap(function), arguments) for function, arguments in functions_and_args]
        for _, arguments in pairs:
            if not isinstance(arguments, (tuple, _compat.core.tuple)):
                raise ValueError(f"function arguments must be a tuple of arguments, but got {type(arguments)}")
        workers = pairs[1:]
        for what, counts in (("warp", worker_num_warps), ("register", worker_num_regs)):
            if counts is not None and len(counts) != len(workers):
                raise AssertionError(f"warp specialize got {len(workers)} partitions but {len(counts)} {what} counts")
        for function, arguments in workers:
            for position, argument in enumerate(arguments):
                if isinstance(argument, _compat.tensor) and argument.type.is_block():
                    raise ValueError(
                        f"argument {position} of {function.__name__} is a block: only the default partition of "
                        "gl.warp_specialize can take tensors; hand blocks to the others through shared memory"
                    )

        names = (f"partition {n} ({function.__name__})" for n, (function, _) in enumerate(workers, 1))
        default, *bodies = (partial(generator.call_JitFunction, each, tuple(given), {}) for each, given in pairs)
        return partition().cta.run_partitions(default, [*zip(names, map(int, worker_num_warps), bodies, strict=True)])

    # -- atomics ------------------------------------------------------------------------------------------------------
    def atom_red_typechecking_impl(self, ptr: Any, val: Any, mask: Any, op: str) -> Any:
        _check_operands(f"atomic_{op}", ptr, val, mask)
        return super().atom_red_typechecking_impl(ptr, val, mask, op)

    def atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
        _check_operands("atomic_cas", ptr, cmp, val)
        return super().atomic_cas(ptr, cmp, val, sem, scope)


def _expecting(operation: str, memory: Any, arguments: Any) -> Any:
    """A descriptor of shared memory that knows the layout of the view that the compiler would make of it."""
    shape = tuple(int(n) for n in memory.shape)
    numbers = tuple(int(n) for n in arguments)
    same = math.prod(numbers) == math.prod(shape) if operation == "reshape" else len(numbers) == len(shape)
    if not same:
        return memory  # the semantic layer says why that cannot be
    if operation == "trans" and sorted(numbers) != list(range(len(shape))):
        raise ValueError(f"the order must be a permutation of {list(range(len(shape)))}, got {list(numbers)}")
    if isinstance(memory.layout, getattr(_layouts, "PaddedSharedLayout", ())):
        raise UnsupportedError("the CPU executor cannot reshape or permute shared memory with a PaddedSharedLayout")
    layout = memory_layout(operation, memory.layout, memory.dtype, shape, numbers)
    view = dataclasses.replace(memory.handle, inferred=layout)
    return _compat.core.shared_memory_descriptor(
        view, memory.dtype, memory.shape, memory.layout, memory.type.alloc_shape
    )


def _laid_out(tensor: Any) -> Any:
    layout = getattr(tensor.type, "layout", None)
    if layout is None:
        return tensor
    return wrap_handle(LaidOut(tensor.handle.data, tensor.handle.dtype, layout), tensor.type)


def _is_block(value: Any) -> bool:
    return isinstance(value, _compat.tensor) and value.type.is_block()


def _has_auto_layout(value: Any) -> bool:
    return _is_block(value) and isinstance(value.type.layout, _layouts.AutoLayout)


def _check_decided(doing: str, *values: Any) -> None:
    """Refuse a use of blocks without a layout that gives them none, as a pass of the compiler does."""
    for value in values:
        if _is_block(value) and isinstance(value.type.layout, _compat.AutoLayouts):
            raise ValueError(
                f"{here()}: {doing} of a block without a layout ({value.type.layout}), which the compiler cannot "
                "infer: give gl.arange or gl.full a layout, or call gl.set_auto_layout before"
            )


def _bases(linear: Any) -> tuple[Any, ...]:
    return linear.reg_bases, linear.lane_bases, linear.warp_bases, linear.block_bases


def _check_operands(name: str, pointer: Any, *operands: Any) -> None:
    """What the IR's verifier finds: blocks of another layout than the pointers'."""
    layout = getattr(pointer.type, "layout", None)
    for operand in operands:
        other = None if operand is None else getattr(operand.type, "layout", None)
        if None not in (layout, other) and other != layout:
            raise ValueError(f"Layout mismatch in {name}: {layout} vs {other}")
