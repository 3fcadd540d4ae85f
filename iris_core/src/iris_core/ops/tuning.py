"""Measuring the algorithms of `ctx.ops` on this machine, for a table from which it chooses.

The points are shapes; `iris_core.dispatch.tune` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from iris_core.ccl.tuning import check_names
from iris_core.dispatch.tune import Series, Tuned, tuner_of_this_rank
from iris_core.errors import ArgumentError
from iris_core.ops.calls import FP8, OPS, PLAIN
from iris_core.ops.config import FusedConfig
from iris_core.ops.samples import KINDS, SPOILED, FusedSample
from iris_core.ops.tables import TF32, Measured

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from iris_core import Iris
    from iris_core.bench import RunOptions
    from iris_core.dispatch.choice import Explanation

DTYPES = (*PLAIN, TF32, *FP8)
"""Element types that can be measured; "tf32" is float32 where TF32 is allowed."""

LAYERS = tuple((m, n, k) for n, k in ((28672, 8192), (14336, 4096), (11008, 4096)) for m in (8192, 2048, 512))
"""Rows, and weights (N, K) of large language models, that are measured where nobody says what."""


@dataclass(frozen=True)
class FusedTuneOptions:
    """What to measure; the same on every rank.

    Attributes:
        ops: operations of `ctx.ops`; those that gather are measured with both values of gather_dim.
        dtypes: element types, of DTYPES.
        layers: (M, N, K): M rows, a weight of N x K divided among the ranks; see `FusedSample.of_layer`.

    Raises:
        ArgumentError: something cannot be measured.
    """

    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = ("bfloat16",)
    layers: tuple[tuple[int, int, int], ...] = LAYERS

    def __post_init__(self) -> None:
        check_names("operation", self.ops, OPS)
        check_names("element type", self.dtypes, DTYPES)
        if not self.layers or min(min(each) for each in self.layers) < 1:
            raise ArgumentError(f"layers must be given, of positive sizes, not {self.layers}")

    def samples(self, rank: int, size: int) -> list[tuple[str, FusedSample]]:
        """Return (name of the element type, sample) of everything that is to be measured.

        The largest ones come first: memory that algorithms share is never given back, and would be there several times.

        Raises:
            ArgumentError: the ranks cannot divide a layer.
        """
        found = {
            (name, FusedSample.of_layer(op, dim, _element(name), rank, size, layer)): None
            for op, dim in KINDS
            if op in self.ops
            for name in self.dtypes
            for layer in self.layers
        }
        return sorted(found, key=lambda each: -each[1].heap_nbytes)


def _element(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, "float32" if name == TF32 else name)
    return found


def tune_operations_on_this_rank(wanted: FusedTuneOptions, options: RunOptions) -> Tuned[Measured]:
    """Measure, as one of the ranks.

    Collective: every rank of the world calls it with the same arguments.

    Args:
        wanted: what to measure.
        options: ranks, plugins, heap and rounds; its axes are not looked at.  When its limit is reached, what is left
            is passed over.

    Raises:
        ArgumentError: the ranks cannot divide a layer.
        DeviceTimeoutError: an algorithm did not end.
    """
    rows: list[Measured] = []
    with tuner_of_this_rank(options) as tuner:
        for name, sample in wanted.samples(tuner.ctx.cur_rank, tuner.ctx.num_ranks):
            point = _Shape(name, sample)
            for (algorithm, config), seconds in (tuner.best_launches(point, Series(), all_of_them=True) or {}).items():
                row = Measured(sample.op, name, sample.shape, sample.gather_dim, algorithm, seconds, dict(config))
                rows.append(row)
        return tuner.found(rows)


@dataclass(frozen=True)
class _Shape:
    """A point: one operation with one shape."""

    dtype: str
    sample: FusedSample

    @property
    def op(self) -> str:
        dim = self.sample.gather_dim
        return self.sample.op if dim is None else f"{self.sample.op}(gather_dim={dim})"

    @property
    def where(self) -> str:
        m, n, k = self.sample.shape
        return f"{m} x {k} times {k} x {n} {self.dtype}"

    def call(self, ctx: Iris) -> _Call:
        return _Call(ctx, self)


class _Call:
    """One operation with its tensors."""

    def __init__(self, ctx: Iris, shape: _Shape) -> None:
        self._ops, self._sample = ctx.ops, shape.sample
        self._device = ctx.device
        self._tf32 = {"float32": False, TF32: True}.get(shape.dtype)  # whatever torch is set to
        self._tensors = shape.sample.tensors(ctx)
        self._want: torch.Tensor | None = None

    def explain(self) -> Explanation:
        """What serves the call; who does not give the same bits in every run is for those who name him."""
        config = FusedConfig(allow_tf32=self._tf32)
        found = self._ops.explain(self._sample.op, *self._tensors, config=config, **self._sample.options)
        return replace(found, candidates=tuple(each for each in found.candidates if each.repeatable))

    def runner(self, algorithm: str, fields: Mapping[str, Any]) -> Callable[[], object]:
        run, tensors, options = getattr(self._ops, self._sample.op), self._tensors, self._sample.options
        config = FusedConfig(algorithm=algorithm, allow_tf32=self._tf32, **fields)
        return lambda: run(*tensors, config=config, **options)

    def is_right(self) -> bool:
        if self._want is None:
            self._want = self._sample.wanted(self._device)
        return torch.equal(self._tensors[0], self._want)

    def spoil(self) -> None:
        self._tensors[0].fill_(SPOILED)


def merged(old: Sequence[Measured], new: Sequence[Measured]) -> list[Measured]:
    """Return the rows of two tables: of shapes that were measured again, only the new ones."""

    def kind(row: Measured) -> tuple[Any, ...]:
        return row.op, row.dtype, row.shape, row.gather_dim

    again = {kind(row) for row in new}
    return [row for row in old if kind(row) not in again] + list(new)
