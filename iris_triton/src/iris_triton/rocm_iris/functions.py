"""`ctx.ccl` as functions of a context: `from iris.ccl.all_gather import all_gather`.

Each is the method of the same name, with the context as third argument.  Collective: every member of the group calls
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from iris_core.dispatch.config import Config
    from iris_core.protocols import Work
    from iris_core.types import ReduceOp
    from iris_triton.rocm_iris.collectives import AllReduceWorkspace
    from iris_triton.rocm_iris.ported_context import Iris


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work | None:
    """Put the inputs of all members into the output of each; see `iris_core.ccl.api.Collectives`."""
    return ctx.ccl.all_gather(output, input, group, async_op, config)


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
    """Reduce the inputs of all members into the output of each; see `iris_core.ccl.api.Collectives`."""
    return ctx.ccl.all_reduce(output, input, op, group, async_op, config, workspace)


def all_reduce_preamble(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    config: Config | None = None,
    workspace: AllReduceWorkspace | None = None,
) -> AllReduceWorkspace:
    """Check a call and return its workspace; see `iris_triton.rocm_iris.collectives.PortedCollectives`."""
    return ctx.ccl.all_reduce_preamble(output, input, config, workspace)


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work | None:
    """Give each member its part of the input; see `iris_core.ccl.api.Collectives`."""
    return ctx.ccl.all_to_all(output, input, group, async_op, config)


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    op: ReduceOp | Any = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work | None:
    """Reduce the inputs of all members; each gets its part; see `iris_core.ccl.api.Collectives`."""
    return ctx.ccl.reduce_scatter(output, input, op, group, async_op, config)
