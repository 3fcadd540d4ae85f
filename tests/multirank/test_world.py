"""The world of ranks: agreement, and groups.  What ends and diverges: test_faults, test_exchanges, tests/core."""

import jobs_world as jobs
import pytest


@pytest.mark.parametrize("num_ranks", [3])
def test_what_differs_or_fails_on_one_rank_is_told_to_the_others(pool, num_ranks, device):
    results = pool.run(jobs.opens_differently, num_ranks, {"device": device, "heap_size": "2MiB"}, {"device": device})
    for text in results:
        assert text.startswith("RankMismatchError: ")
        assert "heap_size: 2097152 on rank 0; 1048576 on ranks 1, 2" in text
    no_such = {"device": device, "allocator": "hots"}
    first, *others = pool.run(jobs.opens_differently, num_ranks, no_such, {"device": device})
    assert first.startswith("PluginNotFoundError")
    assert "host" in first
    assert all("rank 0" in text and "PluginNotFoundError" in text for text in others)
    first, *others = pool.run(
        jobs.opens_differently, num_ranks, {"device": device, "heap_size": "none"}, {"device": device}
    )
    assert "none" in first
    assert all("rank 0" in text and "none" in text for text in others), "also before there is a world"


@pytest.mark.parametrize("num_ranks", [4])
def test_worlds_of_subgroups(pool, num_ranks, device):
    results = pool.run(jobs.subgroups, num_ranks, device)
    assert [seen for *seen, _ in results] == [[0, 2, 1.0], [1, 2, 1.0], [0, 2, 3.0], [1, 2, 3.0]]
    for rank, (*_, refusal) in enumerate(results):
        strangers = "ranks 2, 3" if rank < 2 else "ranks 0, 1"
        assert f"has {strangers} of torch.distributed, outside of the ranks that share this heap" in refusal


@pytest.mark.parametrize("num_ranks", [2])
def test_the_default_device_of_torch_does_not_matter(pool, num_ranks, device):
    assert pool.run(jobs.another_default_device, num_ranks, device) == [[0.0, 0.0], [1.0, 1.0]]
