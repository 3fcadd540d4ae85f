"""Sequences that are divided among ranks, with gradients: other dimensions instead of tokens, where that is needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iris_core.api import Iris
from iris_core.nn.setting import NEEDED, Setting
from iris_core.ops.attention import RingAttention
from iris_core.types import Group


class _Ulysses(torch.autograd.Function):
    """The gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Tensor | None, scatter: int, gather: int, s: Setting) -> Tensor:
        ctx.way, shape = (gather, scatter, s), list(x.shape)
        # else `ulysses` refuses it, on all members
        if all(isinstance(each, int) and -x.ndim <= each < x.ndim for each in (scatter, gather)):
            shape[scatter] //= s.size
            shape[gather] *= s.size
        out = x.new_empty(shape)
        s.ops.ulysses(out, x, scatter_dim=scatter, gather_dim=gather, group=s.group, config=s.config)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _Ulysses.apply(grad.contiguous(), None, *ctx.way), *[None] * 4  # type: ignore[no-untyped-call]


def ulysses(context: Iris, x: Tensor, scatter_dim: int, gather_dim: int, *, group: Group = None) -> Tensor:
    """Return x with one dimension divided among the members instead of another one; see `ctx.ops.ulysses`.

    Collective; its backward pass is the way back, on all members: without `torch.no_grad`, results require gradients.

    Args:
        context: the open Iris.
        x: this member's part of `gather_dim`.
        scatter_dim: the dimension that is divided afterwards.
        gather_dim: the dimension of which the result has all.
        group: a process group of torch.distributed, or a list of ranks; None for all.

    Raises:
        ArgumentError: there are no such dimensions, or the members cannot divide the first one.

    Example:
        >>> import torch
        >>> from iris_core import Iris
        >>> from iris_core.nn import ulysses
        >>> with Iris("1MiB", device="cpu") as ctx:
        ...     ulysses(ctx, torch.ones(2, 6, 4, 8), scatter_dim=2, gather_dim=1).shape
        torch.Size([2, 6, 4, 8])
    """
    how = scatter_dim, gather_dim, Setting(context, group)
    return _Ulysses.apply(x, NEEDED, *how)  # type: ignore[no-any-return, no-untyped-call]


class _Ring(torch.autograd.Function):
    """Keys and values travel again in the backward pass, and their gradients with them."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, _: Tensor | None, ring: RingAttention) -> Tensor:
        out, lse = ring(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return *ctx.ring.gradients(grad.contiguous(), *ctx.saved_tensors), None, None


def ring_attention(ring: RingAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return this member's rows of the attention over a divided sequence; see `ctx.ops.ring_attention`.

    Collective; so is its backward pass, which computes the weights again: with `gradients`, results require them.

    Args:
        ring: what `ctx.ops.ring_attention` returns, with `gradients`; layers may share one.
        q: (heads, rows, head_dim) of the ring's dtype.
        k, v: (kv_heads, rows, head_dim).

    Raises:
        ArgumentError: shapes or dtypes do not fit.
    """
    given = q.contiguous(), k.contiguous(), v.contiguous(), NEEDED if ring.has_gradients else None
    return _Ring.apply(*given, ring)  # type: ignore[no-any-return, no-untyped-call]
