"""Groups of ranks as the reference system describes them: a first rank and a stride."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

from iris_core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch.distributed as dist

    from iris_core.api import Iris


class GroupInfo(NamedTuple):
    """A group in which member i is rank rank_start + i * rank_stride.

    Attributes:
        rank_in_group: this rank's number in it.
        rank_global: this rank in the context's world.
        world_size: number of members.
        rank_start: the first member.
        rank_stride: from one member to the next; 1 for a group of one.
    """

    rank_in_group: int
    rank_global: int
    world_size: int
    rank_start: int
    rank_stride: int


def extract_group_info(group: dist.ProcessGroup | None, ctx: Iris) -> GroupInfo:
    """Return a group as first rank and stride, for kernels that work on such groups only.

    Local.  Our own collectives need no strides: they take any ranks in any order.

    Args:
        group: a process group of torch.distributed; None for all ranks.
        ctx: the open context.

    Raises:
        GroupError: (a RuntimeError) this rank is not a member.
        UnsupportedError: (a NotImplementedError) the members are not the same distance apart.
    """
    members = ctx.ops.members_of(group)
    stride = members[1] - members[0] if len(members) > 1 else 1
    if any(later - earlier != stride for earlier, later in itertools.pairwise(members)):
        raise UnsupportedError(f"the group's ranks {list(members)} are not the same distance apart")
    rank = ctx.get_rank()
    return GroupInfo(members.index(rank), rank, len(members), members[0], stride)
