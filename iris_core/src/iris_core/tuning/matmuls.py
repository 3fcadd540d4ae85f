"""Shapes and verified data for measuring fused operations, for the tables from which `ctx.ops` chooses.

Every element of a result is known in advance.  Inputs are -1, 0 and 1, most of them 0: sums of products are small whole
numbers, which every element type that is multiplied can hold, so that they are exact in any order, and as TF32, too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from iris_core.dispatch.config import FusedConfig
from iris_core.dispatch.products import FP8, GATHERING, OPS, PLAIN
from iris_core.dispatch.tables import TF32
from iris_core.errors import ArgumentError
from iris_core.tuning.tuner import Point, check_names

if TYPE_CHECKING:
    from iris_core.api import Iris

KINDS = tuple((op, dim) for op in OPS for dim in ((0, 1) if op in GATHERING else (None,)))
"""(operation, gather_dim) of all that there are."""

DTYPES = (*PLAIN, TF32, *FP8)
"""Element types that can be measured; "tf32" is float32 where TF32 is allowed."""

LAYERS = tuple((m, n, k) for n, k in ((28672, 8192), (14336, 4096), (11008, 4096)) for m in (8192, 2048, 512))
"""Rows, and weights (N, K) of large language models, that are measured by default."""

SPOILED = 77.0
"""No element of any operand, and of no result."""

_DENSITY = 1 / 16


@dataclass(frozen=True, slots=True)
class FusedSample:
    """One operation with one shape, as one of `size` ranks sees it; ArgumentError if they cannot divide it.

    Attributes:
        gather_dim: as in the call; None for operations that gather nothing.
        dtype: of the operands; the result is bfloat16 where they are 8-bit floats.
        shape: (m, n, k) of the product that each rank computes, as in the measured tables.
    """

    op: str
    gather_dim: int | None
    dtype: torch.dtype
    rank: int
    size: int
    shape: tuple[int, int, int]

    spoiled: ClassVar = SPOILED

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
    """Fused operations to measure, the same on every rank; ArgumentError if they are impossible.

    Operations that gather are measured with both values of gather_dim; `FusedSample.of_layer` says what layers are.
    """

    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = ("bfloat16",)
    layers: tuple[tuple[int, int, int], ...] = LAYERS

    def __post_init__(self) -> None:
        check_names("operation", self.ops, OPS)
        check_names("element type", self.dtypes, DTYPES)
        if not self.layers or min(min(each) for each in self.layers) < 1:
            raise ArgumentError(f"layers must be given, of positive sizes, not {self.layers}")

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
