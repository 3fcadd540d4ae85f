"""Warpgroup matrix products: what they multiply, and results that are there only after a wait."""

from typing import Any

from iris_gluon import _compat
from iris_gluon.interpreter.cta import Queue, running_partition
from iris_gluon.interpreter.errors import RaceError
from iris_triton.interpreter.frontend.values import Array, Handle
from iris_triton.interpreter.state import here

_layouts = _compat.layouts
_SUMS = {  # types of operands, and of the sums that the instruction makes of them; see PTX, wgmma.mma_async
    "fp16": ("fp16", "fp32"), "bf16": ("fp32",), "fp32": ("fp32",), "fp8e4nv": ("fp16", "fp32"),
    "fp8e5": ("fp16", "fp32"), "int8": ("int32",), "uint8": ("int32",),
}  # fmt: skip


class Accumulator(Handle):
    """The result of a product that may be under way; only another product may take it before it is complete."""

    __slots__ = ("_line", "_queue", "_time", "value")

    def __init__(self, value: Array, dtype: Any, queue: Queue, time: int) -> None:
        self.value, self.dtype = value, dtype
        self._queue, self._time, self._line = queue, time, here()

    @property
    def data(self) -> Array:  # type: ignore[override]  # an attribute of other handles
        if running_partition().clock.seen[self._queue] < self._time:
            raise RaceError(
                f"{here()}: the result of warpgroup_mma in {self._line} is used while the product may be under way: "
                "call warpgroup_mma_wait(0, deps=...) first"
            )
        return self.value


def check_operands(a: Any, b: Any, accumulator: Any) -> None:
    """Refuse what wgmma cannot multiply (ValueError): the compiler overlooks some of it, or ends the process.

    `a` may be a tensor, `accumulator` a warpgroup_mma_accumulator.
    """
    type_ = getattr(accumulator.type, "tensor_type", accumulator.type)
    layout, bits = type_.layout, a.dtype.primitive_bitwidth
    (m, k), (k_b, n) = ([int(size) for size in operand.shape] for operand in (a, b))
    problem = ""
    if not isinstance(layout, _layouts.NVMMADistributedLayout) or list(layout.version) != [3, 0]:
        problem = f"the accumulator must have an NVMMADistributedLayout of version [3, 0], not {layout}"
    elif (warps := running_partition().warps) % 4:
        problem = f"the partition has {warps} warps; a warpgroup is 4, so give it a multiple of that"
    elif not _in_shared_memory(b) or not (_in_shared_memory(a) or isinstance(a.type.layout, _layouts.DotOperandLayout)):
        problem = "b must be in shared memory with an NVMMASharedLayout, a there or have a DotOperandLayout"
    elif a.dtype != b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        problem = f"a is {a.dtype} and b is {b.dtype}"
    elif str(type_.scalar) not in _SUMS.get(str(a.dtype), ()):
        problem = f"there is no wgmma that sums products of {a.dtype} in {type_.scalar}"
    elif k != k_b or [m, n] != [int(size) for size in type_.shape]:
        problem = f"a of {[m, k]} and b of {[k_b, n]} do not make an accumulator of {[*type_.shape]}"
    else:
        rows, columns, depth = layout.instr_shape
        if rows != 16 or depth * bits != 256 or m % 64 or n % columns or k % depth:
            problem = f"no instruction {[rows, columns, depth]} multiplies {[m, k]} and {[k_b, n]} of {bits} bits"
        elif bits != 16 and (not b.layout.transposed or (_in_shared_memory(a) and a.layout.transposed)):
            problem = (
                f"with operands of type {a.dtype} the inner dimension of both must be the contiguous one; store b as "
                "[N, K] and use its .permute([1, 0])"
            )
    if problem:
        raise ValueError(f"{here()}: warpgroup_mma: {problem}")


def _in_shared_memory(operand: Any) -> bool:
    shared = isinstance(operand, _compat.core.shared_memory_descriptor)
    return shared and isinstance(operand.layout, _layouts.NVMMASharedLayout)
