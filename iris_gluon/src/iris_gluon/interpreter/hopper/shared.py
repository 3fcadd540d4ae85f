"""Shared memory: allocations, views of them, and who may access them when.

An allocation is an array of bytes.  A view is a typed numpy view of it in logical coordinates: swizzles and paddings
have no meaning here.  Next to the bytes lies an array of the same shape that says in which form each byte was written
(0: never), so that reading memory that nobody wrote is found, and reading it in another form (after _reinterpret) is
refused where the result would depend on the physical layout.

Every access is checked against earlier ones that overlap: an access that is not ordered with them is a `RaceError`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from iris_core.errors import UnsupportedError
from iris_gluon.interpreter.errors import RaceError, SharedMemoryError, UninitializedMemoryError
from iris_triton.interpreter.frontend.values import Array, numpy_dtype
from iris_triton.interpreter.source import Line, here

if TYPE_CHECKING:
    from iris_gluon.interpreter.cta import Partition

_POISON = 0xFF  # NaN in every floating-point type, -1 in integers
_REPEAT = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MAX_WORK = 10_000


class SharedLayout:
    """A layout of shared memory in IR; physical places have no meaning here, but are compared."""

    __slots__ = ("_hash", "arguments", "name", "text")

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Take the name of the builder's function, and its arguments."""
        self.name, self.arguments, self.text = name, arguments, repr(arguments)
        self._hash = hash((name, self.text))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedLayout) and (self.name, self.text) == (other.name, other.text)

    def __repr__(self) -> str:
        return f"{self.name.removeprefix('get_')}{self.text}"

    @property
    def swizzle_nbytes(self) -> int:
        """Width of the swizzle of an NVMMASharedLayout whose last dimension is the contiguous one; else 0."""
        if self.name != "get_nvmma_shared_layout":
            return 0
        swizzle, _, transposed, *_ = self.arguments
        return 0 if transposed else int(swizzle)


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

    def __init__(self, nbytes: int) -> None:
        self.line = here()
        self.name = self.line.target or f"shared memory of {self.line}"
        self.bytes: Array = np.full(nbytes, _POISON, np.uint8)
        self.forms: Array = np.zeros(nbytes, np.uint8)
        self.barriers: dict[int, Any] = {}  # of `hopper.mbarrier.MBarrier`
        self.accesses: list[Access] = []
        self._codes: dict[Any, int] = {}

    def _code(self, form: Any) -> int:
        """Number a form in which the bytes can be written."""
        code = self._codes.setdefault(form, len(self._codes) + 1)
        if code > 255:
            raise UnsupportedError(f"{self.name!r} is reinterpreted in more than 255 ways")
        return code

    def view(self, dtype: Any, shape: tuple[int, ...], layout: Any, start: int = 0) -> View:
        """See bytes of it as an array."""
        kept = numpy_dtype(dtype)
        end = start + math.prod(shape) * kept.itemsize
        data = self.bytes[start:end].view(kept).reshape(shape)
        forms = self.forms[start:end].view(_UNSIGNED[kept.itemsize]).reshape(shape)
        code = self._code((kept.itemsize, shape, layout))
        return View(self, dtype, data, forms, code, start, self.name, layout)


