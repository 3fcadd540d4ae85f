"""Tensor descriptors, and the boxes of global memory that TMA copies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iris_triton.interpreter.frontend.values import Array, numpy_dtype
from iris_triton.interpreter.source import here
from iris_triton.interpreter.state import current

if TYPE_CHECKING:
    from iris_gluon.interpreter.hopper.shared import View

_NAN = {2: 0x7FC0, 1: 0x7F}
"""NaN as a bit pattern where numpy has no such type (bfloat16, fp8)."""

_UNIT = 16
"""Bytes of which addresses and strides must be multiples; see cuTensorMapEncodeTiled in the CUDA driver's manual."""

_MAX_STRIDE = 1 << 40


class DescriptorType(NamedTuple):
    """The IR's type of a descriptor: its boxes."""

    element: Any
    block: tuple[int, ...]
    layout: Any


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A tensor in global memory, and the shape of the boxes that are copied.

    `pointer` is the address of its first element; `strides` are in elements, the last one is 1; `layout` is that of
    boxes in shared memory; `nan`: elements outside the tensor read as NaN instead of 0.
    """

    pointer: int
    dtype: Any
    shape: list[int]
    strides: list[int]
    block: tuple[int, ...]
    layout: Any
    nan: bool

    def check_rules(self, where: str) -> None:
        """Refuse a start, a stride or a width of boxes that TMA does not have; `where` begins the message.

        Boxes of more than 256 elements along a dimension, or wider than the swizzle, are fine: the compiler copies them
        in several parts.
        """
        itemsize = numpy_dtype(self.dtype).itemsize
        if self.pointer % _UNIT:
            raise ValueError(
                f"{where}: TMA needs a tensor that begins at a multiple of {_UNIT} bytes: {self.pointer:#x} is "
                f"{self.pointer % _UNIT} bytes behind one"
            )
        for axis, stride in enumerate(self.strides[:-1]):
            if stride * itemsize % _UNIT or not 0 <= stride * itemsize < _MAX_STRIDE:
                raise ValueError(
                    f"{where}: TMA needs strides of multiples of {_UNIT} bytes below 2**40, except for the last one: "
                    f"stride {axis} is {stride} elements, {stride * itemsize} bytes"
                )
        width = self.block[-1] * itemsize
        if width < self.layout.swizzle_nbytes:
            raise ValueError(
                f"{where}: block shape along the contiguous dimension {len(self.block) - 1} is too small for the "
                f"swizzle byte size {self.layout.swizzle_nbytes}: {self.block[-1]} elements are {width} bytes"
            )

    def check(self, view: View, doing: str) -> None:
        """Refuse shared memory that does not fit the boxes."""
        if view.data.shape != self.block or view.dtype != self.dtype:
            raise ValueError(
                f"{here()}: {doing} needs shared memory like the descriptor's boxes: it has shape "
                f"{list(view.data.shape)} of {view.dtype}, they have {list(self.block)} of {self.dtype}"
            )
        if view.layout is not None and view.layout != self.layout:
            raise ValueError(
                f"{here()}: {doing} needs shared memory with the descriptor's layout: {view.name!r} has {view.layout}, "
                f"the descriptor has {self.layout}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of a box."""
        return math.prod(self.block) * numpy_dtype(self.dtype).itemsize


class Box:
    """The part of a box that lies inside the tensor."""

    def __init__(self, descriptor: Descriptor, coordinates: list[int]) -> None:
        if len(coordinates) != len(descriptor.block):
            raise ValueError(
                f"{here()}: {len(coordinates)} coordinates for boxes of {len(descriptor.block)} dimensions"
            )
        self._descriptor = descriptor
        self._low = [max(c, 0) for c in coordinates]
        high = [min(c + n, size) for c, n, size in zip(coordinates, descriptor.block, descriptor.shape, strict=True)]
        self._extent = tuple(max(h - low, 0) for low, h in zip(self._low, high, strict=True))
        self.inside = tuple(
            slice(low - c, low - c + n) for low, c, n in zip(self._low, coordinates, self._extent, strict=True)
        )
        """Where it is in the box."""

    @property
    def empty(self) -> bool:
        return 0 in self._extent

    def _memory(self, builder: Any, doing: str) -> Array | None:
        """The part as an array over global memory, which must be accessible; None if it cannot be seen as one."""
        descriptor = self._descriptor
        kept = numpy_dtype(descriptor.dtype)
        strides = [n * kept.itemsize for n in descriptor.strides]
        start = descriptor.pointer + sum(low * n for low, n in zip(self._low, strides, strict=True))
        end = start + sum((n - 1) * stride for n, stride in zip(self._extent, strides, strict=True)) + kept.itemsize
        region = current.launch.checker.find(start, end)
        if region is None or (start - region.start) % kept.itemsize:
            builder.range_of(self._addresses(), None, kept.itemsize, doing)
            return None
        elements = region.view(kept)[(start - region.start) // kept.itemsize :]
        return np.lib.stride_tricks.as_strided(elements, self._extent, strides)

    def _addresses(self) -> Array:
        descriptor = self._descriptor
        itemsize = numpy_dtype(descriptor.dtype).itemsize
        offsets = np.zeros(self._extent, np.int64)
        for axis, (low, n, stride) in enumerate(zip(self._low, self._extent, descriptor.strides, strict=True)):
            along = (low + np.arange(n, dtype=np.int64)) * (stride * itemsize)
            offsets += along.reshape([-1 if k == axis else 1 for k in range(len(self._extent))])
        return np.uint64(descriptor.pointer) + offsets.view(np.uint64)

    def read(self, builder: Any) -> Array:
        """The whole box; what lies outside the tensor is 0 or NaN."""
        descriptor = self._descriptor
        kept = numpy_dtype(descriptor.dtype)
        result = np.zeros(descriptor.block, kept)
        if descriptor.nan:
            result[...] = np.nan if kept.kind == "f" else _NAN[kept.itemsize]
        if not self.empty:
            memory = self._memory(builder, "TMA load")
            result[self.inside] = builder.load(self._addresses(), None, None, kept) if memory is None else memory
        return result

    def write(self, builder: Any, data: Array) -> None:
        """Store the part of a box that lies inside the tensor."""
        if self.empty:
            return
        memory = self._memory(builder, "TMA store")
        if memory is None:
            builder.store(self._addresses(), None, np.ascontiguousarray(data[self.inside]))
        else:
            memory[...] = data[self.inside]
            current.program.scheduler.idle_polls = 0

    def check_writable(self, builder: Any) -> None:
        """Refuse a store to memory that is not accessible before it is under way."""
        if not self.empty:
            self._memory(builder, "TMA store")

    def reduce(self, builder: Any, op: Any, data: Array) -> None:
        """Combine the part of a box that lies inside the tensor with global memory, atomically per element."""
        if not self.empty:
            inside = np.ascontiguousarray(data[self.inside])
            builder.reduce(op, self._addresses(), inside, self._descriptor.dtype)
