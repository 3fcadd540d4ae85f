"""Differentiable products that communicate; `iris_core.nn` has them in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from iris_core.dispatch.products import PLAIN
from iris_core.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from iris_core.api import Iris
    from iris_core.dispatch.config import FusedConfig


class Setting:
    """Where and how a function communicates.

    Args:
        context: the open Iris.
        group: a process group of torch.distributed, or a list of ranks; None for all.
        config: of the operation that is the forward pass.
    """

    def __init__(
        self, context: Iris, group: dist.ProcessGroup | Sequence[int] | None, config: FusedConfig | None = None
    ) -> None:
        self.ops = context.ops
        self.ccl = context.ccl
        self.members = context.ops.members_of(group)
        self.rank = self.members.index(context.cur_rank)
        self.size = len(self.members)
        self.group = group
        self.config = config


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Everything in front of the features as rows, contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


_DTYPES = tuple(getattr(torch, name) for name in PLAIN)


def _check(
    op: str, setting: Setting, name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    parts: int | None = None,
) -> None:  # fmt: skip
    """Raise unless a layer is possible; on all members that come to compare their first `op`, as that does."""
    try:
        _check_alone(name, x, weight, bias)
        if parts is not None:
            _check_rows(name, x, parts)
    except (ArgumentError, UnsupportedError) as error:
        setting.ops.refuse(op, error, setting.group)


def _check_alone(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    dtypes = {what: each.dtype for what, each in (("x", x), ("weight", weight), ("bias", bias)) if each is not None}
    if _autocast_dtype(x) is None and len(set(dtypes.values())) > 1:
        said = ", ".join(f"{what} has {dtype}" for what, dtype in dtypes.items())
        raise ArgumentError(f"{name}: {said}; they must have one dtype, or autocast must be on")
    if unknown := [dtype for dtype in dtypes.values() if dtype not in _DTYPES]:  # the backward pass would be refused
        raise UnsupportedError(f"{name}: {unknown[0]} is not supported; layers take float32, bfloat16 and float16")
    if weight.dim() != 2:
        raise ArgumentError(f"{name}: the weight must be a matrix, not of shape {tuple(weight.shape)}")
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"{name}: x has shape {tuple(x.shape)}, the weight {tuple(weight.shape)}: x must have {weight.shape[1]} "
            "features"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ArgumentError(f"{name}: the bias must be ({weight.shape[0]},), not {tuple(bias.shape)}")


class _Kind:
    """One of the functions: its product, and its gradients; rows of x, of the result and of its gradient are matrices.

    Here: x @ w.T + b, where x is the same on all members and the weights are parts.
    """

    def rows_of(self, x_rows: int, size: int) -> int:
        """Return the length of the result's first dimension."""
        return x_rows

    def product(self, s: Setting, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the result."""
        return torch.nn.functional.linear(x, weight, bias)

    def own(self, s: Setting, grad: torch.Tensor) -> torch.Tensor:
        """Return the part of the gradient that is of this member's features."""
        return grad

    def grad_x(self, s: Setting, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of x."""
        out = grad.new_empty(grad.shape[0], weight.shape[1])
        s.ops.matmul_all_reduce(out, grad, weight, group=s.group)
        return out

    def grad_weight(self, s: Setting, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the weight."""
        return grad.t() @ x

    def grad_bias(self, s: Setting, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the bias, in float32."""
        return grad.sum(0, dtype=torch.float32)


class _AllGatherFeatures(_Kind):
    """The features of all members' x @ w.T + b, beside each other."""

    def product(self, s: Setting, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], weight.shape[0] * s.size)
        s.ops.matmul_all_gather(out, x.contiguous(), weight.t(), bias, config=s.config, group=s.group, gather_dim=1)
        return out

    def own(self, s: Setting, grad: torch.Tensor) -> torch.Tensor:
        return grad.chunk(s.size, -1)[s.rank]


class _AllReduce(_Kind):
    """The sum of all members' x @ w.T, + b; x and the weights are parts."""

    def product(self, s: Setting, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0], weight.shape[0])
        s.ops.matmul_all_reduce(out, x.contiguous(), weight.t(), bias, config=s.config, group=s.group)
        return out

    def grad_x(self, s: Setting, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return grad @ weight


class _AllGatherRows(_Kind):
    """The rows of all members' x, @ w.T + b; x is a part of the rows, the weights are parts."""

    def rows_of(self, x_rows: int, size: int) -> int:
        return x_rows * size

    def product(self, s: Setting, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0] * s.size, weight.shape[0])
        s.ops.all_gather_matmul(out, x.contiguous(), weight.t(), bias, config=s.config, group=s.group, gather_dim=0)
        return out

    def grad_x(self, s: Setting, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = grad.new_empty(grad.shape[0] // s.size, weight.shape[1])
        s.ops.matmul_reduce_scatter(out, grad, weight, group=s.group)
        return out

    def grad_weight(self, s: Setting, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """As (features in, all rows) @ (all rows, features out): shards along the inner dimension."""
        turned = grad.new_empty(x.shape[1], grad.shape[1])
        s.ops.all_gather_matmul(turned, x.t(), grad, group=s.group, gather_dim=1)
        return turned.t()


class _ReduceScatterRows(_Kind):
    """This member's rows of the sum of all members' x @ w.T, + b; x and the weights are parts."""

    def rows_of(self, x_rows: int, size: int) -> int:
        return x_rows // size

    def product(self, s: Setting, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x.new_empty(x.shape[0] // s.size, weight.shape[0])
        s.ops.matmul_reduce_scatter(out, x.contiguous(), weight.t(), bias, config=s.config, group=s.group)
        return out

    def grad_x(self, s: Setting, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = grad.new_empty(grad.shape[0] * s.size, weight.shape[1])
        s.ops.all_gather_matmul(out, grad, weight, group=s.group, gather_dim=0)
        return out

    def grad_weight(self, s: Setting, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        out = grad.new_empty(grad.shape[1], x.shape[1])
        s.ops.all_gather_matmul(out, grad.t(), x, group=s.group, gather_dim=1)
        return out

    def grad_bias(self, s: Setting, grad: torch.Tensor) -> torch.Tensor:
        part = super().grad_bias(s, grad)  # each member has seen its own rows only
        s.ccl.all_reduce(part, part, group=s.group)
        return part


class _Function(torch.autograd.Function):
    """A kind, as torch differentiates it."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: Setting, kind: _Kind
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting, ctx.kind, ctx.has_bias = setting, kind, bias is not None
        out = kind.product(setting, x.reshape(-1, x.shape[-1]), weight, bias)
        if x.dim() < 2:
            return out.view(*x.shape[:-1], out.shape[1])
        return out.view(kind.rows_of(x.shape[0], setting.size), *x.shape[1:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        kind: _Kind = ctx.kind
        rows, grad_x, grad_w, grad_b = _rows(kind.own(ctx.setting, grad)), None, None, None
        if ctx.needs_input_grad[0]:
            grad_x = kind.grad_x(ctx.setting, rows, weight.detach()).view(x.shape)
        if ctx.needs_input_grad[1]:
            empty = not rows.shape[0]
            grad_w = torch.zeros_like(weight) if empty else kind.grad_weight(ctx.setting, rows, _rows(x))
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_b = kind.grad_bias(ctx.setting, rows).to(grad.dtype)
        return grad_x, grad_w, grad_b, None, None


class TakePart(torch.autograd.Function):
    """This member's part of the features; backwards, the parts of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, setting: Setting) -> torch.Tensor:
        ctx.setting = setting
        return x.chunk(setting.size, -1)[setting.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        setting: Setting = ctx.setting
        parts = grad.new_empty(setting.size, *grad.shape)
        setting.ccl.all_gather(parts, grad.contiguous(), group=setting.group)
        return torch.cat(list(parts), -1), None


def linear(
    context: Iris,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Sequence[int] | None = None,
) -> torch.Tensor:
    """Return x @ weight.T + bias, the own features of a layer that is divided by output features.

    Backwards, the gradient of x is the sum over the members: collective.

    Args:
        context: the open Iris.
        x: (..., in), the same on all members.
        weight: (out / W, in), this member's part.
        bias: (out / W,) or None.
        group: a process group of torch.distributed, or a list of ranks; None for all.

    Returns:
        (..., out / W).

    Raises:
        ArgumentError: the shapes or dtypes do not fit.
        UnsupportedError: of a dtype.
    """
    _check_alone("linear", x, weight, bias)
    return _apply(_Kind(), x, weight, bias, Setting(context, group))


def linear_all_gather(
    context: Iris,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Sequence[int] | None = None,
    config: FusedConfig | None = None,
) -> torch.Tensor:
    """Return all features of a layer that is divided by output features: (..., out).

    Collective.  What follows is computed alike by all members, so the gradient of the result is the same on all.

    Args:
        context, x, weight, bias, group: as in `linear`.
        config: of matmul_all_gather.

    Raises:
        ArgumentError: the shapes or dtypes do not fit.
        UnsupportedError: of a dtype.
    """
    setting = Setting(context, group, config)
    _check("matmul_all_gather", setting, "linear_all_gather", x, weight, bias)
    return _apply(_AllGatherFeatures(), x, weight, bias, setting)


def linear_all_reduce(
    context: Iris,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Sequence[int] | None = None,
    config: FusedConfig | None = None,
) -> torch.Tensor:
    """Return the sum of all members' x @ weight.T, + bias: (..., out), the same on all.

    Collective.

    Args:
        context: the open Iris.
        x: (..., in / W), this member's features.
        weight: (out, in / W), this member's part.
        bias: (out,), the same on all members, or None.
        group: as in `linear`.
        config: of matmul_all_reduce.

    Raises:
        ArgumentError: the shapes or dtypes do not fit.
        UnsupportedError: of a dtype.
    """
    setting = Setting(context, group, config)
    _check("matmul_all_reduce", setting, "linear_all_reduce", x, weight, bias)
    return _apply(_AllReduce(), x, weight, bias, setting)


def all_gather_linear(
    context: Iris,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Sequence[int] | None = None,
    config: FusedConfig | None = None,
) -> torch.Tensor:
    """Return the own features of a layer for the rows of all members: (rows, ..., out / W).

    Collective.

    Args:
        context: the open Iris.
        x: (rows / W, ..., in), this member's part of the sequence.
        weight: (out / W, in), this member's part.
        bias: (out / W,) or None.
        group: as in `linear`.
        config: of all_gather_matmul.

    Raises:
        ArgumentError: the shapes or dtypes do not fit.
        UnsupportedError: of a dtype.
    """
    setting = Setting(context, group, config)
    _check("all_gather_matmul", setting, "all_gather_linear", x, weight, bias, 1)
    return _apply(_AllGatherRows(), x, weight, bias, setting)


def linear_reduce_scatter(
    context: Iris,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | Sequence[int] | None = None,
    config: FusedConfig | None = None,
) -> torch.Tensor:
    """Return this member's rows of the sum of all members' x @ weight.T, + bias: (rows / W, ..., out).

    Collective.

    Args:
        context: the open Iris.
        x: (rows, ..., in / W), this member's features.
        weight: (out, in / W), this member's part.
        bias: (out,), the same on all members, or None; its gradient is summed over the members.
        group: as in `linear`.
        config: of matmul_reduce_scatter.

    Raises:
        ArgumentError: the shapes or dtypes do not fit.
        UnsupportedError: of a dtype.
    """
    setting = Setting(context, group, config)
    _check("matmul_reduce_scatter", setting, "linear_reduce_scatter", x, weight, bias, setting.size)
    return _apply(_ReduceScatterRows(), x, weight, bias, setting)


def _apply(
    kind: _Kind, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: Setting
) -> torch.Tensor:
    dtype = _autocast_dtype(x)
    if dtype is not None:  # torch differentiates the conversions
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        result: torch.Tensor = _Function.apply(x, weight, bias, setting, kind)  # type: ignore[no-untyped-call]
    return result


def _autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype of autocast where x lies; None if it is off."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _check_rows(name: str, x: torch.Tensor, size: int) -> None:
    if x.dim() < 2 or x.shape[0] % size:
        raise ArgumentError(
            f"{name}: x has shape {tuple(x.shape)}: its first dimension is divided among the {size} ranks of the group"
        )
