"""`ctx.ccl.all_gather` as a function."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from iris_core.api import Iris
    from iris_core.ccl.config import Config
    from iris_core.protocols import Work


def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work | None:
    """Put the inputs of all members into the output of each; see `iris_core.ccl.api.Collectives`.

    Collective: every member of the group calls it.

    Args:
        output, input: as `ctx.ccl.all_gather` takes them.
        ctx: the open context.
        group, async_op, config: as there.
    """
    return ctx.ccl.all_gather(output, input, group, async_op, config)
