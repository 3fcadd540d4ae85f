"""Shared memory: allocations, views of them, and who may access them when.

A view is a numpy view of an allocation in logical coordinates: swizzles and paddings have no meaning here.  Next to the
data lies an array of the same shape that says which elements have been written, so that reading the others is found.

Every access is checked against earlier ones that overlap: an access that is not ordered with them is a `RaceError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.cta import Partition
from iris_gluon.interpreter.errors import RaceError, UninitializedMemoryError
from iris_triton.interpreter.frontend.values import Array, numpy_dtype
from iris_triton.interpreter.state import Line, here

_POISON = 0xFF  # NaN in every floating-point type, -1 in integers
_MAX_WORK = 10_000


class SharedLayout(NamedTuple):
    """A layout of shared memory in IR; physical places have no meaning here, but are compared."""

    name: str
    arguments: str
    swizzle_nbytes: int  # of an NVMMASharedLayout whose last dimension is the contiguous one; else 0


def shared_layout(name: str, *arguments: Any) -> SharedLayout:
    """Make what the builder's function `name` returns."""
    is_swizzled = name == "get_nvmma_shared_layout" and not arguments[2]
    return SharedLayout(name.removeprefix("get_"), repr(arguments), int(arguments[0]) if is_swizzled else 0)


class BlockType(NamedTuple):
    """The IR's type of a memory descriptor, or of a tensor descriptor's boxes."""

    element: Any
    shape: tuple[int, ...]
    layout: Any


class Access(NamedTuple):
    """One access to shared memory, as long as later ones may conflict with it."""

    view: View
    write: bool
    generic: bool
    agent: Any
    time: int
    what: str
    line: Line


class Allocation:
    """One gl.allocate_shared_memory."""

    def __init__(self, type_: BlockType) -> None:
        self.line = here()
        self.name = self.line.target or f"shared memory of {self.line}"
        self.barriers: dict[int, Any] = {}  # of `hopper.mbarrier.MBarrier`
        self.accesses: list[Access] = []
        kept = numpy_dtype(type_.element)
        data = np.full(math.prod(type_.shape) * kept.itemsize, _POISON, np.uint8).view(kept).reshape(type_.shape)
        self.whole = View(self, type_.element, data, np.zeros(type_.shape, np.bool_), 0, self.name, type_.layout)


