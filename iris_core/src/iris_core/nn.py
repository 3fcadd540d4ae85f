"""Linear layers that are divided among ranks, and the differentiable functions that they are made of.

Tensor parallelism in the manner of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053) and its sequence-parallel form
(Korthikanti et al., 2022, arXiv:2205.05198): a layer's weight is divided by columns (of its transpose: by output
features) or by rows (input features), and where the sequence is divided, too, activations are gathered before and
scattered after.  Every product that communicates, forwards or backwards, is one operation of `ctx.ops`.

| function | result | gradient of x | gradient of the weight |
|---|---|---|---|
| `linear` | x @ w.T | matmul_all_reduce | local |
| `linear_all_gather` | columns of all | matmul_all_reduce | local |
| `linear_all_reduce` | matmul_all_reduce | local | local |
| `all_gather_linear` | all_gather_matmul | matmul_reduce_scatter | all_gather_matmul (inner dimension) |
| `linear_reduce_scatter` | matmul_reduce_scatter | all_gather_matmul | all_gather_matmul (inner dimension) |

Collective: every member of the group calls a function, and later its backward pass, in the same order.  As torch runs
backward passes in an order that depends on the graph alone, that is so where the members' graphs are alike.

x is (..., features); where rows are gathered or scattered, it is the first dimension that is divided, and everything in
front of the features counts as rows.  Results are ordinary tensors, not on the symmetric heap.  x, weight and bias have
one dtype; where autocast is on (torch.autocast), they are taken in its dtype, as torch.nn.functional.linear takes them.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.ops.calls import PLAIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from iris_core.api import Iris
    from iris_core.ops.config import FusedConfig

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "all_gather_linear",
    "linear",
    "linear_all_gather",
    "linear_all_reduce",
    "linear_reduce_scatter",
]


class _Setting:
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


def _bias_grad(grad: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    """Sum over the rows, in float32."""
    return grad.sum(0, dtype=torch.float32).to(grad.dtype) if wanted else None


_DTYPES = tuple(getattr(torch, name) for name in PLAIN)


def _check(
    op: str, setting: _Setting, name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
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


class _Linear(torch.autograd.Function):
    """x @ w.T + b; x is the same on all members, the weights are parts."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: _Setting
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting, ctx.has_bias = setting, bias is not None
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad_x = _summed(grad, weight, ctx.setting).view(x.shape) if ctx.needs_input_grad[0] else None
        rows = _rows(grad)
        grad_w = rows.t() @ _rows(x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, _bias_grad(rows, ctx.has_bias and ctx.needs_input_grad[2]), None


def _summed(grad: torch.Tensor, weight: torch.Tensor, setting: _Setting) -> torch.Tensor:
    """Sum of all members' grad @ weight."""
    rows = _rows(grad)
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    setting.ops.matmul_all_reduce(out, rows, weight.detach(), group=setting.group)
    return out


class _LinearAllGather(torch.autograd.Function):
    """The features of all members' x @ w.T + b, beside each other."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: _Setting
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting, ctx.has_bias = setting, bias is not None
        rows = _rows(x)
        out = rows.new_empty(rows.shape[0], weight.shape[0] * setting.size)
        setting.ops.matmul_all_gather(
            out, rows, weight.t(), bias, config=setting.config, group=setting.group, gather_dim=1
        )
        return out.view(*x.shape[:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        own = _rows(grad.chunk(ctx.setting.size, -1)[ctx.setting.rank])
        grad_x = _summed(own, weight, ctx.setting).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_w = own.t() @ _rows(x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, _bias_grad(own, ctx.has_bias and ctx.needs_input_grad[2]), None


class _LinearAllReduce(torch.autograd.Function):
    """The sum of all members' x @ w.T, + b; x and the weights are parts."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: _Setting
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        rows = _rows(x)
        out = rows.new_empty(rows.shape[0], weight.shape[0])
        setting.ops.matmul_all_reduce(out, rows, weight.t(), bias, config=setting.config, group=setting.group)
        return out.view(*x.shape[:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        rows = _rows(grad)
        grad_x = (rows @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_w = rows.t() @ _rows(x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, _bias_grad(rows, ctx.has_bias and ctx.needs_input_grad[2]), None


class _AllGatherLinear(torch.autograd.Function):
    """The rows of all members' x, @ w.T + b; x is a part of the rows, the weights are parts."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: _Setting
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting, ctx.has_bias = setting, bias is not None
        rows = _rows(x)
        out = rows.new_empty(rows.shape[0] * setting.size, weight.shape[0])
        setting.ops.all_gather_matmul(
            out, rows, weight.t(), bias, config=setting.config, group=setting.group, gather_dim=0
        )
        return out.view(x.shape[0] * setting.size, *x.shape[1:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        setting, rows, grad_x, grad_w = ctx.setting, _rows(grad), None, None
        if ctx.needs_input_grad[0]:
            grad_x = rows.new_empty(rows.shape[0] // setting.size, weight.shape[1])
            setting.ops.matmul_reduce_scatter(grad_x, rows, weight.detach(), group=setting.group)
            grad_x = grad_x.view(x.shape)
        if ctx.needs_input_grad[1] and not rows.shape[0]:
            grad_w = torch.zeros_like(weight)
        elif ctx.needs_input_grad[1]:  # (features in, all rows) @ (all rows, features out): shards along the inner one
            turned = rows.new_empty(weight.shape[1], weight.shape[0])
            setting.ops.all_gather_matmul(turned, _rows(x).t(), rows, group=setting.group, gather_dim=1)
            grad_w = turned.t()
        return grad_x, grad_w, _bias_grad(rows, ctx.has_bias and ctx.needs_input_grad[2]), None


class _LinearReduceScatter(torch.autograd.Function):
    """This member's rows of the sum of all members' x @ w.T, + b; x and the weights are parts."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: _Setting
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting, ctx.has_bias = setting, bias is not None
        rows = _rows(x)
        out = rows.new_empty(rows.shape[0] // setting.size, weight.shape[0])
        setting.ops.matmul_reduce_scatter(out, rows, weight.t(), bias, config=setting.config, group=setting.group)
        return out.view(x.shape[0] // setting.size, *x.shape[1:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        setting, rows, grad_x, grad_w, grad_b = ctx.setting, _rows(grad), None, None, None
        if ctx.needs_input_grad[0]:
            grad_x = rows.new_empty(rows.shape[0] * setting.size, weight.shape[1])
            setting.ops.all_gather_matmul(grad_x, rows, weight.detach(), group=setting.group, gather_dim=0)
            grad_x = grad_x.view(x.shape)
        if ctx.needs_input_grad[1] and not rows.shape[0]:
            grad_w = torch.zeros_like(weight)
        elif ctx.needs_input_grad[1]:
            grad_w = rows.new_empty(weight.shape[0], weight.shape[1])
            setting.ops.all_gather_matmul(grad_w, rows.t(), _rows(x), group=setting.group, gather_dim=1)
        if ctx.has_bias and ctx.needs_input_grad[2]:  # each member has seen its own rows only
            part = rows.sum(0, dtype=torch.float32)
            setting.ccl.all_reduce(part, part, group=setting.group)
            grad_b = part.to(grad.dtype)
        return grad_x, grad_w, grad_b, None


class _TakePart(torch.autograd.Function):
    """This member's part of the features; backwards, the parts of all."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, setting: _Setting) -> torch.Tensor:
        ctx.setting = setting
        return x.chunk(setting.size, -1)[setting.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        setting: _Setting = ctx.setting
        parts = grad.new_empty(setting.size, *grad.shape)
        setting.ccl.all_gather(parts, grad.contiguous(), group=setting.group)
        return torch.cat(list(parts), -1), None


# -- functions --------------------------------------------------------------------------------------------------------
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
    return _apply(_Linear, x, weight, bias, _Setting(context, group))


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
    setting = _Setting(context, group, config)
    _check("matmul_all_gather", setting, "linear_all_gather", x, weight, bias)
    return _apply(_LinearAllGather, x, weight, bias, setting)


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
    setting = _Setting(context, group, config)
    _check("matmul_all_reduce", setting, "linear_all_reduce", x, weight, bias)
    return _apply(_LinearAllReduce, x, weight, bias, setting)


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
    setting = _Setting(context, group, config)
    _check("all_gather_matmul", setting, "all_gather_linear", x, weight, bias, 1)
    return _apply(_AllGatherLinear, x, weight, bias, setting)


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
    setting = _Setting(context, group, config)
    _check("matmul_reduce_scatter", setting, "linear_reduce_scatter", x, weight, bias, setting.size)
    return _apply(_LinearReduceScatter, x, weight, bias, setting)


def _apply(
    function: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, setting: _Setting
) -> torch.Tensor:
    dtype = _autocast_dtype(x)
    if dtype is not None:  # torch differentiates the conversions
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        result: torch.Tensor = function.apply(x, weight, bias, setting)
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


# -- modules ----------------------------------------------------------------------------------------------------------
class _Parallel(torch.nn.Module):
    """What both layers have in common."""

    _divides_bias = False

    def __init__(
        self,
        context: Iris,
        in_features: int,
        out_features: int,
        shape: Sequence[int],
        bias_features: int | None,
        group: dist.ProcessGroup | Sequence[int] | None,
        dtype: torch.dtype | None,
        config: FusedConfig | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._context, self._group, self._config = context, group, config
        place = {"device": context.device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(*shape, **place))  # type: ignore[arg-type]
        if bias_features is None:
            self.register_parameter("bias", None)
        else:
            self.bias = torch.nn.Parameter(torch.empty(bias_features, **place))  # type: ignore[arg-type]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values, in the range of `torch.nn.Linear`.

        Members draw different ones, also after the same `torch.manual_seed` on all: it takes one number of torch's
        generator, and each member goes on from there by its own.  A bias that all members share becomes 0.  To begin
        with a layer that is not divided, `load_whole`.
        """
        generator = torch.Generator(self.weight.device)
        generator.manual_seed(int(torch.randint(1 << 48, ())) + _Setting(self._context, self._group).rank)
        bound = self.in_features**-0.5
        with torch.no_grad():
            self.weight.uniform_(-bound, bound, generator=generator)
            if self.bias is not None and self._divides_bias:
                self.bias.uniform_(-bound, bound, generator=generator)
            elif self.bias is not None:
                self.bias.zero_()

    def _load(self, weight: torch.Tensor, bias: torch.Tensor | None, dim: int) -> None:
        name, whole = type(self).__name__, (self.out_features, self.in_features)
        if tuple(weight.shape) != whole:
            raise ArgumentError(f"{name}: the whole weight is {whole}, not {tuple(weight.shape)}")
        if bias is not None and tuple(bias.shape) != whole[:1]:
            raise ArgumentError(f"{name}: the whole bias is {whole[:1]}, not {tuple(bias.shape)}")
        setting = _Setting(self._context, self._group)
        with torch.no_grad():
            self.weight.copy_(weight.chunk(setting.size, dim)[setting.rank])
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias.chunk(setting.size)[setting.rank] if self._divides_bias else bias)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A layer with parameters of its own, of the same context and group."""
        for shared in (self._context, self._group):
            memo[id(shared)] = shared
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        """Say the sizes of the whole layer."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class ColumnParallelLinear(_Parallel):
    """A linear layer whose output features are divided among the ranks of a group.

    Collective: every member makes it, and calls it.

    Args:
        context: the open Iris; the layer does not close it.
        in_features, out_features: of the whole layer; the ranks divide `out_features`.
        bias: whether there is one; it is divided like the output.
        group: a process group of torch.distributed, or a list of ranks; None for all.
        gather_output: return the features of all members instead of the own ones.
        sequence_parallel: x is this member's part of the first dimension, and is gathered; not with gather_output.
        dtype: of the parameters; torch's default if None.
        config: of the operation in the forward pass.

    Attributes:
        weight: (out_features / W, in_features).
        bias: (out_features / W,) or None.

    Raises:
        ArgumentError: the features cannot be divided, or the options contradict each other.

    Example:
        >>> import torch
        >>> from iris_core import Iris
        >>> from iris_core.nn import ColumnParallelLinear
        >>> with Iris("1MiB", device="cpu") as ctx:
        ...     ColumnParallelLinear(ctx, 4, 6)(torch.ones(2, 4)).shape
        torch.Size([2, 6])
    """

    _divides_bias = True

    def __init__(
        self,
        context: Iris,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        config: FusedConfig | None = None,
    ) -> None:
        if gather_output and sequence_parallel:
            raise ArgumentError(
                "ColumnParallelLinear: with sequence_parallel the next layer takes the features as they are divided; "
                "gather_output cannot be had, too"
            )
        if config is not None and not (gather_output or sequence_parallel):
            raise ArgumentError("ColumnParallelLinear: without gather_output or sequence_parallel nothing is fused")
        size = _division("ColumnParallelLinear", "out_features", out_features, context, group)
        part = out_features // size
        super().__init__(
            context,
            in_features,
            out_features,
            (part, in_features),
            part if bias else None,
            group,
            dtype,
            config,
        )
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel

    def load_whole(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take this member's part of the parameters of a layer that is not divided, as `torch.nn.Linear` has them.

        Raises:
            ArgumentError: they are not (out_features, in_features) and (out_features,).
        """
        self._load(weight, bias, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the own features, or those of all."""
        if self.sequence_parallel:
            return all_gather_linear(self._context, x, self.weight, self.bias, group=self._group, config=self._config)
        if self.gather_output:
            return linear_all_gather(self._context, x, self.weight, self.bias, group=self._group, config=self._config)
        return linear(self._context, x, self.weight, self.bias, group=self._group)


class RowParallelLinear(_Parallel):
    """A linear layer whose input features are divided among the ranks of a group.

    Collective: every member makes it, and calls it.

    Args:
        context: the open Iris; the layer does not close it.
        in_features, out_features: of the whole layer; the ranks divide `in_features`.
        bias: whether there is one; it is the same on all members, and added once.
        group: a process group of torch.distributed, or a list of ranks; None for all.
        input_is_parallel: x has this member's features; else it has all of them, and the layer takes its part.
        sequence_parallel: return this member's part of the first dimension instead of all of it.
        dtype: of the parameters; torch's default if None.
        config: of the operation in the forward pass.

    Attributes:
        weight: (out_features, in_features / W).
        bias: (out_features,) or None.

    Raises:
        ArgumentError: the features cannot be divided.
    """

    def __init__(
        self,
        context: Iris,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | Sequence[int] | None = None,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        config: FusedConfig | None = None,
    ) -> None:
        size = _division("RowParallelLinear", "in_features", in_features, context, group)
        super().__init__(
            context,
            in_features,
            out_features,
            (out_features, in_features // size),
            out_features if bias else None,
            group,
            dtype,
            config,
        )
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel

    def load_whole(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take this member's part of the parameters of a layer that is not divided, as `torch.nn.Linear` has them.

        Raises:
            ArgumentError: they are not (out_features, in_features) and (out_features,).
        """
        self._load(weight, bias, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the members, or this member's rows of it."""
        if not self.input_is_parallel:
            setting = _Setting(self._context, self._group)
            if x.shape[-1] != self.in_features:
                error = ArgumentError(
                    f"RowParallelLinear: x has shape {tuple(x.shape)}, and must have all {self.in_features} features"
                )
                op = "matmul_reduce_scatter" if self.sequence_parallel else "matmul_all_reduce"
                setting.ops.refuse(op, error, self._group)
            x = _TakePart.apply(x, setting)  # type: ignore[no-untyped-call]
        function = linear_reduce_scatter if self.sequence_parallel else linear_all_reduce
        return function(self._context, x, self.weight, self.bias, group=self._group, config=self._config)


def _division(
    layer: str, what: str, features: int, context: Iris, group: dist.ProcessGroup | Sequence[int] | None
) -> int:
    """Number of ranks that divide a layer's features."""
    size = len(context.ops.members_of(group))
    if features % size:
        raise ArgumentError(f"{layer}: the {size} ranks of the group cannot divide {what}={features} equally")
    return size
