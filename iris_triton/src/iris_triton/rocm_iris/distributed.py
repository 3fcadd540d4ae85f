"""`iris.host.distributed.helpers` of AMD's Iris: groups as first rank and stride, and exchanges of torch.distributed.

All ranks of torch.distributed take part in the exchanges.  A world that `iris_core.run` has started has none, so that
they raise GroupError there (`ctx.broadcast` works in every world).
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from iris_core.errors import ArgumentError, GroupError, UnsupportedError

if TYPE_CHECKING:
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


def extract_group_info(group: dist.ProcessGroup | None, ctx: Iris | int, num_ranks: int = 0) -> GroupInfo:
    """Return a group as first rank and stride, for kernels that work on such groups only.

    Local.  Our own collectives need no strides: they take any ranks in any order.

    Args:
        group: a process group of torch.distributed; None for all ranks.
        ctx: the open context; or this rank.
        num_ranks: number of ranks, where the second argument is a rank.

    Raises:
        GroupError: (a RuntimeError) this rank is not a member.
        UnsupportedError: (a NotImplementedError) the members are not the same distance apart.
    """
    if isinstance(ctx, int):
        rank = ctx
        members = tuple(range(num_ranks) if group is None else dist.get_process_group_ranks(group))
        if rank not in members:
            raise GroupError(f"rank {rank} is not a member of the group of ranks {list(members)}")
    else:
        rank, members = ctx.get_rank(), ctx.ops.members_of(group)
    stride = members[1] - members[0] if len(members) > 1 else 1
    if any(later - earlier != stride for earlier, later in itertools.pairwise(members)):
        raise UnsupportedError(f"the group's ranks {list(members)} are not the same distance apart")
    return GroupInfo(members.index(rank), rank, len(members), members[0], stride)


def init_distributed() -> tuple[None, int, int]:
    """Return (None, this rank, number of ranks) of torch.distributed.

    Raises:
        GroupError: (a RuntimeError) torch.distributed is not initialised; so do all functions below.
    """
    if not dist.is_initialized():
        raise GroupError("torch.distributed is not initialised: call torch.distributed.init_process_group first")
    return None, dist.get_rank(), dist.get_world_size()


def distributed_barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait for the ranks of a group, or all."""
    init_distributed()
    dist.barrier(group)


def distributed_allgather(data: Any) -> np.ndarray:
    """Return the arrays of all ranks, which have one dimension and equal shapes, as rows of a matrix."""
    array = np.asarray(data)
    if array.ndim != 1:
        raise ArgumentError(f"distributed_allgather: needs an array of one dimension, not {array.ndim}")
    return distributed_allgather_multidim(array)


def distributed_allgather_multidim(data: Any) -> np.ndarray:
    """Return the tensors of all ranks, which have equal shapes, flattened, as rows of a matrix."""
    found: list[Any] = [None] * init_distributed()[2]
    dist.all_gather_object(found, torch.as_tensor(data).cpu().numpy().reshape(-1))
    return np.stack(found)


def distributed_broadcast_scalar(value: Any = None, root: int = 0) -> Any:
    """Return the value of rank `root`."""
    if init_distributed()[1] == root and value is None:
        raise ArgumentError(f"rank {root} broadcasts its value and has none")
    found = [value]
    dist.broadcast_object_list(found, src=root)
    return found[0]


def distributed_broadcast_tensor(value_to_broadcast: Any = None, root: int = 0) -> np.ndarray:
    """Return the tensor or array of rank `root` as an array."""
    value = value_to_broadcast
    array = None if value is None else torch.as_tensor(value).cpu().numpy()
    found: np.ndarray = distributed_broadcast_scalar(array, root)
    return found