@dataclass(slots=True, eq=False)
class View:
    """Part of an allocation; stands where the compiler has a memory descriptor."""

    allocation: Allocation
    dtype: Any
    data: Array
    written: Array
    offset: int
    name: str
    layout: Any = None
    outside: str = ""  # why it must not be accessed: making such a view is harmless
    inferred: Any = None  # layout of the view that will be made of it, where the compiler has to be asked

    def _part(self, data: Array, written: Array, offset: int, name: str, layout: Any = None) -> View:
        return View(self.allocation, self.dtype, data, written, offset, name, layout, self.outside)

    def index(self, index: int) -> View:
        """One element of the first dimension; a predicate may keep one that does not exist from being accessed."""
        size = self.data.shape[0]
        if not 0 <= index < size:
            view = self.index(0)
            view.outside = f"{self.name}.index({index}) is outside [0, {size}), in {here()}"
            return view
        offset = self.offset + index * self.data.strides[0]
        return self._part(self.data[index], self.written[index], offset, f"{self.name}[{index}]", self.layout)

    def slice(self, offsets: tuple[int, ...], shape: tuple[int, ...]) -> View:
        for start, length, size in zip(offsets, shape, self.data.shape, strict=True):
            if start < 0 or length < 1 or start + length > size:
                raise IndexError(
                    f"{self.name}.slice({start}, {length}) is outside the dimension of size {size}, in {here()}"
                )
        box = tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))
        offset = self.offset + sum(n * stride for n, stride in zip(offsets, self.data.strides, strict=True))
        ranges = ", ".join(f"{s.start}:{s.stop}" for s in box)
        return self._part(self.data[box], self.written[box], offset, f"{self.name}[{ranges}]", self.layout)

    def transpose(self, order: tuple[int, ...]) -> View:
        return self._part(self.data.transpose(order), self.written.transpose(order), self.offset, self.name)

    def reshape(self, shape: tuple[int, ...]) -> View:
        data, written = self.data.reshape(shape), self.written.reshape(shape)
        if not np.may_share_memory(data, self.data):  # a copy lies elsewhere
            raise UnsupportedError(
                f"the CPU executor cannot reshape the view {self.name!r} of shape {list(self.data.shape)} to "
                f"{list(shape)} without copying it: reshape before slicing or permuting"
            )
        return self._part(data, written, self.offset, self.name)

    @property
    def end(self) -> int:
        """Return the offset of the first byte after the last element."""
        span: int = sum((n - 1) * stride for n, stride in zip(self.data.shape, self.data.strides, strict=True))
        return self.offset + span + self.data.itemsize

    @property
    def dense(self) -> bool:
        """Whether the elements are a block of neighbouring bytes, in whatever order."""
        return self.end - self.offset == self.data.nbytes

    def overlaps(self, other: View) -> bool:
        if self.end <= other.offset or other.end <= self.offset:
            return False
        if self.dense and other.dense:
            return True
        try:
            return np.shares_memory(self.data, other.data, max_work=_MAX_WORK)  # type: ignore[arg-type]  # numpy's stub knows two values
        except np.exceptions.TooHardError:
            return True

    def covers(self, other: View) -> bool:
        """Whether the other's bytes are surely among these."""
        if self.dense:
            return self.offset <= other.offset and other.end <= self.end
        mine, others = ((view.offset, view.data.shape, view.data.strides) for view in (self, other))
        return mine == others

    def put(self, data: Any) -> None:
        self.data[...] = data
        self.written[...] = True

    def get(self, doing: str) -> Array:
        """Read all elements, which must have been written."""
        if not self.written.all():
            raise UninitializedMemoryError(
                f"{here()}: {doing} reads {self.name!r}, of which {int((~self.written).sum())} of {self.written.size} "
                "elements have never been written"
            )
        return self.data.copy()

    def check_inside(self) -> None:
        """Refuse an access to a view that lies outside its allocation."""
        if self.outside:
            raise IndexError(self.outside)

    def access(self, partition: Partition, what: str, *, write: bool, generic: bool = True, agent: Any = None) -> None:
        """Check an access of a partition against the earlier ones and note it: every access passes here.

        `generic` says whether it goes the ordinary way, not through the async proxy.  The completion of `agent`, by
        default the partition itself, orders later accesses.
        """
        self.check_inside()
        seen, fenced, line = partition.clock.seen, partition.clock.fenced, here()
        accesses = self.allocation.accesses
        for earlier in accesses:
            if not (write or earlier.write) or not self.overlaps(earlier.view):
                continue
            if seen[earlier.agent] < earlier.time:
                raise self._unordered(earlier, partition, what, write, line)
            if not generic and earlier.generic and fenced[earlier.agent] < earlier.time:
                raise RaceError(
                    f"{line}: {what} of {self.name!r} goes through the async proxy, which is not ordered with the "
                    f"{earlier.what} in {earlier.line}: call fence_async_shared() after that, before the partitions "
                    "synchronise or the operation is issued"
                )
        agent = agent or partition
        self.allocation.accesses = [
            *(x for x in accesses if not (write or (x.agent is agent and not x.write)) or not self.covers(x.view)),
            Access(self, write, generic, agent, agent.next_time, what, line),
        ]

    def _unordered(self, earlier: Access, partition: Partition, what: str, write: bool, line: Line) -> RaceError:
        agent = earlier.agent
        if agent.remedy:
            does = "writing" if earlier.write else "reading"
            why = f"while the {earlier.what} that {earlier.line} issued may still be {does} it: {agent.remedy}"
        else:
            why = (
                f"which {agent.name} has {'written' if earlier.write else 'read'} in {earlier.line}, and nothing orders"
                " the two: arrive at an mbarrier there, after the access, and wait for it here"
            )
        does = "overwrites" if write else "reads"
        return RaceError(f"{line}: {what} {does} {self.name!r} in {partition.name}, {why}")
