"""ctx.device_barrier() on CPU ranks and on GPUs; the kit tries the world and sorted groups, with either order."""

import pytest
from jobs_device_barrier import bound_in_order, from_threads, groups, refused, stays_away
from rank_counts import rank_counts

GROUPS = [[0, 3], [3, 1], [2, 0, 1], [3, 0], [1, 2, 3, 0]]


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[8]))
def test_any_ranks_form_a_group_and_the_others_take_no_part(pool, num_ranks, device):
    rounds = 2 if device == "cpu" else 20
    results = pool.run(groups, num_ranks, device, GROUPS, rounds)
    totals = [rounds * sum(10**i for i in range(len(s))) + len(s) * sum(range(rounds)) for s in GROUPS]
    for rank, sums in enumerate(results):
        assert sums == [total for members, total in zip(GROUPS, totals, strict=True) if rank in members]


@pytest.mark.parametrize("num_ranks", [2])
def test_a_rank_that_stays_away_is_reported(pool, num_ranks, device):
    first, second = pool.run(stays_away, num_ranks, device)
    assert "rank 0" in first
    assert "IRIS_DEVICE_TIMEOUT" in first
    assert second == f"rank 0 has reported: {first}"


def test_wrong_calls_are_refused_before_anything_is_launched(pool):
    not_a_member, sem, stream, closed = pool.run(refused, 2)[0]
    assert "rank 0 is not a member of the process group" in not_a_member
    assert sem == "ValueError: device_barrier: sem must be 'release' or 'relaxed', not 'acquire'"
    assert stream.startswith("TypeError: device_barrier: stream must be a torch stream or None")
    assert closed.startswith("HeapClosedError")


def test_barriers_come_in_the_order_of_the_calls_whoever_launches_them(pool):
    assert pool.run(bound_in_order, 3) == [["first", "second"]] * 3


def test_threads_may_call(pool):
    assert pool.run(from_threads, 3, 10) == [(21, 1)] * 3  # no graphs here, so no more flags than one slot's
