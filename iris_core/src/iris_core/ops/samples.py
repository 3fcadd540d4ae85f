"""Operands of fused operations whose results can be told element by element, for measuring on data that is checked.

The elements are -1, 0 and 1, most of them 0: sums of products are small whole numbers, which every element type that is
multiplied can hold, so that they are exact in any order, and as TF32, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import ArgumentError
from iris_core.ops.calls import FP8

if TYPE_CHECKING:
    from iris_core import Iris

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
