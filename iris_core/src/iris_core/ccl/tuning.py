"""Measuring the algorithms of collectives on this machine, for a table from which `ctx.ccl` chooses.

The points are sizes of the full buffer; `iris_core.dispatch.tune` measures them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iris_core.ccl.config import Config
from iris_core.ccl.samples import OPS, SPOILED, Sample
from iris_core.dispatch.tables import ANY_DTYPE, Entry
from iris_core.dispatch.tune import Series, Tuned, Tuner, tuner_of_this_rank
from iris_core.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from iris_core import Iris
    from iris_core.bench import RunOptions
    from iris_core.dispatch.choice import Explanation

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


def check_names(kind: str, given: Sequence[str], known: Sequence[str]) -> None:
    """Raise ArgumentError unless all names are known, and given once."""
    if strange := [each for each in given if each not in known]:
        raise ArgumentError(f"no {kind} {', '.join(strange)} can be tuned; there are {', '.join(known)}")
    if not given or len(set(given)) < len(given):
        raise ArgumentError(f"give each {kind} once, and one at least")


def tune_on_this_rank(wanted: TuneOptions, options: RunOptions) -> Tuned[Entry]:
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
    import torch

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
    ctx, series = tuner.ctx, Series()
    samples = [Sample.of_bytes(op, dtype, ctx.cur_rank, ctx.num_ranks, nbytes) for nbytes in wanted.sizes]
    samples = list({sample.length: sample for sample in samples}.values())
    for sample, above in zip(samples, [*samples[1:], None], strict=True):
        launches = tuner.best_launches(_Size(sample), series)
        if launches is None:
            return
        bound = math.inf if above is None else math.sqrt(sample.looked_up_nbytes * above.looked_up_nbytes)
        for (name, config), seconds in launches.items():
            yield Entry(op, "", math.floor(bound) if above else bound, name, seconds, "", dict(config))


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

    def runner(self, algorithm: str, fields: Mapping[str, Any]) -> Callable[[], object]:
        run, tensors, config = getattr(self._ccl, self._sample.op), self._tensors, Config(algorithm=algorithm, **fields)
        return lambda: run(*tensors, config=config)

    def is_right(self) -> bool:
        return self._sample.is_right(self._out)

    def spoil(self) -> None:
        if self._out is not None:
            self._out.fill_(SPOILED)


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> list[Entry]:
    """Return the entries of two tables: of operations and types that were measured again, only the new ones.

    Sizes that were not reached before the limit keep what was known of them.
    """
    reached: dict[tuple[str, str], float] = {}
    for entry in new:
        kind = entry.op, entry.dtype
        reached[kind] = max(entry.max_nbytes, reached.get(kind, 0))
    kept = [entry for entry in old if entry.max_nbytes > reached.get((entry.op, entry.dtype), -1)]
    return kept + list(new)
