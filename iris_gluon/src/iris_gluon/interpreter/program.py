"""Warps and lanes of the running program, and layouts.

The CPU has neither.  Layouts name both, and the compiler refuses layouts that do not fit the launch, so a launch on the
CPU has them too: num_warps as it was given, 4 by default; and 32 or 64 lanes, whichever the first layout of the launch
is made for, so that kernels for NVIDIA and for AMD run.

Some operations (reshape, permute, join, split, views of shared memory) leave the layout of their result to the IR.
Such an operation is built once in an empty function for operands of the same types, and the layout of its result is
read; nothing of it is compiled.  The IR ends the process where it cannot infer a layout, so such operations are refused
before.
"""

import functools
import math
import threading
from typing import Any

import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_gluon import _compat
from iris_gluon.interpreter.cta import running_partition
from iris_triton.interpreter.state import current


def launched_warps() -> int:
    """Warps that the launch asked for: those of a kernel outside gl.warp_specialize, and of the default partition."""
    return int(current.launch.options.get("num_warps", 4))


def num_ctas() -> int:
    """CTAs of the running program, which may be one only."""
    count = int(current.launch.options.get("num_ctas", 1))
    if count != 1:
        raise UnsupportedError(f"the CPU executor has no clusters: num_ctas must be 1, not {count}")
    return count


def warp_size() -> int:
    """Lanes of a warp; the first question decides for the rest of the launch."""
    return int(current.launch.options.setdefault("warp_size", 32))


def check_layout(layout: Any) -> None:
    """Refuse a layout that is made for another number of warps or lanes, as the compiler's verifier does."""
    lanes, warps = _count(layout, "lane", "threads_per_warp"), _count(layout, "warp", "warps_per_cta")
    if lanes is None:
        inner = layout
        while hasattr(inner, "parent"):
            inner = inner.parent
        lanes = {"NVMMADistributedLayout": 32, "AMDMFMALayout": 64, "AMDWMMALayout": 32}.get(type(inner).__name__)
    if lanes is not None:
        has = warp_size() if lanes not in (32, 64) else current.launch.options.setdefault("warp_size", lanes)
        if lanes != has:
            raise ValueError(
                f"Layout has a total of {lanes} threads per warp, but the module specifies {has} threads per warp: "
                f"{layout}.  On the CPU, the first layout of a launch decides between 32 and 64."
            )
    has = running_partition().warps
    if warps not in (None, has):
        raise ValueError(
            f"Layout has {warps} warps per CTA, but the context requires {has} warps per CTA: {layout}.  "
            "Launch the kernel with num_warps to match, or take the layout from gl.num_warps()."
        )


def _count(layout: Any, unit: str, attribute: str) -> int | None:
    """Lanes or warps that a layout is made for; None if it does not say."""
    if hasattr(layout, f"{unit}_bases"):
        return 1 << len(getattr(layout, f"{unit}_bases"))
    counts = getattr(layout, attribute, None)
    if isinstance(counts, (list, tuple)):
        return math.prod(map(int, counts))
    return _count(layout.parent, unit, attribute) if hasattr(layout, "parent") else None


# -- layouts that the compiler infers ---------------------------------------------------------------------------------
_lock = threading.Lock()


@functools.cache
def _builder(num_warps: int, warp_size: int) -> tuple[Any, Any]:
    return _compat.new_builder(num_warps, warp_size)


def result_layout(operation: str, layout: Any, shape: tuple[int, ...], *arguments: int) -> Any:
    """Return the layout of the result of "expand_dims", "join", "reshape", "split" or "trans" in the running program.

    `layout` and `shape` are the operand's; `arguments` are the axis, the new shape or the order.
    """
    if isinstance(layout, _compat.AutoLayouts):
        return layout
    if operation == "expand_dims":  # the most frequent one, and the semantic layer has looked at the axis
        return layout.parent
    return _result_layout(operation, layout, shape, arguments, _running())


@functools.cache
def _result_layout(
    operation: str, layout: Any, shape: tuple[int, ...], arguments: tuple[int, ...], size: tuple[int, int]
) -> Any:
    with _lock:
        builder, _ = _builder(*size)
        value = builder.create_poison(_compat.distributed_type(tl.int32, list(shape), layout).to_ir(builder))
        operands = {"join": [value], "reshape": [list(arguments), False], "trans": [list(arguments)]}
        made = getattr(builder, f"create_{operation}")(value, *operands.get(operation, []))
        return builder.get_gluon_layout_from_tensor(made[0] if operation == "split" else made)


@functools.cache
def memory_layout(operation: str, layout: Any, dtype: Any, shape: tuple[int, ...], arguments: tuple[int, ...]) -> Any:
    """Return the layout of a view ("reshape" or "trans", to a shape or an order) of shared memory."""
    with _lock:
        builder, _ = _builder(4, 32)
        type_ = _compat.core.shared_memory_descriptor_type(dtype, list(shape), layout, list(shape))
        memory = builder.create_local_alloc(type_.to_ir(builder))
        view = getattr(builder, f"create_memdesc_{operation}")
        return builder.get_gluon_layout_from_memdesc(view(memory, list(arguments)))


def linear_layout(layout: Any, shape: tuple[int, ...]) -> Any:
    """Return the linear layout that a layout is for a shape in the running program."""
    with _lock:
        builder, _ = _builder(*_running())
        return builder.to_linear_layout(layout._to_ir(builder), list(shape))


def _running() -> tuple[int, int]:
    return running_partition().warps, warp_size()
