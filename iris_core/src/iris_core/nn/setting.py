"""Where and how the functions of `iris_core.nn` communicate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris_core.api import Iris
from iris_core.types import Group

if TYPE_CHECKING:
    from torch import Tensor


NEEDED = torch.empty(0, device="cpu", requires_grad=True)  # so autograd records what another member may need


class Setting:
    """Where and how a function communicates; the config is of the operation that is the forward pass."""

    def __init__(self, context: Iris, group: Group, config: Any = None) -> None:
        members = context.ops.members_of(group)
        self.ops, self.ccl, self.device = context.ops._anywhere, context.ccl._anywhere, context.device
        self.rank, self.size = members.index(context.cur_rank), len(members)
        self.group, self.config = group, config

    def __deepcopy__(self, memo: Any) -> Setting:
        return self  # a copied layer has parameters of its own, and the same context and group

    def product(self, op: str, a: Tensor, b: Tensor, *bias: Any, inner: bool = False, config: Any = None) -> Tensor:
        """Return the result of an operation; `inner` is whether all_gather_matmul gathers the inner dimension."""
        rows, columns, more = a.shape[0], b.shape[1], {}
        if op == "matmul_all_gather":
            columns, more = columns * self.size, {"gather_dim": 1}
        elif op == "all_gather_matmul":
            rows, more = (rows, {"gather_dim": 1}) if inner else (rows * self.size, {"gather_dim": 0})
        elif op == "matmul_reduce_scatter":
            rows //= self.size
        out = a.new_empty(rows, columns)
        getattr(self.ops, op)(out, a, b, *bias, config=config, group=self.group, **more)
        return out
