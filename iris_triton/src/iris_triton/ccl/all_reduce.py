"""`ctx.ccl.all_reduce` and its preamble as functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from iris_core.ccl.config import Config
    from iris_core.ccl.reduce_op import ReduceOp
    from iris_triton.porting.collectives import AllReduceWorkspace
    from iris_triton.porting.context import Iris


def all_reduce(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    op: ReduceOp | Any = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    config: Config | None = None,
    workspace: AllReduceWorkspace | None = None,
) -> AllReduceWorkspace:
    """Reduce the inputs of all members into the output of each; see `iris_core.ccl.api.Collectives`.

    Collective: every member of the group calls it.

    Args:
        output, input: as `ctx.ccl.all_reduce` takes them.
        ctx: a context of `iris_triton.iris`.
        op, group, async_op, config, workspace: as there.
    """
    return ctx.ccl.all_reduce(output, input, op, group, async_op, config, workspace)


def all_reduce_preamble(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    config: Config | None = None,
    workspace: AllReduceWorkspace | None = None,
) -> AllReduceWorkspace:
    """Check a call and return its workspace; see `iris_triton.porting.collectives.PortedCollectives`.

    Args:
        output, input, config, workspace: as `ctx.ccl.all_reduce_preamble` takes them.
        ctx: a context of `iris_triton.iris`.
    """
    return ctx.ccl.all_reduce_preamble(output, input, config, workspace)
