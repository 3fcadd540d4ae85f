"""`ctx.ccl.all_to_all` as a function."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from iris_core.api import Iris
    from iris_core.ccl.config import Config
    from iris_core.protocols import Work


def all_to_all(
    output: torch.Tensor,
    input: torch.Tensor,
    ctx: Iris,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    config: Config | None = None,
) -> Work | None:
    """Give each member its part of the input; see `iris_core.ccl.api.Collectives`.

    Collective: every member of the group calls it.

    Args:
        output, input: as `ctx.ccl.all_to_all` takes them.
        ctx: the open context.
        group, async_op, config: as there.
    """
    return ctx.ccl.all_to_all(output, input, group, async_op, config)
