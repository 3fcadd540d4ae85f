"""Layouts that the compiler infers, asked of the compiler.

Some operations (reshape, permute, join, split, views of shared memory) leave the layout of their result to the IR.
Such an operation is built once in an empty function for operands of the same types, and the layout of its result is
read; nothing of it is compiled.  So the CPU has the same layouts, also the linear ones of odd reshapes, without rules
of its own that could differ.

The IR ends the process where it cannot infer a layout; what that happens for is refused here, or by Triton's semantic
layer, before.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import triton.language as tl

from iris_gluon import _compat

if TYPE_CHECKING:
    from collections.abc import Callable

_lock = threading.Lock()


@functools.cache
def _builder(num_warps: int, warp_size: int) -> tuple[Any, Any]:
    return _compat.new_builder(num_warps, warp_size)


@functools.cache
def _result_of(
    operation: str, layout: Any, shape: tuple[int, ...], arguments: tuple[Any, ...], num_warps: int, warp_size: int
) -> Any:
    with _lock:
        builder, _ = _builder(num_warps, warp_size)
        value = builder.create_poison(_compat.distributed_type(tl.int32, list(shape), layout).to_ir(builder))
        return builder.get_gluon_layout_from_tensor(_OPERATIONS[operation](builder, value, arguments))


_OPERATIONS: dict[str, Callable[[Any, Any, tuple[Any, ...]], Any]] = {
    "join": lambda builder, value, arguments: builder.create_join(value, value),
    "reshape": lambda builder, value, arguments: builder.create_reshape(value, list(arguments), False),
    "split": lambda builder, value, arguments: builder.create_split(value)[0],
    "trans": lambda builder, value, arguments: builder.create_trans(value, list(arguments)),
}


def result_layout(
    operation: str, layout: Any, shape: tuple[int, ...], *arguments: Any, num_warps: int, warp_size: int
) -> Any:
    """Return the layout of an operation's result.

    Args:
        operation: "expand_dims", "join", "reshape", "split" or "trans".
        layout: layout of the operand.
        shape: shape of the operand.
        *arguments: what else the operation takes: the axis, the new shape, the order.
        num_warps: warps of the program.
        warp_size: lanes of a warp.
    """
    if isinstance(layout, _compat.AutoLayouts):
        return layout
    if operation == "expand_dims":  # the most frequent one, and the semantic layer has looked at the axis
        return layout.parent
    return _result_of(operation, layout, shape, arguments, num_warps, warp_size)


@functools.cache
def _memory(operation: str, layout: Any, dtype: Any, shape: tuple[int, ...], arguments: tuple[int, ...]) -> Any:
    with _lock:
        builder, _ = _builder(4, 32)
        type_ = _compat.core.shared_memory_descriptor_type(dtype, list(shape), layout, list(shape))
        memory = builder.create_local_alloc(type_.to_ir(builder))
        return builder.get_gluon_layout_from_memdesc(_VIEWS[operation](builder, memory, list(arguments)))


_VIEWS: dict[str, Callable[[Any, Any, list[int]], Any]] = {
    "reshape": lambda builder, memory, shape: builder.create_memdesc_reshape(memory, shape),
    "trans": lambda builder, memory, order: builder.create_memdesc_trans(memory, order),
}


def memory_layout(operation: str, layout: Any, dtype: Any, shape: tuple[int, ...], arguments: tuple[int, ...]) -> Any:
    """Return the layout of a view of shared memory.

    Args:
        operation: "reshape" or "trans".
        layout: layout of what is viewed.
        dtype: its element type.
        shape: its shape.
        arguments: the new shape, or the order of dimensions.
    """
    return _memory(operation, layout, dtype, shape, arguments)


@functools.cache
def memory_problem(element: Any, shape: tuple[int, ...], layout: Any, alloc_shape: tuple[int, ...]) -> str:
    """Say why shared memory cannot have a layout; empty if it can.

    Args:
        element: type of the elements.
        shape: of the part that is described.
        layout: `iris_gluon.interpreter.hopper.shared.SharedLayout`.
        alloc_shape: of what was allocated.
    """
    with _lock:
        builder, _ = _builder(4, 32)
        try:
            attribute = getattr(builder, layout.name)(*layout.arguments)
            builder.get_shared_mem_desc_ty(element.to_ir(builder), list(shape), attribute, list(alloc_shape))
        except RuntimeError as error:
            return str(error).strip()
    return ""


def ask_compiler(question: str, *operands: Any) -> Any:
    """Ask Gluon's own semantic layer something that has an answer without code being generated.

    Args:
        question: name of its method.
        *operands: the method's arguments, then warps of the program and lanes of a warp.
    """
    *arguments, warps, lanes = operands
    with _lock:
        builder, _ = _builder(warps, lanes)
        return getattr(_compat.GluonSemantic(builder), question)(*arguments)


@functools.cache
def _linear(layout: Any, shape: tuple[int, ...], num_warps: int, warp_size: int) -> Any:
    with _lock:
        builder, _ = _builder(num_warps, warp_size)
        return builder.to_linear_layout(layout._to_ir(builder), list(shape))


def linear_layout(layout: Any, shape: tuple[int, ...], *, num_warps: int, warp_size: int) -> Any:
    """Return the linear layout that a layout is for a shape."""
    return _linear(layout, shape, num_warps, warp_size)


def _product(numbers: Any) -> int:
    result = 1
    for number in numbers:
        result *= int(number)
    return result


def threads_per_warp(layout: Any) -> int | None:
    """Lanes of a warp that a layout is made for; None if it does not say."""
    if hasattr(layout, "threads_per_warp"):
        return _product(layout.threads_per_warp)
    if hasattr(layout, "lane_bases"):
        return 1 << len(layout.lane_bases)
    if hasattr(layout, "parent"):
        return threads_per_warp(layout.parent)
    return {"NVMMADistributedLayout": 32, "AMDMFMALayout": 64, "AMDWMMALayout": 32}.get(type(layout).__name__)


def warps_per_program(layout: Any) -> int | None:
    """Warps of a program that a layout is made for; None if it does not say."""
    if hasattr(layout, "warp_bases"):
        bases = layout.warp_bases
        return _product(2 for _ in bases)
    if isinstance(getattr(layout, "warps_per_cta", None), (list, tuple)):
        return _product(layout.warps_per_cta)
    if hasattr(layout, "parent"):
        return warps_per_program(layout.parent)
    return None
