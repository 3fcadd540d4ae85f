"""Sizes and verified data for measuring collectives, for the tables from which `ctx.ccl` chooses.

Every element of a result is known in advance.  Inputs are integers from -3 to 3, so sums over some ranks are exact in
every type that collectives reduce and that has negative numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from iris_core.dispatch.config import Config
from iris_core.dispatch.requests import OPS as ALL_OPS
from iris_core.dispatch.requests import POINT_TO_POINT, REDUCING
from iris_core.dispatch.tables import ANY_DTYPE
from iris_core.errors import ArgumentError
from iris_core.tuning.tuner import Point, check_names

if TYPE_CHECKING:
    from collections.abc import Iterator

    from iris_core.api import Iris

OPS = tuple(op for op in ALL_OPS if op not in POINT_TO_POINT)
"""Operations that have samples; those with a root have rank 0."""

DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int32", "int64")
"""Element types that can be measured: they can hold the samples."""

SPOILED = 101
"""No element of any input or result, and exact in every type."""

_PARTS_OUT = ("all_gather", "all_to_all", "gather")  # outputs with a part from each
_PARTS_IN = ("reduce_scatter", "all_to_all", "scatter")  # inputs with a part for each
_UNIT_NBYTES = 16
_PERIOD = 7 << 9  # elements after which an input repeats itself


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation at one size, as one of `size` ranks sees it.

    `length` is in elements of the full buffer: of the operation's input or output, whichever is larger.
    """

    op: str
    dtype: torch.dtype
    rank: int
    size: int
    length: int

    options: ClassVar[dict[str, Any]] = {}
    spoiled: ClassVar = SPOILED

    @classmethod
    def of_bytes(cls, op: str, dtype: torch.dtype, rank: int, size: int, nbytes: int) -> Sample:
        """Make a sample whose full buffer has about `nbytes` bytes: whole multiples of 16 for each rank."""
        unit = _UNIT_NBYTES // dtype.itemsize
        return cls(op, dtype, rank, size, max(unit, nbytes // dtype.itemsize // size // unit * unit) * size)

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.length * self.dtype.itemsize

    @property
    def heap_nbytes(self) -> int:
        """A size of heap that every algorithm fits into."""
        # two buffers; workspaces lie between them and stay, so twice that, for room in one piece
        return 4 * self.nbytes + (256 << 20)

    def tensors(self, ctx: Iris) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Allocate (output, input) on the heap, the input filled; None where this rank has none.  A symmetric call."""
        is_part = self.op in ("reduce_scatter", "scatter"), self.op in ("all_gather", "gather")
        sizes = (self.length // self.size if part else self.length for part in is_part)
        out, inp = (ctx.empty(size, dtype=self.dtype, device=ctx.device) for size in sizes)
        inp.copy_(self._elements(self.rank, 0, inp.numel(), inp.device))
        has_out = self.op not in ("reduce", "gather") if self.rank else self.op != "broadcast"
        has_in = not self.rank or self.op not in ("broadcast", "scatter")
        return (out if has_out else None), (inp if has_in else None)

    def is_right(self, out: torch.Tensor | None) -> bool:
        """Whether every element of this rank's output is what it must be; true where it has none."""
        if out is None:
            return True
        part = self.length // self.size
        begin = self.rank * part if self.op in _PARTS_IN else 0
        if self.op in _PARTS_OUT:
            parts = enumerate(out.chunk(self.size))
            return all(torch.equal(found, self._elements(rank, begin, part, out.device)) for rank, found in parts)
        wanted = self._elements(0, begin, out.numel(), out.device)
        for rank in range(1, self.size if self.op in REDUCING else 1):
            wanted += self._elements(rank, begin, out.numel(), out.device)
        return torch.equal(out, wanted)

    def _elements(self, rank: int, begin: int, count: int, device: torch.device) -> torch.Tensor:
        index = torch.arange(_PERIOD, device=device)
        elements = ((index * 5 + (index >> 9) + 3 * rank) % 7 - 3).to(self.dtype).roll(-(begin % _PERIOD))
        return elements.repeat(-(-count // _PERIOD))[:count]


@dataclass(frozen=True)
class TuneOptions:
    """Collectives to measure, the same on every rank; ArgumentError if they are impossible.

    Times of the first element type also count for all types that are not named.  Sizes are those of the full buffer
    (a gather's output, a scatter's input), each twice the one before.
    """

    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = ("bfloat16",)
    min_nbytes: int = 1 << 10
    max_nbytes: int = 1 << 30

    def __post_init__(self) -> None:
        check_names("operation", self.ops, OPS)
        check_names("element type", self.dtypes, DTYPES)
        if not 0 < self.min_nbytes <= self.max_nbytes:
            raise ArgumentError(f"sizes from {self.min_nbytes} to {self.max_nbytes} bytes are none")

    def points(self, rank: int, size: int) -> Iterator[Point]:
        """Return what is measured, as one of `size` ranks sees it.

        The largest size comes first: memory that algorithms share is never given back.
        """
        doublings = (self.max_nbytes // self.min_nbytes).bit_length()
        sizes = [self.min_nbytes << each for each in reversed(range(doublings))]
        for op in self.ops:
            for number, name in enumerate(self.dtypes):
                samples = (Sample.of_bytes(op, getattr(torch, name), rank, size, nbytes) for nbytes in sizes)
                for sample in dict.fromkeys(samples):
                    yield Point(sample, Config(), f"{sample.nbytes} bytes", name if number else ANY_DTYPE)
