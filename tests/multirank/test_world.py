"""The world of ranks: agreement, and groups.  What ends and diverges: test_faults, test_exchanges, tests/core."""

import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from jobs_common import environment, said_by, unlike

from iris_core import Iris


def opens_differently(device: str, what: str, first: object, others: object) -> str:
    """An opening in which rank 0 has another value of an argument or variable."""
    value = others if dist.get_rank() else first
    variables, arguments = ({what: value}, {}) if what.isupper() else ({}, {what: value})
    with environment(**variables):
        return said_by(lambda: Iris(**{"device": device, "heap_size": "1MiB", **arguments}))


def subgroups(device: str) -> None:
    """Two worlds of two ranks inside a world of four, whatever torch's default device; barriers of all are refused."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank, mine = dist.get_rank(), halves[dist.get_rank() // 2]
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    bare = mock.patch.dict(os.environ, variables, clear=True)  # as torch.multiprocessing starts ranks
    with bare, torch.device("meta"), Iris("1MiB", device=device, group=mine) as ctx:
        x = ctx.full((4,), float(rank), dtype=torch.bfloat16)
        ctx.barrier()
        ctx.barrier(group=mine)
        other = ctx.broadcast(x, src=1)
        assert (ctx.cur_rank, ctx.num_ranks, float(other[0])) == (rank % 2, 2, rank // 2 * 2 + 1)
        strangers = "ranks 2, 3" if rank < 2 else "ranks 0, 1"
        words = f".*{strangers} of torch.distributed"
        assert unlike((words, lambda: ctx.device_barrier(dist.group.WORLD))) == []


@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize(("what", "first", "others", "words"), [
    ("heap_size", "2MiB", "1MiB", "RankMismatchError: .*heap_size: 2097152 on rank 0; 1048576 on ranks 1, 2"),
    ("deterministic", True, False, "RankMismatchError: .*deterministic"),
    ("IRIS_CCL_WORKSPACE", "1MiB", "2MiB", "RankMismatchError: .*IRIS_CCL_WORKSPACE: 1048576 on rank 0; 2097152 on"),
    ("allocator", "hots", None, "(.*rank 0.*)?PluginNotFoundError"),
    ("heap_size", "none", "1MiB", "(.*rank 0)?.*none"),  # also before there is a world
])  # fmt: skip
def test_what_differs_or_fails_on_one_rank_is_told_to_the_others(pool, num_ranks, device, what, first, others, words):
    for rank, text in enumerate(pool.run(opens_differently, num_ranks, device, what, first, others)):
        assert re.match(words, text, re.DOTALL), text
        assert rank == 0 or "rank 0" in text


@pytest.mark.parametrize("num_ranks", [4])
def test_worlds_of_subgroups(pool, num_ranks, device):
    assert pool.run(subgroups, num_ranks, device) == [None] * num_ranks
