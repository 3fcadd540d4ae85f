"""Linear layers that are divided among the ranks of a group."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import ArgumentError
from iris_core.nn.functional import (
    Setting,
    TakePart,
    all_gather_linear,
    linear,
    linear_all_gather,
    linear_all_reduce,
    linear_reduce_scatter,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from iris_core.api import Iris
    from iris_core.dispatch.config import FusedConfig


class _Parallel(torch.nn.Module):
    """The common part."""

    _divides_bias = False
    """Whether output features are divided, and with them the bias; else input features."""

    def __init__(
        self,
        context: Iris,
        in_features: int,
        out_features: int,
        bias: bool,
        group: dist.ProcessGroup | Sequence[int] | None,
        dtype: torch.dtype | None,
        config: FusedConfig | None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._context, self._group, self._config = context, group, config
        name = "out_features" if self._divides_bias else "in_features"
        features, size = getattr(self, name), len(context.ops.members_of(group))
        if features % size:
            layer = type(self).__name__
            raise ArgumentError(f"{layer}: the {size} ranks of the group cannot divide {name}={features} equally")
        rows, columns = (features // size, in_features) if self._divides_bias else (out_features, features // size)
        place = {"device": context.device, "dtype": dtype}
        self.weight = torch.nn.Parameter(torch.empty(rows, columns, **place))  # type: ignore[arg-type]
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(rows, **place))  # type: ignore[arg-type]
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new values, in the range of `torch.nn.Linear`.

        Members draw different ones, also after the same `torch.manual_seed` on all: it takes one number of torch's
        generator, and each member goes on from there by its own.  A bias that all members share becomes 0.  To begin
        with a layer that is not divided, `load_whole`.
        """
        generator = torch.Generator(self.weight.device)
        generator.manual_seed(int(torch.randint(1 << 48, ())) + Setting(self._context, self._group).rank)
        bound = self.in_features**-0.5
        with torch.no_grad():
            self.weight.uniform_(-bound, bound, generator=generator)
            if self.bias is not None and self._divides_bias:
                self.bias.uniform_(-bound, bound, generator=generator)
            elif self.bias is not None:
                self.bias.zero_()

    def load_whole(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """Take this member's part of the parameters of a layer that is not divided, as `torch.nn.Linear` has them.

        Raises:
            ArgumentError: they are not (out_features, in_features) and (out_features,).
        """
        name, whole = type(self).__name__, (self.out_features, self.in_features)
        if tuple(weight.shape) != whole:
            raise ArgumentError(f"{name}: the whole weight is {whole}, not {tuple(weight.shape)}")
        if bias is not None and tuple(bias.shape) != whole[:1]:
            raise ArgumentError(f"{name}: the whole bias is {whole[:1]}, not {tuple(bias.shape)}")
        setting = Setting(self._context, self._group)
        with torch.no_grad():
            self.weight.copy_(weight.chunk(setting.size, 0 if self._divides_bias else 1)[setting.rank])
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
        super().__init__(context, in_features, out_features, bias, group, dtype, config)
        self.gather_output, self.sequence_parallel = gather_output, sequence_parallel

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
        super().__init__(context, in_features, out_features, bias, group, dtype, config)
        self.input_is_parallel, self.sequence_parallel = input_is_parallel, sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the members, or this member's rows of it."""
        if not self.input_is_parallel:
            setting = Setting(self._context, self._group)
            if x.shape[-1] != self.in_features:
                error = ArgumentError(
                    f"RowParallelLinear: x has shape {tuple(x.shape)}, and must have all {self.in_features} features"
                )
                op = "matmul_reduce_scatter" if self.sequence_parallel else "matmul_all_reduce"
                setting.ops.refuse(op, error, self._group)
            x = TakePart.apply(x, setting)  # type: ignore[no-untyped-call]
        function = linear_reduce_scatter if self.sequence_parallel else linear_all_reduce
        return function(self._context, x, self.weight, self.bias, group=self._group, config=self._config)
