"""Layers that are divided among ranks, and the differentiable functions that they are made of.

Experts are in `expert_parallel`, norms in `norm`, divided sequences in `sequence`; this is about linear layers.

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
backward passes in an order that depends on the graph alone, that is so where the members' graphs are alike.  What is
communicated backwards is, whatever a member needs: but for `linear_all_reduce`, results require gradients.

x is (..., features); where rows are gathered or scattered, it is the first dimension that is divided, and everything in
front of the features counts as rows.  Results are ordinary tensors, not on the symmetric heap.  x, weight and bias have
one dtype; where autocast is on (torch.autocast), they are taken in its dtype, as torch.nn.functional.linear takes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iris_core.api import Iris
from iris_core.dispatch import PLAIN
from iris_core.dispatch.config import FusedConfig
from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.nn.expert_parallel import ExpertParallel, combine, dispatch
from iris_core.nn.norm import RMSNorm, all_reduce_rms_norm
from iris_core.nn.sequence import ring_attention, ulysses
from iris_core.nn.setting import NEEDED, Setting
from iris_core.types import Group

Fused = FusedConfig | None

__all__ = [
    "ColumnParallelLinear", "ExpertParallel", "RMSNorm", "RowParallelLinear", "all_gather_linear",
    "all_reduce_rms_norm", "combine", "dispatch", "linear", "linear_all_gather", "linear_all_reduce",
    "linear_reduce_scatter", "ring_attention", "ulysses",
]  # fmt: skip


_KINDS: dict[str, tuple[str | None, str | None]] = {
    "linear": (None, "matmul_all_reduce"),
    "linear_all_gather": ("matmul_all_gather", "matmul_all_reduce"),
    "linear_all_reduce": ("matmul_all_reduce", None),
    "all_gather_linear": ("all_gather_matmul", "matmul_reduce_scatter"),
    "linear_reduce_scatter": ("matmul_reduce_scatter", "all_gather_matmul"),
}
"""By function, its operation and that of the gradient of x; None where nothing is communicated."""


class _Function(torch.autograd.Function):
    """A function, as torch differentiates it; rows of x, of the result and of its gradient are matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, _: Any, s: Setting, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.setting, ctx.name, ctx.has_bias = s, name, bias is not None
        forward, rows = _KINDS[name][0], x.reshape(-1, x.shape[-1])
        if forward is None:
            out = torch.nn.functional.linear(rows, weight, bias)
        else:
            out = s.product(forward, rows.contiguous(), weight.t(), bias, config=s.config)
        if x.dim() < 2:
            return out.view(*x.shape[:-1], out.shape[1])
        first = {"all_gather_matmul": x.shape[0] * s.size, "matmul_reduce_scatter": x.shape[0] // s.size}
        return out.view(first.get(str(forward), x.shape[0]), *x.shape[1:-1], out.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        s: Setting = ctx.setting
        forward, backward = _KINDS[ctx.name]
        if forward == "matmul_all_gather":
            grad = grad.chunk(s.size, -1)[s.rank]
        rows, grad_x, grad_w, grad_b = _rows(grad), None, None, None
        if ctx.needs_input_grad[0] or backward is not None:  # others may need what is communicated
            grad_x = (rows @ weight if backward is None else s.product(backward, rows, weight)).view(x.shape)
        if ctx.needs_input_grad[1] or forward in ("all_gather_matmul", "matmul_reduce_scatter"):
            if not rows.shape[0]:
                grad_w = torch.zeros_like(weight)
            elif forward == "all_gather_matmul":  # (features in, all rows) @ (all rows, features out)
                grad_w = s.product(forward, _rows(x).t(), rows, inner=True).t()
            elif forward == "matmul_reduce_scatter":
                grad_w = s.product("all_gather_matmul", rows.t(), _rows(x), inner=True)
            else:
                grad_w = rows.t() @ _rows(x)
        if ctx.has_bias and (ctx.needs_input_grad[2] or forward == "matmul_reduce_scatter"):
            total = rows.sum(0, dtype=torch.float32)
            if forward == "matmul_reduce_scatter":  # each member has seen its own rows only
                s.ccl.all_reduce(total, total, group=s.group)
            grad_b = total.to(grad.dtype)
        return grad_x, grad_w, grad_b, None, None, None


def _rows(x: Tensor) -> Tensor:
    """Everything in front of the features as rows, contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


class _TakePart(torch.autograd.Function):
    """This member's part of the features; backwards, the parts of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _: Any, setting: Setting) -> Tensor:
        ctx.setting = setting
        return x.chunk(setting.size, -1)[setting.rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        parts = grad.new_empty(ctx.setting.size, *grad.shape)
        ctx.setting.ccl.all_gather(parts, grad.contiguous(), group=ctx.setting.group)
        return torch.cat(list(parts), -1), None, None


# -- functions --------------------------------------------------------------------------------------------------------
def linear(context: Iris, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Group = None) -> Tensor:
    """Return x @ weight.T + bias, the own features of a layer that is divided by output features: (..., out / W).

    Backwards, the gradient of x is the sum over the members: collective.

    Args:
        context: the open Iris.
        x: (..., in), the same on all members.
        weight: (out / W, in), this member's part.
        bias: (out / W,) or None.
        group: a process group of torch.distributed, or a list of ranks; None for all.

    Raises:
        ArgumentError: the shapes or dtypes do not fit.
        UnsupportedError: of a dtype.
    """
    return _apply("linear", x, weight, bias, Setting(context, group))


def linear_all_gather(
    context: Iris, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Group = None, config: Fused = None
) -> Tensor:
    """Return all features of a layer that is divided by output features: (..., out).

    Collective.  What follows is computed alike by all members, so the gradient of the result is the same on all.

    Args:
        context, x, weight, bias, group: as in `linear`, and so are the errors.
        config: a FusedConfig for matmul_all_gather.
    """
    return _apply("linear_all_gather", x, weight, bias, Setting(context, group, config))


def linear_all_reduce(
    context: Iris, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Group = None, config: Fused = None
) -> Tensor:
    """Return the sum of all members' x @ weight.T, + bias: (..., out), the same on all.

    Collective.

    Args:
        context, group: as in `linear`, and so are the errors.
        x: (..., in / W), this member's features.
        weight: (out, in / W), this member's part.
        bias: (out,), the same on all members, or None.
        config: a FusedConfig for matmul_all_reduce.
    """
    return _apply("linear_all_reduce", x, weight, bias, Setting(context, group, config))


def all_gather_linear(
    context: Iris, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Group = None, config: Fused = None
) -> Tensor:
    """Return the own features of a layer for the rows of all members: (rows, ..., out / W).

    Collective.

    Args:
        context, weight, bias, group: as in `linear`, and so are the errors.
        x: (rows / W, ..., in), this member's part of the sequence.
        config: a FusedConfig for all_gather_matmul.
    """
    return _apply("all_gather_linear", x, weight, bias, Setting(context, group, config))


def linear_reduce_scatter(
    context: Iris, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, group: Group = None, config: Fused = None
) -> Tensor:
    """Return this member's rows of the sum of all members' x @ weight.T, + bias: (rows / W, ..., out).

    Collective.

    Args:
        context, weight, group: as in `linear_all_reduce`, and so are the errors.
        x: (rows, ..., in / W), this member's features.
        bias: (out,), the same on all members, or None; its gradient is summed over the members.
        config: a FusedConfig for matmul_reduce_scatter.
    """
    return _apply("linear_reduce_scatter", x, weight, bias, Setting(context, group, config))


def _apply(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, setting: Setting) -> Tensor:
    forward, backward = _KINDS[name]
    try:
        if wrong := [each for each in (x, weight) if not isinstance(each, torch.Tensor)]:
            raise TypeError(f"{name}: x and the weight must be torch tensors, not {type(wrong[0]).__name__}")
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None
        _check(name, x, weight, bias, setting.size, dtype)
    except (ArgumentError, UnsupportedError, TypeError) as error:
        if forward is None:
            raise
        setting.ops.refuse(forward, error, setting.group)  # on all members that come to compare their call of it
    if dtype is not None:  # torch differentiates the conversions
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(x.device.type, enabled=False):
        given = x, weight, bias, NEEDED if backward else None, setting, name
        return _Function.apply(*given)  # type: ignore[no-any-return, no-untyped-call]


def _check(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, size: int, dtype: torch.dtype | None) -> None:
    """Raise unless a layer is possible; `dtype` is autocast's, or None."""
    dtypes = {what: each.dtype for what, each in (("x", x), ("weight", weight), ("bias", bias)) if each is not None}
    if dtype is None and len(set(dtypes.values())) > 1:
        said = ", ".join(f"{what} has {dtype}" for what, dtype in dtypes.items())
        raise ArgumentError(f"{name}: {said}; they must have one dtype, or autocast must be on")
    for each in dtypes.values():
        if str(each).removeprefix("torch.") not in PLAIN:  # the backward pass would be refused
            raise UnsupportedError(f"{name}: {each} is not supported; layers take float32, bfloat16 and float16")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ArgumentError(f"{name}: the weight must be a matrix with elements, not of shape {tuple(weight.shape)}")
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


# -- layers -----------------------------------------------------------------------------------------------------------
class _Parallel(torch.nn.Module):
    """The common part."""

    _dim: int
    """Dimension of the weight, (out_features, in_features), that is divided; where it is 0, the bias is, too."""

    bias: torch.nn.Parameter | None

    def __init__(
        self, setting: Setting, in_features: int, out_features: int, bias: bool, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        self._setting, self.in_features, self.out_features = setting, in_features, out_features
        shape, size, name = [out_features, in_features], setting.size, type(self).__name__
        if min(shape) < 1 or shape[self._dim] % size:
            part, given = ("out_features", "in_features")[self._dim], (in_features, out_features)
            raise ArgumentError(f"{name}: of {given} features, both must be above 0 and {part} a multiple of {size}")
        shape[self._dim] //= size
        weight = torch.empty(shape, device=setting.device, dtype=dtype)
        self.weight = torch.nn.Parameter(weight)
        self.register_parameter("bias", torch.nn.Parameter(weight.new_empty(shape[0])) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values, in the range of `torch.nn.Linear`.

        Members draw different ones, also after the same `torch.manual_seed` on all: it takes one number of torch's
        generator, and each member goes on from there by its own.  A bias that all members share becomes 0.  To begin
        with a layer that is not divided, `load_whole`.
        """
        generator = torch.Generator(self.weight.device)
        generator.manual_seed(int(torch.randint(1 << 48, ())) + self._setting.rank)
        bound = self.in_features**-0.5
        with torch.no_grad():
            self.weight.uniform_(-bound, bound, generator=generator)
            if self.bias is not None and self._dim == 0:
                self.bias.uniform_(-bound, bound, generator=generator)
            elif self.bias is not None:
                self.bias.zero_()

    def load_whole(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Take this member's part of the parameters of a layer that is not divided, as `torch.nn.Linear` has them.

        Raises:
            ArgumentError: they are not (out_features, in_features) and (out_features,).
        """
        whole = self.out_features, self.in_features
        for name, given, shape in (("weight", weight, whole), ("bias", bias, whole[:1])):
            if given is not None and tuple(given.shape) != shape:
                raise ArgumentError(f"{type(self).__name__}: the whole {name} is {shape}, not {tuple(given.shape)}")
        size, rank = self._setting.size, self._setting.rank
        with torch.no_grad():
            self.weight.copy_(weight.chunk(size, self._dim)[rank])
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias if self._dim else bias.chunk(size)[rank])

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

    _dim = 0

    def __init__(
        self, context: Iris, in_features: int, out_features: int, bias: bool = True, *, group: Group = None,
        gather_output: bool = False, sequence_parallel: bool = False, dtype: torch.dtype | None = None,
        config: Fused = None,
    ) -> None:  # fmt: skip
        if gather_output and sequence_parallel:
            raise ArgumentError(
                "ColumnParallelLinear: with sequence_parallel the next layer takes the features as they are divided; "
                "gather_output cannot be had, too"
            )
        if config is not None and not (gather_output or sequence_parallel):
            raise ArgumentError("ColumnParallelLinear: without gather_output or sequence_parallel nothing is fused")
        super().__init__(Setting(context, group, config), in_features, out_features, bias, dtype)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Return the own features, or those of all."""
        name = "linear_all_gather" if self.gather_output else "linear"
        return _apply("all_gather_linear" if self.sequence_parallel else name, x, self.weight, self.bias, self._setting)


class RowParallelLinear(_Parallel):
    """A linear layer whose input features are divided among the ranks of a group.

    Collective: every member makes it, and calls it.

    Args:
        context, group, dtype, config: as in `ColumnParallelLinear`.
        in_features, out_features: of the whole layer; the ranks divide `in_features`.
        bias: whether there is one; it is the same on all members, and added once.
        input_is_parallel: x has this member's features; else it has all of them, and the layer takes its part.
        sequence_parallel: return this member's part of the first dimension instead of all of it.

    Attributes:
        weight: (out_features, in_features / W).
        bias: (out_features,) or None.

    Raises:
        ArgumentError: the features cannot be divided.
    """

    _dim = 1

    def __init__(
        self, context: Iris, in_features: int, out_features: int, bias: bool = True, *, group: Group = None,
        input_is_parallel: bool = True, sequence_parallel: bool = False, dtype: torch.dtype | None = None,
        config: Fused = None,
    ) -> None:  # fmt: skip
        super().__init__(Setting(context, group, config), in_features, out_features, bias, dtype)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over the members, or this member's rows of it."""
        name = "linear_reduce_scatter" if self.sequence_parallel else "linear_all_reduce"
        if not self.input_is_parallel:
            if x.shape[-1:] != (self.in_features,):
                said = f"RowParallelLinear: x, {tuple(x.shape)}, must have all {self.in_features} features"
                self._setting.ops.refuse(str(_KINDS[name][0]), ArgumentError(said), self._setting.group)
            x = _TakePart.apply(x, NEEDED, self._setting)  # type: ignore[no-untyped-call]
        return _apply(name, x, self.weight, self.bias, self._setting)
