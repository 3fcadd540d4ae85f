"""Inputs of collectives whose results can be told element by element, for measuring on data that is checked.

The elements are integers from -3 to 3, so sums over some ranks are exact in every type that collectives reduce and that
has negative numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from iris_core import Iris

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
"""Operations that have samples; those with a root have rank 0."""

MAX_RANKS = 40
"""Sums over more could be inexact in bfloat16, and too large for int8."""

SPOILED = 101
"""No element of any input or result, and exact in every type."""

_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_PARTS_OUT = ("all_gather", "all_to_all", "gather")  # outputs with a part from each
_PARTS_IN = ("reduce_scatter", "all_to_all", "scatter")  # inputs with a part for each
_ROOT_OUT, _ROOT_IN = ("reduce", "gather"), ("broadcast", "scatter")
_UNIT_NBYTES = 16
_CHECKED_AT_ONCE = 1 << 24  # elements


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation at one size, as one rank sees it.

    Attributes:
        op: one of OPS.
        dtype: of the elements.
        rank: this rank.
        size: number of ranks.
        length: elements of the full buffer: of the operation's input or output, whichever is larger.
    """

    op: str
    dtype: torch.dtype
    rank: int
    size: int
    length: int

    @classmethod
    def of_bytes(cls, op: str, dtype: torch.dtype, rank: int, size: int, nbytes: int) -> Sample:
        """Make a sample whose full buffer has about so many bytes: whole multiples of 16 for each rank."""
        unit = _UNIT_NBYTES // dtype.itemsize
        return cls(op, dtype, rank, size, max(unit, nbytes // dtype.itemsize // size // unit * unit) * size)

    @property
    def part(self) -> int:
        """Elements of a rank's part of the full buffer."""
        return self.length // self.size

    @property
    def nbytes(self) -> int:
        """Bytes of the full buffer."""
        return self.length * self.dtype.itemsize

    @property
    def looked_up_nbytes(self) -> int:
        """Bytes by which the tables know such a call (`iris_core.dispatch.tables.size_of`)."""
        shared = self.op in ("all_gather", "gather", "scatter")
        return (self.part if shared else self.length) * self.dtype.itemsize

    def tensors(self, ctx: Iris) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Allocate (output, input) on the heap, the input filled; None where this rank has none.  A symmetric call."""
        whole, part = self.length, self.part
        sizes = (
            part if self.op in ("reduce_scatter", "scatter") else whole,
            part if self.op in ("all_gather", "gather") else whole,
        )
        out, inp = (ctx.empty(size, dtype=self.dtype, device=ctx.device) for size in sizes)
        self.fill(inp)
        is_source = self.op == "broadcast" and self.rank == 0
        has_out = not is_source and (self.op not in _ROOT_OUT or self.rank == 0)
        has_in = self.op not in _ROOT_IN or self.rank == 0
        return (out if has_out else None), (inp if has_in else None)

    def arguments(self, out: torch.Tensor | None, inp: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors as the operation of `ctx.ccl` takes them."""
        return (out if inp is None else inp,) if self.op == "broadcast" else (out, inp)

    def fill(self, inp: torch.Tensor) -> None:
        """Make this rank's input."""
        for begin in range(0, inp.numel(), _CHECKED_AT_ONCE):
            part = inp[begin : begin + _CHECKED_AT_ONCE]
            part.copy_(self._elements(self.rank, begin, part.numel(), inp.device))

    def is_right(self, out: torch.Tensor | None) -> bool:
        """Whether every element of this rank's output is what it must be; true where it has none."""
        for begin in range(0, 0 if out is None else out.numel(), _CHECKED_AT_ONCE):
            assert out is not None
            found = out[begin : begin + _CHECKED_AT_ONCE]
            if not self._is_right(found, begin):
                return False
        return True

    def _is_right(self, found: torch.Tensor, begin: int) -> bool:
        """Whether a piece of the output, from an element on, is right."""
        count, device = found.numel(), found.device
        skipped = self.rank * self.part if self.op in _PARTS_IN else 0
        if self.op in _PARTS_OUT:
            for source in range(self.size):
                low, high = max(begin, source * self.part), min(begin + count, (source + 1) * self.part)
                if low < high:
                    wanted = self._elements(source, low - source * self.part + skipped, high - low, device)
                    if not torch.equal(found[low - begin : high - begin], wanted):
                        return False
            return True
        wanted = torch.zeros(count, dtype=self.dtype, device=device)
        for source in range(self.size if self.op in _REDUCING else 1):
            wanted += self._elements(source, begin + skipped, count, device)
        return torch.equal(found, wanted)

    def _elements(self, rank: int, begin: int, count: int, device: torch.device) -> torch.Tensor:
        """Elements of a rank's input."""
        index = torch.arange(begin, begin + count, device=device)
        return ((index * 5 + (index >> 9) + 3 * rank) % 7 - 3).to(self.dtype)
