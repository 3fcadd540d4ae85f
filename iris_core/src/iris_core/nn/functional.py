"""Differentiable products that communicate; `iris_core.nn` has them in a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from iris_core.dispatch.products import PLAIN
from iris_core.errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from iris_core.api import Iris
    from iris_core.dispatch.config import FusedConfig


_DTYPES = tuple(getattr(torch, name) for name in PLAIN)


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

    def product(
        self, op: str, a: torch.Tensor, b: torch.Tensor, *bias: Any, dim: int = 0, config: FusedConfig | None = None
    ) -> torch.Tensor:
        """Return the result of an operation, which `dim` divides or gathers."""
        rows, columns, more = a.shape[0], b.shape[1], {}
        if op in ("all_gather_matmul", "matmul_all_gather"):
            more = {"gather_dim": dim}
            if dim == 0:
                rows *= self.size
            elif op == "matmul_all_gather":
                columns *= self.size
        elif op == "matmul_reduce_scatter":
            rows //= self.size
        out = a.new_empty(rows, columns)
        getattr(self.ops, op)(out, a, b, *bias, config=config, group=self.group, **more)
        return out


class _Kind(NamedTuple):
    """The operations of a function, and of the gradient of its x; None where nothing is communicated."""

    forward: str | None
    backward: str | None


_KINDS = {
    "linear": _Kind(None, "matmul_all_reduce"),
    "linear_all_gather": _Kind("matmul_all_gather", "matmul_all_reduce"),
    "linear_all_reduce": _Kind("matmul_all_reduce", None),
    "all_gather_linear": _Kind("all_gather_matmul", "matmul_reduce_scatter"),
    "linear_reduce_scatter": _Kind("matmul_reduce_scatter", "all_gather_matmul"),
}


class _Function(torch.autograd.Function):
    """A function, as torch differentiates it; rows of x, of the result and of its gradient are matrices."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, s: Setting, kind: _Kind
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting, ctx.kind, ctx.has_bias = s, kind, bias is not None
        rows = x.reshape(-1, x.shape[-1])
        if kind.forward is None:
            out = torch.nn.functional.linear(rows, weight, bias)
        else:
            dim = 1 if kind.forward == "matmul_all_gather" else 0
            out = s.product(kind.forward, rows.contiguous(), weight.t(), bias, dim=dim, config=s.config)
        if x.dim() < 2:
            return out.view(*x.shape[:-1], out.shape[1])
        first = {"all_gather_matmul": x.shape[0] * s.size, "matmul_reduce_scatter": x.shape[0] // s.size}
        return out.view(first.get(kind.forward or "", x.shape[0]), *x.shape[1:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        s: Setting = ctx.setting
        forward, backward = ctx.kind
        if forward == "matmul_all_gather":
            grad = grad.chunk(s.size, -1)[s.rank]
        rows, grad_x, grad_w, grad_b = _rows(grad), None, None, None
        if ctx.needs_input_grad[0]:
            w = weight.detach()
            grad_x = (rows @ w if backward is None else s.product(backward, rows, w)).view(x.shape)
        if ctx.needs_input_grad[1]:
            if not rows.shape[0]:
                grad_w = torch.zeros_like(weight)
            elif forward == "all_gather_matmul":  # (features in, all rows) @ (all rows, features out)
                grad_w = s.product(forward, _rows(x).t(), rows, dim=1).t()
            elif forward == "matmul_reduce_scatter":
                grad_w = s.product("all_gather_matmul", rows.t(), _rows(x), dim=1)
            else:
                grad_w = rows.t() @ _rows(x)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            total = rows.sum(0, dtype=torch.float32)
            if forward == "matmul_reduce_scatter":  # each member has seen its own rows only
                s.ccl.all_reduce(total, total, group=s.group)
            grad_b = total.to(grad.dtype)
        return grad_x, grad_w, grad_b, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """Everything in front of the features as rows, contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


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
    return _apply("linear", x, weight, bias, Setting(context, group))


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
    return _apply("linear_all_gather", x, weight, bias, Setting(context, group, config))


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
    return _apply("linear_all_reduce", x, weight, bias, Setting(context, group, config))


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
    return _apply("all_gather_linear", x, weight, bias, Setting(context, group, config))


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
    return _apply("linear_reduce_scatter", x, weight, bias, Setting(context, group, config))


def _apply(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: Setting
) -> torch.Tensor:
    kind = _KINDS[name]
    dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
    try:
        _check(name, x, weight, bias, setting.size, dtype)
    except (ArgumentError, UnsupportedError) as error:
        if kind.forward is None:
            raise
        setting.ops.refuse(kind.forward, error, setting.group)  # on all members that come to compare their call of it
    if dtype is not None:  # torch differentiates the conversions
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        result: torch.Tensor = _Function.apply(x, weight, bias, setting, kind)  # type: ignore[no-untyped-call]
    return result


def _check(
    name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, size: int, dtype: torch.dtype | None
) -> None:
    """Raise unless a layer is possible; `dtype` is autocast's, or None."""
    dtypes = {what: each.dtype for what, each in (("x", x), ("weight", weight), ("bias", bias)) if each is not None}
    if dtype is None and len(set(dtypes.values())) > 1:
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
    parts = {"all_gather_linear": 1, "linear_reduce_scatter": size}.get(name)
    if parts is not None and (x.dim() < 2 or x.shape[0] % parts):
        raise ArgumentError(
            f"{name}: x has shape {tuple(x.shape)}: its first dimension is divided among the {parts} ranks of the group"
        )
