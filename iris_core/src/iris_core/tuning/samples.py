"""Sizes, shapes and verified data for measuring, for the tables from which `ctx.ccl` and `ctx.ops` choose.

Every element of a result is known in advance, and exact in any order of additions.  Inputs of collectives are whole
numbers from -3 to 3, operands of products -1, 0 and 1, most of them 0: every element type that is measured holds their
sums, and TF32, too.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from iris_core.api import Iris
from iris_core.dispatch import COLLECTIVES, FP8, PRODUCTS, TF32
from iris_core.dispatch.config import Config, FusedConfig
from iris_core.dispatch.products import GATHERING
from iris_core.dispatch.requests import REDUCING
from iris_core.dispatch.tables import ANY_DTYPE
from iris_core.errors import ArgumentError

KINDS = tuple((op, dim) for op in PRODUCTS for dim in ((0, 1) if op in GATHERING else (None,)))
"""(operation, gather_dim) of all fused operations that there are."""

LAYERS = tuple((m, n, k) for n, k in ((28672, 8192), (14336, 4096), (11008, 4096)) for m in (8192, 2048, 512))
"""Rows, and weights (N, K) of large language models, that are measured by default."""

SPOILED = 101
"""No element of any input, and exact in every type of a result."""

_PARTED = ("reduce_scatter", "all_to_all", "scatter")  # inputs with a part for each
_UNIT_NBYTES = 16
_PERIOD = 7 << 9  # elements after which an input repeats itself
_DENSITY = 1 / 16


class Point(NamedTuple):
    """One operation with one size or shape."""

    sample: Any  # a `Sample` or `FusedSample`: the call, and data whose result is known
    config: Config | FusedConfig
    where: str  # the size or shape, for people
    dtype: str | None = None  # element type that the table names, if that is not the call's


# -- collectives ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sample:
    """One operation at one size, as one of `size` ranks sees it; a root is rank 0.

    `length` is in elements of the full buffer: of the operation's input or output, whichever is larger.
    """

    op: str
    dtype: torch.dtype
    rank: int
    size: int
    length: int

    options: ClassVar[dict[str, Any]] = {}

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
        inp.copy_(self._input(self.rank, inp.device))
        has_out = self.op not in ("reduce", "gather") if self.rank else self.op != "broadcast"
        has_in = not self.rank or self.op not in ("broadcast", "scatter")
        return (out if has_out else None), (inp if has_in else None)

    def is_right(self, out: torch.Tensor | None) -> bool:
        """Whether every element of this rank's output is what it must be; true where it has none."""
        if out is None:
            return True
        inputs = (self._input(rank, out.device) for rank in range(self.size))  # one after the other: they may be large
        if self.op in _PARTED:
            inputs = (each.chunk(self.size)[self.rank] for each in inputs)
        if self.op in REDUCING:
            return torch.equal(out, functools.reduce(torch.Tensor.add_, inputs))
        parts = out.chunk(self.size) if self.op in ("all_gather", "all_to_all", "gather") else (out,)
        return all(torch.equal(part, wanted) for part, wanted in zip(parts, inputs, strict=False))

    def _input(self, rank: int, device: torch.device) -> torch.Tensor:
        count = self.length // self.size if self.op in ("all_gather", "gather") else self.length
        index = torch.arange(_PERIOD, device=device)
        elements = ((index * 5 + (index >> 9) + 3 * rank) % 7 - 3).to(self.dtype)
        return elements.repeat(-(-count // _PERIOD))[:count]


@dataclass(frozen=True)
class TuneOptions:
    """Collectives to measure, the same on every rank.

    Times of the first element type also count for all types that are not named.  Sizes are those of the full buffer
    (a gather's output, a scatter's input), each twice the one before.
    """

    ops: tuple[str, ...] = COLLECTIVES
    dtypes: tuple[str, ...] = ("bfloat16",)
    min_nbytes: int = 1 << 10
    max_nbytes: int = 1 << 30

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


# -- products ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class FusedSample:
    """One operation with one shape, as one of `size` ranks sees it; ArgumentError if they cannot divide it."""

    op: str
    gather_dim: int | None  # as in the call; None for operations that gather nothing
    dtype: torch.dtype  # of the operands; the result is bfloat16 where they are 8-bit floats
    rank: int
    size: int
    shape: tuple[int, int, int]  # (m, n, k) of the product that each rank computes, as in the measured tables

    def __post_init__(self) -> None:
        m, _, k = self.shape
        rows = self.op == "matmul_reduce_scatter" or (self.op == "all_gather_matmul" and self.gather_dim == 0)
        divided = m if rows else k if self.op == "all_gather_matmul" else self.size
        if divided % self.size:
            raise ArgumentError(f"{self.op}: {self.size} ranks cannot divide {divided}, of a product of {self.shape}")

    @classmethod
    def of_layer(
        cls, op: str, gather_dim: int | None, dtype: torch.dtype, rank: int, size: int, layer: tuple[int, int, int]
    ) -> FusedSample:
        """Make the sample of a linear layer (M, N, K): M rows, and a weight of N x K that the ranks divide.

        Where A is gathered, or the products are side by side, each of W ranks multiplies (M, K) with (K, N / W); where
        products are added up, (M, N / W) with (N / W, K); where they are below each other, (M / W, K) with (K, N).
        """
        m, n, k = layer
        below = (op, gather_dim) == ("matmul_all_gather", 0)
        if (m if below else n) % size:
            raise ArgumentError(f"{op}: {size} ranks cannot divide {m} rows and a weight of {n} x {k}")
        if op in ("matmul_all_reduce", "matmul_reduce_scatter"):
            return cls(op, gather_dim, dtype, rank, size, (m, k, n // size))
        return cls(op, gather_dim, dtype, rank, size, (m // size, n, k) if below else (m, n // size, k))

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
        """A size of heap that every algorithm fits into."""
        m, n, k = self.shape
        product, gathered = m * n * 4, m * k * self.dtype.itemsize
        # output, A, and what algorithms stage: slots for each member, rounded up to powers of two
        return (64 << 20) + 4 * gathered + (3 * self.size + 4) * product

    def a(self, rank: int, device: str) -> torch.Tensor:
        """Return a of a rank."""
        return self._operand(2 * rank, self.a_shape, device)

    def b(self, rank: int, device: str) -> torch.Tensor:
        """B of a rank."""
        return self._operand(2 * rank + 1, (self.shape[2], self.shape[1]), device)

    def _operand(self, seed: int, shape: tuple[int, int], device: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        values = torch.rand(*shape, generator=generator, device=device, dtype=torch.float32)
        return ((values > 1 - _DENSITY / 2).float() - (values < _DENSITY / 2).float()).to(self.dtype)

    def wanted(self, device: str) -> torch.Tensor:
        """Return the expected output of this rank, computed by torch.matmul."""
        exact, ranks = self.out_dtype, range(self.size)  # torch puts no 8-bit floats together, and multiplies few
        if self.op == "all_gather_matmul":
            whole = torch.cat([self.a(rank, device).to(exact) for rank in ranks], self.gather_dim or 0)
            return whole @ self.b(self.rank, device).to(exact)
        products = (self.a(rank, device).to(exact) @ self.b(rank, device).to(exact) for rank in ranks)
        if self.op == "matmul_all_gather":
            return torch.cat(list(products), self.gather_dim or 0)
        total = functools.reduce(torch.Tensor.add_, products)
        return total if self.op == "matmul_all_reduce" else total.chunk(self.size)[self.rank].contiguous()

    def is_right(self, out: torch.Tensor) -> bool:
        """Whether this rank's output is what it must be."""
        return torch.equal(out, self.wanted(str(out.device)))

    def tensors(self, ctx: Iris) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Allocate (output, A, B), the operands filled: A and the output on the heap.  A symmetric call."""
        a = ctx.empty(*self.a_shape, dtype=self.dtype, device=ctx.device).copy_(self.a(self.rank, ctx.device))
        out = ctx.empty(*self.out_shape, dtype=self.out_dtype, device=ctx.device)
        return out, a, self.b(self.rank, ctx.device)


@dataclass(frozen=True)
class FusedTuneOptions:
    """Fused operations to measure, the same on every rank.

    Operations that gather are measured with both values of gather_dim; `FusedSample.of_layer` says what layers are.
    """

    ops: tuple[str, ...] = PRODUCTS
    dtypes: tuple[str, ...] = ("bfloat16",)
    layers: tuple[tuple[int, int, int], ...] = LAYERS

    def points(self, rank: int, size: int) -> list[Point]:
        """Return what is measured, as one of `size` ranks sees it; ArgumentError if they cannot divide a layer.

        The largest one comes first: memory that algorithms share is never given back.
        """
        found = []
        for name in self.dtypes:
            dtype = getattr(torch, "float32" if name == TF32 else name)
            config = FusedConfig(allow_tf32={"float32": False, TF32: True}.get(name))  # whatever torch is set to
            calls = [(op, dim, layer) for op, dim in KINDS if op in self.ops for layer in self.layers]
            for sample in dict.fromkeys(FusedSample.of_layer(op, dim, dtype, rank, size, at) for op, dim, at in calls):
                m, n, k = sample.shape
                found.append(Point(sample, config, f"{m} x {k} times {k} x {n} {name}"))
        return sorted(found, key=lambda point: -point.sample.heap_nbytes)
