"""Warpgroup matrix products: their operands' layouts, and results that are there only after a wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from iris_gluon import _compat
from iris_gluon.interpreter.cta import Partition
from iris_gluon.interpreter.errors import RaceError
from iris_triton.interpreter.frontend.values import Array, Handle
from iris_triton.interpreter.source import here
from iris_triton.interpreter.state import current

if TYPE_CHECKING:
    from iris_gluon.interpreter.clocks import Queue

_layouts = _compat.layouts
_WARPGROUP = 4
_ROWS = 64
SUMS = {
    "fp16": ("fp16", "fp32"), "bf16": ("fp32",), "fp32": ("fp32",), "fp8e4nv": ("fp16", "fp32"),
    "fp8e5": ("fp16", "fp32"), "int8": ("int32",), "uint8": ("int32",),
}  # fmt: skip
"""Types of operands, and of the sums that the instruction makes of them; see PTX, wgmma.mma_async."""


class Accumulator(Handle):
    """The result of a product that may be under way; only another product may take it before it is complete."""

    __slots__ = ("_line", "_queue", "_time", "value")

    def __init__(self, value: Array, dtype: Any, queue: Queue, time: int) -> None:
        self.value, self.dtype = value, dtype
        self._queue, self._time, self._line = queue, time, here()

    @property
    def data(self) -> Array:  # type: ignore[override]  # an attribute of other handles
        program = current.program
        assert isinstance(program, Partition)
        if program.clock.seen.get(self._queue, 0) < self._time:
            raise RaceError(
                f"{here()}: the result of warpgroup_mma in {self._line} is used while the product may be under way: "
                "call warpgroup_mma_wait(0, deps=...) first"
            )
        return self.value


def raw(handle: Handle) -> Handle:
    """An accumulator as the next product takes it: complete or not."""
    return Handle(handle.value, handle.dtype) if isinstance(handle, Accumulator) else handle


def check_operands(a: Any, b: Any, accumulator: Any, warps: int) -> None:
    """Refuse layouts, shapes and types that wgmma cannot multiply (ValueError), mostly in the compiler's words.

    `a` may be a tensor, `accumulator` a warpgroup_mma_accumulator; `warps` are those of the partition.
    """
    type_ = getattr(accumulator.type, "tensor_type", accumulator.type)
    layout = getattr(type_, "layout", None)
    if not isinstance(layout, _layouts.NVMMADistributedLayout) or list(layout.version) != [3, 0]:
        raise _bad(f"the accumulator must have an NVMMADistributedLayout of version [3, 0], not {layout}")
    if warps % _WARPGROUP:
        raise _bad(f"the partition has {warps} warps; a warpgroup is {_WARPGROUP}, so give it a multiple of that")
    for name, operand in (("a", a), ("b", b)):
        if isinstance(operand, _compat.core.shared_memory_descriptor):
            if not isinstance(operand.layout, _layouts.NVMMASharedLayout):
                raise _bad(f"unexpected operand layout for NvidiaMmaEncodingAttr v3: {name} has {operand.layout}")
        elif name == "b":
            raise _bad("b must be in shared memory")
        else:
            found = operand.type.layout
            if not isinstance(found, _layouts.DotOperandLayout) or found.operand_index or found.parent != layout:
                raise _bad(
                    "unexpected operand layout for NvidiaMmaEncodingAttr v3: a in registers must have a "
                    f"DotOperandLayout(0, parent=the accumulator's), not {found}",
                )
    if a.dtype != b.dtype and not (a.dtype.is_fp8() and b.dtype.is_fp8()):
        raise _bad(f"a is {a.dtype} and b is {b.dtype}")
    sums = SUMS.get(str(a.dtype))
    if sums is None:
        raise _bad(f"there is no wgmma for operands of type {a.dtype}")
    if str(type_.scalar) not in sums:
        raise _bad(f"the accumulator for {a.dtype} must be {' or '.join(sums)}, not {type_.scalar}")
    (m, k), (k_b, n), shape = _shape(a), _shape(b), _shape(type_)
    if k != k_b:
        raise _bad(
            "expected the last dimension of the first operand to be equal to the second-to-last dimension of the "
            f"second operand, got {k} and {k_b}",
        )
    if shape != (m, n):
        raise _bad(
            "expected the output shape to be the concatenation of the last dimension of the first operand and the last "
            f"dimension of the second, got {list(shape)} for {[m, n]}",
        )
    _check_instruction(list(layout.instr_shape), (m, n, k), a.dtype.primitive_bitwidth)
    if a.dtype.primitive_bitwidth != 16:
        for name, operand, wanted in (("a", a, False), ("b", b, True)):
            if isinstance(operand, _compat.core.shared_memory_descriptor) and operand.layout.transposed != wanted:
                raise _bad(
                    f"with operands of type {a.dtype} the inner dimension of both must be the contiguous one: {name} "
                    f"has {operand.layout}" + ("; store it as [N, K] and use its .permute([1, 0])" if wanted else ""),
                )


def _check_instruction(instruction: list[int], shape: tuple[int, int, int], bits: int) -> None:
    m, n, k = shape
    rows, columns, depth = instruction if len(instruction) == 3 else (0, 0, 0)
    if rows != 16 or depth * bits != 256 or not 8 <= columns <= 256 or columns & (columns - 1):
        raise _bad(
            f"instr_shape must be [16, 8 to 256 and a power of 2, {256 // bits}] for operands of {bits} bits, not "
            f"{instruction}",
        )
    if m % _ROWS:
        raise _bad(f"a and the accumulator need a multiple of {_ROWS} rows, which a warpgroup shares, not {m}")
    if n % columns:
        raise _bad(f"the instruction has {columns} columns (instr_shape {instruction}), b has {n}")
    if k % depth:
        raise _bad(f"the instruction's inner dimension is {depth} for operands of {bits} bits, that of a is {k}")


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(int(getattr(n, "value", n)) for n in value.shape)


def _bad(problem: str) -> ValueError:
    return ValueError(f"{here()}: warpgroup_mma: {problem}")