@dataclass(slots=True, eq=False)
class View:
    """Part of an allocation; stands where the compiler has a memory descriptor."""

    allocation: Allocation
    dtype: Any
    data: Array
    forms: Array
    code: int
    offset: int
    name: str
    layout: Any = None
    outside: str = ""  # why it must not be accessed: making such a view is harmless
    inferred: Any = None  # layout of the view that will be made of it, where the compiler has to be asked

    def _part(self, data: Array, forms: Array, offset: int, name: str, layout: Any = None) -> View:
        return View(self.allocation, self.dtype, data, forms, self.code, offset, name, layout, self.outside)

    # -- views of views -----------------------------------------------------------------------------------------------
    def index(self, index: int) -> View:
        """One element of the first dimension; a predicate may keep one that does not exist from being accessed."""
        size = self.data.shape[0]
        if not 0 <= index < size:
            view = self.index(0)
            view.outside = f"{self.name}.index({index}) is outside [0, {size}), in {here()}"
            return view
        offset = self.offset + index * self.data.strides[0]
        return self._part(self.data[index], self.forms[index], offset, f"{self.name}[{index}]", self.layout)

    def slice(self, offsets: list[int], shape: tuple[int, ...]) -> View:
        """A box."""
        for start, length, size in zip(offsets, shape, self.data.shape, strict=True):
            if start < 0 or length < 1 or start + length > size:
                raise IndexError(
                    f"{self.name}.slice({start}, {length}) is outside the dimension of size {size}, in {here()}"
                )
        box = tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))
        offset = self.offset + sum(n * stride for n, stride in zip(offsets, self.data.strides, strict=True))
        ranges = ", ".join(f"{s.start}:{s.stop}" for s in box)
        return self._part(self.data[box], self.forms[box], offset, f"{self.name}[{ranges}]", self.layout)

    def transpose(self, order: tuple[int, ...]) -> View:
        """The same elements with the dimensions in another order."""
        return self._part(self.data.transpose(order), self.forms.transpose(order), self.offset, self.name)

    def reshape(self, shape: tuple[int, ...]) -> View:
        """The same elements in another shape."""
        data, forms = self.data.reshape(shape), self.forms.reshape(shape)
        if not np.may_share_memory(data, self.data):  # a copy lies elsewhere
            raise UnsupportedError(
                f"the CPU executor cannot reshape the view {self.name!r} of shape {list(self.data.shape)} to "
                f"{list(shape)} without copying it: reshape before slicing or permuting"
            )
        return self._part(data, forms, self.offset, self.name)

    def reinterpret(self, dtype: Any, shape: tuple[int, ...], layout: Any) -> View:
        """The same bytes as another type or shape."""
        if not self.dense:
            raise UnsupportedError(
                f"the CPU executor reinterprets whole allocations or indexed parts, not {self.name!r}"
            )
        nbytes = math.prod(shape) * numpy_dtype(dtype).itemsize
        if nbytes > self.nbytes:
            raise SharedMemoryError(
                f"{here()}: {self.name!r} has {self.nbytes} bytes, too few for shape {list(shape)} of {dtype}"
            )
        view = self.allocation.view(dtype, shape, layout, self.offset)
        view.name, view.outside = self.name, self.outside
        return view

    # -- extent -------------------------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        return self.data.size * self.data.itemsize

    @property
    def end(self) -> int:
        """First byte behind the last element."""
        span: int = sum((n - 1) * stride for n, stride in zip(self.data.shape, self.data.strides, strict=True))
        return self.offset + span + self.data.itemsize

    @property
    def dense(self) -> bool:
        """Whether the elements are a block of neighbouring bytes, in whatever order."""
        return self.end - self.offset == self.nbytes

    def overlaps(self, other: View) -> bool:
        """Whether the two have bytes in common."""
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
        return (
            self.offset == other.offset
            and self.data.shape == other.data.shape
            and self.data.strides == other.data.strides
        )

    # -- contents -----------------------------------------------------------------------------------------------------
    def put(self, data: Any, where: Any = ...) -> None:
        """Write elements, all of them or those at an index."""
        self.data[where] = data
        self.forms[where] = self.code * _REPEAT[self.data.itemsize]

    def get(self, doing: str, where: Any = ...) -> Array:
        """Read elements, all of them or those at an index, which must have been written in this form."""
        forms = self.forms[where]
        wanted = self.code * _REPEAT[self.data.itemsize]
        wrong = forms != wanted
        if wrong.any():
            if (forms[wrong] == 0).any():
                raise UninitializedMemoryError(
                    f"{here()}: {doing} reads {self.name!r}, of which {int((forms == 0).sum())} of {forms.size} "
                    "elements have never been written"
                )
            raise UnsupportedError(
                f"{here()}: {doing} reads {self.name!r} in another type, shape or layout than it was written in; the "
                "CPU executor does not keep physical layouts: read it through the view that it was written through"
            )
        result: Array = self.data[where].copy()
        return result

    def check_inside(self) -> None:
        """Refuse an access to a view that lies outside its allocation."""
        if self.outside:
            raise IndexError(self.outside)

    # -- who may access when ------------------------------------------------------------------------------------------
    def access(self, partition: Partition, what: str, *, write: bool, generic: bool = True, agent: Any = None) -> None:
        """Check an access against the earlier ones and note it.

        Args:
            partition: who accesses, or issues the asynchronous operation that does.
            what: name of the operation, for messages.
            write: whether it writes.
            generic: whether it goes the ordinary way, not through the async proxy.
            agent: whose completion orders later accesses; the partition itself by default.

        Raises:
            IndexError: the view lies outside its allocation.
            RaceError: an earlier access is not ordered before this one.
        """
        self.check_inside()
        seen, fenced = partition.clock.seen, partition.clock.fenced
        accesses = self.allocation.accesses
        line = here()
        for earlier in accesses:
            if not (write or earlier.write) or not self.overlaps(earlier.view):
                continue
            if seen.get(earlier.agent, 0) < earlier.time:
                raise RaceError(self._unordered(earlier, partition, what, write, line))
            if not generic and earlier.generic and fenced.get(earlier.agent, 0) < earlier.time:
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

    def _unordered(self, earlier: Access, partition: Partition, what: str, write: bool, line: Line) -> str:
        text = f"{line}: {what} {'overwrites' if write else 'reads'} {self.name!r} in {partition.name}, "
        if earlier.agent.remedy:
            does = "be writing it" if earlier.write else "be reading it"
            return f"{text}while the {earlier.what} that {earlier.line} issued may still {does}: {earlier.agent.remedy}"
        does = "written" if earlier.write else "read"
        return (
            f"{text}which {earlier.agent.name} has {does} in {earlier.line}, and nothing orders the two: arrive at an "
            "mbarrier there, after the access, and wait for it here"
        )
