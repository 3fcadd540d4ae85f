"""RMSNorm after a sum over ranks, with gradients: what stands between two layers under tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iris_core.api import Iris
from iris_core.dispatch.config import Config
from iris_core.nn.setting import Setting
from iris_core.types import Group


class _Norm(torch.autograd.Function):
    """The rest is computed alike by all members, so the gradient of the sum is that of each one's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float, s: Setting) -> tuple[Tensor, Tensor]:
        stream, out = residual.clone(memory_format=torch.contiguous_format), torch.empty_like(x)
        s.ops.all_reduce_rms_norm(out, stream, x, weight, eps, config=s.config, group=s.group)
        ctx.save_for_backward(stream, weight)
        ctx.eps = eps
        return out, stream

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_stream: Tensor) -> tuple[Any, ...]:
        stream, weight = ctx.saved_tensors
        total, of_weight = norm_gradients(stream, weight, grad, grad_stream, ctx.eps)
        return total, total, of_weight, None, None


def norm_gradients(
    stream: Tensor, weight: Tensor, grad: Tensor, grad_stream: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of a residual, to which nothing is added any more, and of the weight.

    Args:
        stream, weight, eps: of the norm.
        grad, grad_stream: of its result, and of the residual as later layers use it.
    """
    wide, of_out = stream.float(), grad.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed, of_normed = wide * scale, of_out * weight.float()
    total = scale * (of_normed - normed * (of_normed * normed).mean(-1, keepdim=True)) + grad_stream.float()
    of_weight = (of_out * normed).reshape(-1, weight.shape[0]).sum(0)
    return total.to(stream.dtype), of_weight.to(weight.dtype)


def all_reduce_rms_norm(
    context: Iris, x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, *, group: Group = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of the residual plus the sum of all members' x, and that new residual: (..., hidden) both.

    Collective; the backward pass communicates nothing.

    Args:
        context: the open Iris.
        x: (..., hidden), this member's part of the sum: float32, float16 or bfloat16.
        residual: (..., hidden) of x's dtype, the same on all members.
        weight: (hidden,), the same on all members.
        eps: added to the mean of the squares.
        group: a process group of torch.distributed, or a list of ranks; None for all.
        config: of the operation; see `ctx.ops.all_reduce_rms_norm`.

    Raises:
        ArgumentError: the shapes or dtypes do not fit.
        UnsupportedError: of a dtype.
    """
    return _apply(Setting(context, group, config), x, residual, weight, eps)


def _apply(setting: Setting, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    given = x.contiguous(), residual.contiguous(), weight.contiguous()
    return _Norm.apply(*given, eps, setting)  # type: ignore[no-any-return, no-untyped-call]


class RMSNorm(torch.nn.Module):
    """RMSNorm of a residual to which the parts of all ranks are added first; see `all_reduce_rms_norm`.

    It takes what a `RowParallelLinear` would sum: the products of a linear layer's parts.

    Collective: every member makes it, and calls it.

    Args:
        context: the open Iris; the layer does not close it.
        hidden: elements of a row.
        eps, group, config: as in `all_reduce_rms_norm`.
        dtype: of the weight; torch's default if None.

    Attributes:
        weight: (hidden,), 1 at first.

    Example:
        >>> import torch
        >>> from iris_core import Iris
        >>> from iris_core.nn import RMSNorm
        >>> with Iris("1MiB", device="cpu") as ctx:
        ...     out, residual = RMSNorm(ctx, 4)(torch.full((2, 4), 3.0), torch.ones(2, 4))
        ...     print(residual[0].tolist(), round(out[0, 0].item(), 3))
        [4.0, 4.0, 4.0, 4.0] 1.0
    """

    def __init__(
        self, context: Iris, hidden: int, eps: float = 1e-6, *, group: Group = None, dtype: torch.dtype | None = None,
        config: Config | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._setting = Setting(context, group, config)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden, device=context.device, dtype=dtype))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm, and the new residual."""
        return _apply(self._setting, x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Say the size."""
        return f"{self.weight.shape[0]}, eps={self.eps}"
