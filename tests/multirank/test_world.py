"""The world of ranks: agreement, and groups.  What ends and diverges: test_faults, test_exchanges, tests/core."""

import pytest
import torch
import torch.distributed as dist
from jobs_common import said_by

from iris_core import Iris


def opens_differently(first: dict[str, str], others: dict[str, str]) -> str:
    return said_by(lambda: Iris(**{"heap_size": "1MiB", **(others if dist.get_rank() else first)}))


def subgroups(device: str) -> tuple[int, int, float, str]:
    """Two worlds of two ranks inside a world of four; a barrier with the others is refused."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = halves[dist.get_rank() // 2]
    with Iris("1MiB", device=device, group=mine) as ctx:
        x = ctx.full((4,), float(dist.get_rank()), dtype=torch.bfloat16)
        ctx.barrier()
        ctx.barrier(group=mine)
        other = ctx.broadcast(x, src=1)
        refusal = said_by(lambda: ctx.device_barrier(dist.group.WORLD))
        return ctx.cur_rank, ctx.num_ranks, float(other[0]), refusal


def another_default_device(device: str) -> list[float]:
    torch.set_default_device("meta")
    try:
        with Iris("1MiB", device=device) as ctx:
            x = ctx.full((2,), float(ctx.cur_rank))
            ctx.barrier()
            return x.tolist()
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("num_ranks", [3])
def test_what_differs_or_fails_on_one_rank_is_told_to_the_others(pool, num_ranks, device):
    results = pool.run(opens_differently, num_ranks, {"device": device, "heap_size": "2MiB"}, {"device": device})
    for text in results:
        assert text.startswith("RankMismatchError: ")
        assert "heap_size: 2097152 on rank 0; 1048576 on ranks 1, 2" in text
    no_such = {"device": device, "allocator": "hots"}
    first, *others = pool.run(opens_differently, num_ranks, no_such, {"device": device})
    assert first.startswith("PluginNotFoundError")
    assert "host" in first
    assert all("rank 0" in text and "PluginNotFoundError" in text for text in others)
    first, *others = pool.run(opens_differently, num_ranks, {"device": device, "heap_size": "none"}, {"device": device})
    assert "none" in first
    assert all("rank 0" in text and "none" in text for text in others), "also before there is a world"


@pytest.mark.parametrize("num_ranks", [4])
def test_worlds_of_subgroups(pool, num_ranks, device):
    results = pool.run(subgroups, num_ranks, device)
    assert [seen for *seen, _ in results] == [[0, 2, 1.0], [1, 2, 1.0], [0, 2, 3.0], [1, 2, 3.0]]
    for rank, (*_, refusal) in enumerate(results):
        strangers = "ranks 2, 3" if rank < 2 else "ranks 0, 1"
        assert f"has {strangers} of torch.distributed, outside of the ranks that share this heap" in refusal


@pytest.mark.parametrize("num_ranks", [2])
def test_the_default_device_of_torch_does_not_matter(pool, num_ranks, device):
    assert pool.run(another_default_device, num_ranks, device) == [[0.0, 0.0], [1.0, 1.0]]
