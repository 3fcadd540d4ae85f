"""ctx.device_barrier() between CPU ranks; tests/multigpu runs the same jobs on GPUs."""

import pytest
from jobs_device_barrier import bound_in_order, exchange, from_threads, groups, refused, stays_away, stranger

from iris_core import Iris


@pytest.mark.parametrize(("num_ranks", "sem"), [
    (4, "release"), (8, "relaxed"),
    *(pytest.param(*each, marks=pytest.mark.exhaustive)
      for each in ((2, "release"), (2, "relaxed"), (4, "relaxed"), (8, "release"))),
])  # fmt: skip
def test_what_was_stored_before_has_arrived(pool, num_ranks, sem):
    rounds = 3
    expected = sum(range(1, rounds + 1)) * sum(range(1, num_ranks + 1))
    assert pool.run(exchange, num_ranks, "cpu", sem, rounds) == [expected] * num_ranks


def test_any_ranks_form_a_group_and_the_others_take_no_part(pool):
    sets = [[0, 3], [3, 1], [2, 0, 1], [3, 0], [1, 2, 3, 0]]
    rounds = 2
    results = pool.run(groups, 4, "cpu", sets, rounds)
    totals = [rounds * sum(10**i for i in range(len(s))) + len(s) * sum(range(rounds)) for s in sets]
    for rank, sums in enumerate(results):
        assert sums == [total for members, total in zip(sets, totals, strict=True) if rank in members]


def test_wrong_calls_are_refused_before_anything_is_launched(pool):
    not_a_member, sem, stream, closed = pool.run(refused, 2, "cpu")[0]
    assert "rank 0 is not a member of the process group" in not_a_member
    assert sem == "ValueError: device_barrier: sem must be 'release' or 'relaxed', not 'acquire'"
    assert stream.startswith("TypeError: device_barrier: stream must be a torch stream or None")
    assert closed.startswith("HeapClosedError")


def test_a_group_with_a_rank_that_does_not_share_the_heap(pool):
    first, second, _ = pool.run(stranger, 3, "cpu")
    assert first == second
    assert "rank 2 of torch.distributed, which does not share this heap" in first


def test_a_rank_that_stays_away_is_reported(pool):
    first, second = pool.run(stays_away, 2, "cpu")
    assert "rank 0" in first
    assert "IRIS_DEVICE_TIMEOUT" in first
    assert second == f"rank 0 has reported: {first}"


def test_barriers_come_in_the_order_of_the_calls_whoever_launches_them(pool):
    assert pool.run(bound_in_order, 3, "cpu") == [["first", "second"]] * 3


def test_threads_may_call(pool):
    assert pool.run(from_threads, 3, "cpu", 10) == [(21, 1)] * 3  # no graphs here, so no more flags than one slot's


def test_a_world_of_one_has_nobody_to_wait_for():
    with Iris("1MiB", device="cpu") as ctx:
        ctx.device_barrier()
        assert ctx.heap_size == 1 << 20
        assert ctx.heap.stats().num_blocks == 0
        assert ctx.heap.stats().free == 1 << 20
        assert ctx.heap.system_area.nbytes >= 64 << 10
