"""`ctx.ccl.reduce_scatter` as a function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from iris_core.api import Iris
    from iris_core.ccl.config import Config
    from iris_core.ccl.reduce_op import ReduceOp
    from iris_core.protocols import Work


def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    op: ReduceOp | Any = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work | None:
    """Reduce the inputs of all members; each gets its part; see `iris_core.ccl.api.Collectives`.

    Collective: every member of the group calls it.

    Args:
        output, input: as `ctx.ccl.reduce_scatter` takes them.
        ctx: the open context.
        op, group, async_op, config: as there.
    """
    return ctx.ccl.reduce_scatter(output, input, op, group, async_op, config)
