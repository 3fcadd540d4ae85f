"""Tensor descriptors, and the boxes of global memory that TMA copies."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from iris_gluon.interpreter.hopper.shared import BlockType, View
from iris_triton.interpreter.frontend.values import Array, numpy_dtype
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.state import here

_NAN = {2: 0x7FC0, 1: 0x7F}  # as a bit pattern where numpy has no such type (bfloat16, fp8)
_UNIT = 16  # bytes of which addresses and strides are multiples: cuTensorMapEncodeTiled, CUDA driver's manual
_MAX_STRIDE = 1 << 40


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A tensor in global memory, and the boxes of it that are copied."""

    pointer: int  # address of the first element
    shape: list[int]
    strides: list[int]  # in elements; the last one is 1
    box: BlockType  # with the layout of boxes in shared memory
    nan: bool  # whether elements outside the tensor read as NaN instead of 0

    @property
    def _dtype(self) -> np.dtype[Any]:
        return numpy_dtype(self.box.element)

    @property
    def nbytes(self) -> int:
        """Bytes of a box."""
        return math.prod(self.box.shape) * self._dtype.itemsize

    def check_rules(self, where: str) -> None:
        """Refuse a start, a stride or a width of boxes that TMA does not have; `where` begins the message.

        Boxes of more than 256 elements along a dimension, or wider than the swizzle, are fine: the compiler copies them
        in several parts.
        """
        itemsize, block, swizzle = self._dtype.itemsize, self.box.shape, self.box.layout.swizzle_nbytes
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
        if block[-1] * itemsize < swizzle:
            raise ValueError(
                f"{where}: block shape along the contiguous dimension {len(block) - 1} is too small for the swizzle "
                f"byte size {swizzle}: {block[-1]} elements are {block[-1] * itemsize} bytes"
            )

    def check(self, view: View, doing: str) -> None:
        """Refuse shared memory that does not fit the boxes."""
        if (view.dtype, view.data.shape) != self.box[:2]:
            raise ValueError(
                f"{here()}: {doing} needs shared memory like the descriptor's boxes: it has shape "
                f"{list(view.data.shape)} of {view.dtype}, they have {list(self.box.shape)} of {self.box.element}"
            )
        if view.layout is not None and view.layout != self.box.layout:
            raise ValueError(
                f"{here()}: {doing} needs shared memory with the descriptor's layout: {view.name!r} has {view.layout}, "
                f"the descriptor has {self.box.layout}"
            )

    def locate(self, coordinates: list[int]) -> tuple[tuple[slice, ...], Array]:
        """Return which part of a box lies inside the tensor, and the addresses of its elements."""
        inside = []
        addresses = np.array(self.pointer, np.uint64)
        for at, length, size, stride in zip(coordinates, self.box.shape, self.shape, self.strides, strict=True):
            low = max(at, 0)
            high = max(low, min(at + length, size))
            inside.append(slice(low - at, high - at))
            along = np.arange(low, high, dtype=np.int64) * (stride * self._dtype.itemsize)
            addresses = np.add.outer(addresses, along.view(np.uint64))
        return tuple(inside), addresses

    def read(self, coordinates: list[int]) -> Array:
        """Return a box; what lies outside the tensor is 0 or NaN."""
        kept = self._dtype
        result = np.zeros(self.box.shape, kept)
        if self.nan:
            result[...] = np.nan if kept.kind == "f" else _NAN[kept.itemsize]
        inside, addresses = self.locate(coordinates)
        if addresses.size:
            result[inside] = accesses.load(addresses, None, None, kept, access="TMA load")
        return result
