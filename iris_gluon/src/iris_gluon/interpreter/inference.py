"""Layouts that the compiler infers, asked of the compiler.

Some operations (reshape, permute, join, split, views of shared memory) leave the layout of their result to the IR.
Such an operation is built once in an empty function for operands of the same types, and the layout of its result is
read; nothing of it is compiled.  The IR ends the process where it cannot infer a layout, so such operations are refused
before.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Any

import triton.language as tl

from iris_gluon import _compat

_lock = threading.Lock()


@functools.cache
def _builder(num_warps: int, warp_size: int) -> tuple[Any, Any]:
    return _compat.new_builder(num_warps, warp_size)


@functools.cache
def result_layout(
    operation: str, layout: Any, shape: tuple[int, ...], *arguments: int, num_warps: int, warp_size: int
) -> Any:
    """Return the layout of the result of "expand_dims", "join", "reshape", "split" or "trans".

    `layout` and `shape` are the operand's; `arguments` are the axis, the new shape or the order.
    """
    if isinstance(layout, _compat.AutoLayouts):
        return layout
    if operation == "expand_dims":  # the most frequent one, and the semantic layer has looked at the axis
        return layout.parent
    with _lock:
        builder, _ = _builder(num_warps, warp_size)
        value = builder.create_poison(_compat.distributed_type(tl.int32, list(shape), layout).to_ir(builder))
        if operation == "join":
            made = builder.create_join(value, value)
        elif operation == "split":
            made = builder.create_split(value)[0]
        elif operation == "reshape":
            made = builder.create_reshape(value, list(arguments), False)
        else:
            made = builder.create_trans(value, list(arguments))
        return builder.get_gluon_layout_from_tensor(made)


@functools.cache
def memory_layout(operation: str, layout: Any, dtype: Any, shape: tuple[int, ...], arguments: tuple[int, ...]) -> Any:
    """Return the layout of a view ("reshape" or "trans", to a shape or an order) of shared memory."""
    with _lock:
        builder, _ = _builder(4, 32)
        type_ = _compat.core.shared_memory_descriptor_type(dtype, list(shape), layout, list(shape))
        memory = builder.create_local_alloc(type_.to_ir(builder))
        view = builder.create_memdesc_reshape if operation == "reshape" else builder.create_memdesc_trans
        return builder.get_gluon_layout_from_memdesc(view(memory, list(arguments)))


@functools.cache
def memory_problem(element: Any, shape: tuple[int, ...], layout: Any, alloc_shape: tuple[int, ...]) -> str:
    """Say why a part of shared memory cannot have a `SharedLayout`; empty if it can."""
    with _lock:
        builder, _ = _builder(4, 32)
        try:
            attribute = getattr(builder, layout.name)(*layout.arguments)
            builder.get_shared_mem_desc_ty(element.to_ir(builder), list(shape), attribute, list(alloc_shape))
        except RuntimeError as error:
            return str(error).strip()
    return ""


def bank_conflicts(distributed: Any, shared: Any, num_warps: int, warp_size: int) -> Any:
    """Return what the compiler's own semantic layer says of an access to shared memory."""
    with _lock:
        builder, _ = _builder(num_warps, warp_size)
        return _compat.GluonSemantic(builder).bank_conflicts(distributed, shared)


@functools.cache
def linear_layout(layout: Any, shape: tuple[int, ...], *, num_warps: int, warp_size: int) -> Any:
    """Return the linear layout that a layout is for a shape."""
    with _lock:
        builder, _ = _builder(num_warps, warp_size)
        return builder.to_linear_layout(layout._to_ir(builder), list(shape))


def threads_per_warp(layout: Any) -> int | None:
    """Lanes of a warp that a layout is made for; None if it does not say."""
    if hasattr(layout, "threads_per_warp"):
        return math.prod(map(int, layout.threads_per_warp))
    if hasattr(layout, "lane_bases"):
        return 1 << len(layout.lane_bases)
    if hasattr(layout, "parent"):
        return threads_per_warp(layout.parent)
    return {"NVMMADistributedLayout": 32, "AMDMFMALayout": 64, "AMDWMMALayout": 32}.get(type(layout).__name__)


def warps_per_program(layout: Any) -> int | None:
    """Warps of a program that a layout is made for; None if it does not say."""
    if hasattr(layout, "warp_bases"):
        return 1 << len(layout.warp_bases)
    if isinstance(getattr(layout, "warps_per_cta", None), (list, tuple)):
        return math.prod(map(int, layout.warps_per_cta))
    if hasattr(layout, "parent"):
        return warps_per_program(layout.parent)
    return None
