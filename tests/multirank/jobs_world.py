"""Rank jobs of test_world: what happens when a rank cannot open, and contexts of some of the ranks."""

import torch
import torch.distributed as dist
from jobs_common import said

from iris_core import Iris


def opens_differently(first: dict[str, str], others: dict[str, str]) -> str:
    """Rank 0 and the others open with different options."""
    return said(lambda: Iris(**{"heap_size": "1MiB", **(others if dist.get_rank() else first)}))


def subgroups(device: str) -> tuple[int, int, float, str]:
    """Two worlds of two ranks inside a world of four; a barrier with the others is refused."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    with Iris("1MiB", device=device, group=mine) as ctx:
        x = ctx.full((4,), float(dist.get_rank()), dtype=torch.bfloat16)
        ctx.barrier()
        ctx.barrier(group=mine)
        other = ctx.broadcast(x, src=1)
        refusal = said(lambda: ctx.device_barrier(dist.group.WORLD))
        return ctx.cur_rank, ctx.num_ranks, float(other[0]), refusal


def another_default_device(device: str) -> list[float]:
    """torch's default device is not the context's; the exchanges between hosts stay on the CPU."""
    torch.set_default_device("meta")
    try:
        with Iris("1MiB", device=device) as ctx:
            x = ctx.full((2,), float(ctx.cur_rank))
            ctx.barrier()
            return x.tolist()
    finally:
        torch.set_default_device(None)
