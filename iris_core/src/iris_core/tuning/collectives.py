"""Collectives on this machine, for a table from which `ctx.ccl` chooses: which sizes, and data that is checked.

Results can be told element by element.  The elements are integers from -3 to 3, so sums over some ranks are exact in
every type that collectives reduce and that has negative numbers.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.config import Config
from iris_core.dispatch.tables import ANY_DTYPE
from iris_core.errors import ArgumentError
from iris_core.tuning.tuner import Tuned, Tuner, check_names, tuner_of_this_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from iris_core.api import Iris
    from iris_core.bench import RunOptions
    from iris_core.dispatch.choice import Explanation
    from iris_core.dispatch.tables import Entry

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
"""Operations that have samples; those with a root have rank 0."""

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


# -- measuring --------------------------------------------------------------------------------------------------------
DTYPES = ("bfloat16", "float16", "float32", "float64", "int8", "int32", "int64")
"""Element types that can be measured: they can hold the samples."""


@dataclass(frozen=True)
class TuneOptions:
    """What to measure; the same on every rank.

    Attributes:
        ops: operations; those with a single algorithm need no measuring and are passed over.
        dtypes: element types; what is found for the first one also counts for all that are not named.
        min_nbytes, max_nbytes: sizes of the full buffer (a gather's output, a scatter's input).
        factor: from one size to the next.

    Raises:
        ArgumentError: something cannot be measured.
    """

    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = ("bfloat16",)
    min_nbytes: int = 1 << 10
    max_nbytes: int = 1 << 30
    factor: int = 2

    def __post_init__(self) -> None:
        check_names("operation", self.ops, OPS)
        check_names("element type", self.dtypes, DTYPES)
        if not 0 < self.min_nbytes <= self.max_nbytes:
            raise ArgumentError(f"sizes from {self.min_nbytes} to {self.max_nbytes} bytes are none")
        if self.factor < 2:
            raise ArgumentError(f"the factor between sizes must be 2 or more, not {self.factor}")

    @property
    def sizes(self) -> list[int]:
        """Bytes of the full buffers, growing."""
        steps = int(math.log(self.max_nbytes / self.min_nbytes, self.factor) + 1e-9)
        return [self.min_nbytes * self.factor**step for step in range(steps + 1)]


def tune_on_this_rank(wanted: TuneOptions, options: RunOptions) -> Tuned:
    """Measure, as one of the ranks.

    Collective: every rank of the world calls it with the same arguments.

    Args:
        wanted: what to measure.
        options: ranks, plugins, heap and rounds; its axes are not looked at.  When its limit is reached, what is left
            is passed over.

    Raises:
        ArgumentError: the heap is too small for the largest size.
        DeviceTimeoutError: an algorithm did not end.
    """
    with tuner_of_this_rank(options) as tuner:
        largest, heap = wanted.sizes[-1], tuner.ctx.heap_size
        if 2 * largest + tuner.ctx.num_ranks * 4096 > heap:
            raise ArgumentError(f"two buffers of {largest} bytes do not fit into a heap of {heap}")
        entries: list[Entry] = []
        for op in wanted.ops:
            for number, name in enumerate(wanted.dtypes):
                found = _tune(tuner, wanted, op, getattr(torch, name))
                entries += (dataclasses.replace(e, dtype=name if number else ANY_DTYPE) for e in found)
        return tuner.found(entries)


def _tune(tuner: Tuner, wanted: TuneOptions, op: str, dtype: torch.dtype) -> Iterator[Entry]:
    """Measure an operation at all sizes."""
    ctx = tuner.ctx
    samples = [Sample.of_bytes(op, dtype, ctx.cur_rank, ctx.num_ranks, nbytes) for nbytes in wanted.sizes]
    # the largest one first: memory that algorithms share is never given back, and would be there several times
    for sample in sorted({sample.length: sample for sample in samples}.values(), key=lambda each: -each.length):
        entries = tuner.best_launches(_Size(sample))
        if entries is None:
            return
        yield from entries


@dataclass(frozen=True)
class _Size:
    """A point: one collective at one size."""

    sample: Sample

    @property
    def op(self) -> str:
        return self.sample.op

    @property
    def where(self) -> str:
        return f"{self.sample.nbytes} bytes"

    def call(self, ctx: Iris) -> _Call:
        return _Call(ctx, self.sample)


class _Call:
    """One collective with its tensors."""

    def __init__(self, ctx: Iris, sample: Sample) -> None:
        self._ccl, self._sample = ctx.ccl, sample
        self._out, inp = sample.tensors(ctx)
        self._tensors = sample.arguments(self._out, inp)

    def explain(self) -> Explanation:
        return self._ccl.explain(self._sample.op, *self._tensors)

    def run(self, algorithm: str | None = None, fields: Mapping[str, Any] | None = None) -> object:
        config = None if algorithm is None else Config(algorithm=algorithm, **(fields or {}))
        return getattr(self._ccl, self._sample.op)(*self._tensors, config=config)

    def is_right(self) -> bool:
        return self._sample.is_right(self._out)

    def spoil(self) -> None:
        if self._out is not None:
            self._out.fill_(SPOILED)
