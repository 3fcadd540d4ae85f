"""Layers whose experts are divided among ranks: tokens to their experts and back, with gradients.

What goes to the experts forwards comes back from them backwards, and what comes back goes there (Lepikhin et al.,
GShard, 2020; Fedus et al., Switch Transformers, 2021):

| function | result | gradient of its rows | gradient of the weights |
|---|---|---|---|
| `dispatch` | rows of this rank's experts | `combine`, unweighted | |
| `combine` | the weighted sum of each token's results | `dispatch`, weighted | local |

Both are recorded on every member, and linked, whatever needs gradients there: else it would not take part backwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from iris_core.errors import ArgumentError
from iris_core.nn.setting import NEEDED
from iris_core.ops.experts import Dispatched, ExpertGroup, Turn


class _Dispatch(torch.autograd.Function):
    """Tokens to their experts, and the link to `_Combine`; `turns` takes the turn, which is no tensor."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, chosen: Tensor, weights: Tensor | None, _: Tensor, group: Any, turns: list[Turn]
    ) -> tuple[Tensor, Tensor]:
        rows, _counts, turn = group.dispatch(x, chosen, weights, keep=True)
        turns.append(turn)
        ctx.turn = replace(turn, weights=None)
        ctx.save_for_backward(chosen)  # it must not change
        return rows, rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        (chosen,) = ctx.saved_tensors
        turn = replace(ctx.turn, chosen=chosen)
        return turn.group.combine(grad.contiguous(), turn), None, None, None, None, None


class _Combine(torch.autograd.Function):
    """Results back to the tokens' ranks; of those of each choice, the weights' gradients are made."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, _: Tensor | None, turn: Turn) -> Tensor:
        out = turn.group.combine(y, turn)
        results = turn.group.results_of(turn).clone() if ctx.needs_input_grad[1] else None
        ctx.turn = replace(turn, weights=None, link=None)
        ctx.save_for_backward(turn.chosen, weights, results)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        chosen, weights, results = ctx.saved_tensors
        group, grad, grad_weights = ctx.turn.group, grad.contiguous(), None
        grad_y = group.dispatch(grad, chosen, weights, weighted=weights is not None, keep=True).rows
        if results is not None:
            grad_weights = group.weight_gradients(grad, results, replace(ctx.turn, chosen=chosen))
        return grad_y, grad_weights, grad.new_empty(0) if ctx.needs_input_grad[2] else None, None


def dispatch(group: ExpertGroup, x: Tensor, chosen: Tensor, weights: Tensor | None = None) -> Dispatched:
    """Give each token to its experts' ranks, and get those of this rank's experts, as `ExpertGroup.dispatch` does.

    The rows are a copy, and 0 from `turn.offsets[-1]` on, so that other turns may come before the backward pass.

    Collective: every member of the group calls it, and later its backward pass, in the same order.

    Args:
        group: what `ctx.ops.experts` returns; without scales, and its results have the tokens' dtype.
        x: (n, hidden) of the group's dtype, its gradient is the sum of those of its rows.
        chosen: int32 or int64 (n, top_k).
        weights: float32 (n, top_k), for `combine`, which makes their gradient; None for 1.

    Raises:
        ArgumentError: shapes or dtypes do not fit, or the group has scales or results of another dtype.
    """
    if group.result is not group.dtype:
        raise ArgumentError(
            f"dispatch: gradients need results of the tokens' dtype, not {group.result} of {group.dtype}"
        )
    turns: list[Turn] = []
    given = x.contiguous(), chosen.contiguous(), None if weights is None else weights.contiguous()
    rows, link = _Dispatch.apply(*given, NEEDED, group, turns)  # type: ignore[no-untyped-call]
    turn = replace(turns[0], weights=given[2], link=link)
    return Dispatched(rows, turn.counts, turn)


def combine(y: Tensor, turn: Turn) -> Tensor:
    """Give results back to the tokens' ranks, and return the weighted sum of each token's: (n, hidden).

    Collective, like `dispatch`.

    Args:
        y: (capacity, hidden) of the group's dtype: the results of the rows.
        turn: that of a `dispatch` of this module.

    Raises:
        ArgumentError: shapes or dtypes do not fit.
    """
    return _Combine.apply(y.contiguous(), turn.weights, turn.link, turn)  # type: ignore[no-any-return, no-untyped-call]


class ExpertParallel(torch.nn.Module):
    """A layer of experts (MoE) that are divided among the ranks of a group; a router has chosen them.

    Collective: every member calls it and, if one of them does, runs its backward pass, whatever needs gradients there;
    without `torch.no_grad` the result always requires them.  No host waits for a number of tokens, and what `experts`
    launches should not, either: then graphs capture forward and backward pass.

    Args:
        group: what `ctx.ops.experts` returns; layers may share one.  See `dispatch`.
        experts: called with rows (capacity, hidden), `counts` int32 (n,) and `offsets` int32 (n + 1,) of this rank's n
            experts; returns their results, (capacity, hidden).  Rows of expert i are those from `offsets[i]` to
            `offsets[i + 1]`; what follows the last one is 0, and of no meaning in the results.

    Example:
        >>> import torch
        >>> from iris_core import Iris
        >>> from iris_core.nn import ExpertParallel
        >>> with Iris("4MiB", device="cpu") as ctx:
        ...     group = ctx.ops.experts(8, 16, 2, top_k=1, dtype=torch.float32)
        ...     w = torch.ones(2, 16, 16, requires_grad=True)
        ...     grouped = lambda rows, _, offsets: torch.nn.functional.grouped_mm(rows, w, offs=offsets[1:])
        ...     layer = ExpertParallel(group, grouped)
        ...     layer(torch.ones(3, 16), torch.tensor([[1], [0], [1]])).sum().backward()
        ...     print(w.grad[:, 0, 0].tolist())
        [1.0, 2.0]
    """

    def __init__(self, group: ExpertGroup, experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.group, self.experts = group, experts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weighted sums of the results of each token's experts, (..., hidden), in the group's dtype.

        Args:
            x: (..., hidden) of any float dtype.
            chosen: int32 or int64 (..., top_k); -1 is no choice.
            weights: (..., top_k) of any float dtype; None for 1.
        """
        group = self.group
        for name, each in (("chosen", chosen), ("weights", weights)):
            if each is not None and each.shape[:-1] != x.shape[:-1]:
                raise ArgumentError(f"ExpertParallel: {name} {tuple(each.shape)} does not fit x {tuple(x.shape)}")
        tokens, choices = x.reshape(-1, x.shape[-1]).to(group.dtype), chosen.reshape(-1, chosen.shape[-1])
        factors = None if weights is None else weights.reshape(-1, weights.shape[-1]).float()
        if torch.is_grad_enabled():
            rows, counts, turn = dispatch(group, tokens, choices, factors)
            out = combine(self.experts(rows, counts, turn.offsets).to(group.result), turn)
        else:  # nothing has to stay
            given = tokens.contiguous(), choices.contiguous(), None if factors is None else factors.contiguous()
            rows, counts, turn = group.dispatch(*given)
            out = group.combine(self.experts(rows, counts, turn.offsets).to(group.result).contiguous(), turn)
        return out.view(*x.shape[:-1], group.hidden)

    def extra_repr(self) -> str:
        """Say what the group is."""
        return f"experts={self.group.experts}, hidden={self.group.hidden}, top_k={self.group.top_k}"
