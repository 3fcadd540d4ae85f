"""ctx.device_barrier() between GPUs: the jobs of tests/multirank, and capture in graphs."""

import pytest
from jobs_device_barrier import captured, exchange, groups, refused, stays_away

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("sem", ["release", "relaxed"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_what_was_stored_before_has_arrived(pool, num_ranks, sem):
    rounds = 50
    expected = sum(range(1, rounds + 1)) * sum(range(1, num_ranks + 1))
    assert pool.run(exchange, num_ranks, "cuda", sem, rounds) == [expected] * num_ranks


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_any_ranks_form_a_group_and_the_others_take_no_part(pool, num_ranks):
    sets = [[0, 3], [3, 1], [2, 0, 1], [3, 0], [1, 2, 3, 0]]
    rounds = 20
    results = pool.run(groups, num_ranks, "cuda", sets, rounds)
    totals = [rounds * sum(10**i for i in range(len(s))) + len(s) * sum(range(rounds)) for s in sets]
    for rank, sums in enumerate(results):
        assert sums == [total for members, total in zip(sets, totals, strict=True) if rank in members]


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_captured_barrier_can_be_replayed(pool, num_ranks):
    for said, total, expected in pool.run(captured, num_ranks, 50):
        assert said
        assert "call it once before the capture" in said[0]
        assert total == expected


def test_wrong_calls_are_refused_before_anything_is_launched(pool):
    assert "rank 0 is not a member of the process group" in pool.run(refused, 2, "cuda")[0][0]


def test_a_rank_that_stays_away_is_reported(pool):
    first, second = pool.run(stays_away, 2, "cuda")
    assert "IRIS_DEVICE_TIMEOUT" in first
    assert second == f"rank 0 has reported: {first}"
