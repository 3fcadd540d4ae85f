"""Fused operations on this machine, for a table from which `ctx.ops` chooses: which shapes, and data that is checked.

Results can be told element by element.  The elements are -1, 0 and 1, most of them 0: sums of products are small whole
numbers, which every element type that is multiplied can hold, so that they are exact in any order, and as TF32, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.config import FusedConfig
from iris_core.dispatch.products import FP8, OPS, PLAIN
from iris_core.dispatch.tables import TF32
from iris_core.errors import ArgumentError
from iris_core.tuning.tuner import Tuned, check_names, tuner_of_this_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from iris_core.api import Iris
    from iris_core.bench import RunOptions
    from iris_core.dispatch.choice import Explanation
    from iris_core.dispatch.tables import Entry

KINDS = (
    ("matmul_all_reduce", None),
    ("all_gather_matmul", 0),
    ("all_gather_matmul", 1),
    ("matmul_all_gather", 0),
    ("matmul_all_gather", 1),
    ("matmul_reduce_scatter", None),
)
"""(operation, gather_dim) of all that there are."""

SPOILED = 77.0
"""No element of any operand, and of no result."""

_DENSITY = 1 / 16


@dataclass(frozen=True, slots=True)
class FusedSample:
    """One operation with one shape, as one rank sees it.

    Attributes:
        op: the operation.
        gather_dim: as in the call; None for operations that gather nothing.
        dtype: of the operands; the result is bfloat16 where they are 8-bit floats.
        rank: this rank.
        size: number of ranks.
        shape: (m, n, k) of the product that each rank computes, as in the measured tables.

    Raises:
        ArgumentError: the ranks cannot divide what they have to divide.
    """

    op: str
    gather_dim: int | None
    dtype: torch.dtype
    rank: int
    size: int
    shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        m, _, k = self.shape
        divided = k if self._gathers_inner else m if self._divides_rows else self.size
        if divided % self.size:
            raise ArgumentError(f"{self.op}: {self.size} ranks cannot divide {divided}, of a product of {self.shape}")

    @classmethod
    def of_layer(
        cls, op: str, gather_dim: int | None, dtype: torch.dtype, rank: int, size: int, layer: tuple[int, int, int]
    ) -> FusedSample:
        """Make the sample of a divided linear layer.

        Args:
            op, gather_dim, dtype, rank, size: as in the class.
            layer: (M, N, K): M rows, and a weight of N x K that is divided among the ranks.  Where A is gathered, or
                the products are side by side, each rank multiplies (M, K) with (K, N / W); where products are added
                up, (M, N / W) with (N / W, K); where they are below each other, (M / W, K) with (K, N).

        Raises:
            ArgumentError: the ranks cannot divide the layer.
        """
        m, n, k = layer
        below = (op, gather_dim) == ("matmul_all_gather", 0)
        if (m if below else n) % size:
            raise ArgumentError(f"{op}: {size} ranks cannot divide {m} rows and a weight of {n} x {k}")
        if op in ("matmul_all_reduce", "matmul_reduce_scatter"):
            return cls(op, gather_dim, dtype, rank, size, (m, k, n // size))
        return cls(op, gather_dim, dtype, rank, size, (m // size, n, k) if below else (m, n // size, k))

    @property
    def _divides_rows(self) -> bool:
        """Whether the product's rows are those of all ranks, or are given to them."""
        return self.op == "matmul_reduce_scatter" or (self.op == "all_gather_matmul" and self.gather_dim == 0)

    @property
    def _gathers_inner(self) -> bool:
        return self.op == "all_gather_matmul" and self.gather_dim == 1

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the call beside tensors and config."""
        return {} if self.gather_dim is None else {"gather_dim": self.gather_dim}

    @property
    def out_dtype(self) -> torch.dtype:
        """Of the result."""
        return torch.bfloat16 if str(self.dtype).removeprefix("torch.") in FP8 else self.dtype

    @property
    def a_shape(self) -> tuple[int, int]:
        """Of a rank's A."""
        m, _, k = self.shape
        if self.op == "all_gather_matmul":
            return (m // self.size, k) if self.gather_dim == 0 else (m, k // self.size)
        return m, k

    @property
    def out_shape(self) -> tuple[int, int]:
        """Of a rank's output."""
        m, n, _ = self.shape
        if self.op == "matmul_reduce_scatter":
            return m // self.size, n
        if self.op == "matmul_all_gather":
            return (m * self.size, n) if self.gather_dim == 0 else (m, n * self.size)
        return m, n

    @property
    def heap_nbytes(self) -> int:
        """A size of heap on which every algorithm finds room."""
        m, n, k = self.shape
        product, gathered = m * n * 4, m * k * self.dtype.itemsize
        # output, A, and what algorithms stage: slots for each member, rounded up to powers of two
        return (64 << 20) + 4 * gathered + (3 * self.size + 4) * product

    def a(self, rank: int, device: str) -> torch.Tensor:
        """A of a rank."""
        return self._operand(2 * rank, self.a_shape, device)

    def b(self, rank: int, device: str) -> torch.Tensor:
        """B of a rank."""
        return self._operand(2 * rank + 1, (self.shape[2], self.shape[1]), device)

    def _operand(self, seed: int, shape: tuple[int, int], device: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.rand(*shape, generator=generator, device=device, dtype=torch.float32)
        return ((values > 1 - _DENSITY / 2).float() - (values < _DENSITY / 2).float()).to(self.dtype)

    def wanted(self, device: str) -> torch.Tensor:
        """What this rank's output must be, by torch.matmul alone."""

        def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            exact = torch.float32 if self.dtype == torch.float32 else self.out_dtype
            return a.to(exact) @ b.to(exact)

        ranks = range(self.size)
        if self.op == "all_gather_matmul":
            parts = [self.a(rank, device) for rank in ranks]
            # torch puts no 8-bit floats together
            whole = torch.cat([each.to(self.out_dtype) for each in parts], self.gather_dim or 0)
            return product(whole, self.b(self.rank, device))
        products = (product(self.a(rank, device), self.b(rank, device)) for rank in ranks)
        if self.op == "matmul_all_gather":
            return torch.cat(list(products), self.gather_dim or 0)
        total = next(products)
        for each in products:
            total += each
        return total if self.op == "matmul_all_reduce" else total.chunk(self.size)[self.rank].contiguous()

    def tensors(self, ctx: Iris) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Allocate (output, A, B), the operands filled: A and the output on the heap.  A symmetric call."""
        a = ctx.empty(*self.a_shape, dtype=self.dtype, device=ctx.device).copy_(self.a(self.rank, ctx.device))
        out = ctx.empty(*self.out_shape, dtype=self.out_dtype, device=ctx.device)
        return out, a, self.b(self.rank, ctx.device)


# -- measuring --------------------------------------------------------------------------------------------------------
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


def tune_operations_on_this_rank(wanted: FusedTuneOptions, options: RunOptions) -> Tuned:
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
    entries: list[Entry] = []
    with tuner_of_this_rank(options) as tuner:
        for name, sample in wanted.samples(tuner.ctx.cur_rank, tuner.ctx.num_ranks):
            entries += tuner.best_launches(_Shape(name, sample)) or []
        return tuner.found(entries)


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
        return self._ops.explain(
            self._sample.op, *self._tensors, config=FusedConfig(allow_tf32=self._tf32), **self._sample.options
        )

    def run(self, algorithm: str | None = None, fields: Mapping[str, Any] | None = None) -> object:
        config = FusedConfig(algorithm=algorithm, allow_tf32=self._tf32, **(fields or {}))
        return getattr(self._ops, self._sample.op)(*self._tensors, config=config, **self._sample.options)

    def is_right(self) -> bool:
        if self._want is None:
            self._want = self._sample.wanted(self._device)
        return torch.equal(self._tensors[0], self._want)

    def spoil(self) -> None:
        self._tensors[0].fill_(SPOILED)
