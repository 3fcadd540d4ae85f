"""The system area of the heap, and the memory of teams."""

import jobs_memory as jobs
import pytest
from rank_counts import rank_counts


@pytest.mark.parametrize(("system_size", "workspace"), [("1MiB", "64KiB"), ("128KiB", "256KiB")])
def test_regions_of_teams(pool, system_size, workspace):
    first, second, third = pool.run(jobs.regions, 3, "cpu", system_size, workspace)
    assert first == third
    assert second == first[:1]


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_control_words_are_zero_where_memory_was_in_use(pool, num_ranks, device):
    assert pool.run(jobs.used_before, num_ranks, device) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", [4])
def test_a_group_gets_what_a_world_of_its_size_gets(pool, num_ranks, device):
    worlds = pool.run(jobs.what_a_group_gets, 2, device, [(0, 1)])
    groups = pool.run(jobs.what_a_group_gets, num_ranks, device, [(0, 2), (3, 1)])
    assert worlds[0] == worlds[1]
    assert groups == [worlds[0]] * num_ranks
    assert worlds[0][1] == [4 << 20, 16 << 20]


@pytest.mark.parametrize("num_ranks", [4])
def test_regions_of_groups_and_allocations_never_overlap(pool, num_ranks, device):
    results = pool.run(jobs.groups_beside_allocations, num_ranks, device)
    offsets = {}
    for counts, places in results:
        assert counts == results[0][0]
        for name, offset in places.items():
            assert offsets.setdefault(name, offset) == offset  # the same on all members
    assert sum(offset is not None for offset in offsets.values()) >= 8 or device != "cpu"
