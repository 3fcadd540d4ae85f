"""The ring of packets among other calls, in groups, and without a rank that should take part."""

import pytest
from ccl_cases import Case
from jobs_fast import SMALL, leave_one_out, plan_again, run_group, run_mixed

NAME = "sentinel_ring"
OPS = ("all_reduce", "reduce_scatter")


@pytest.mark.parametrize("num_ranks", [3])
def test_back_to_back(pool, num_ranks, device):
    cases = [
        Case(op, shape=shape, config={"algorithm": NAME, "comm_sms": programs})
        for op in OPS
        for shape, programs in (((3,), 1), ((4099,), 3), ((1003,), 2))
    ]
    cases.append(Case("all_reduce", shape=(1003,), config={"algorithm": "sentinel_two_shot"}))
    for wrong in pool.run(run_mixed, num_ranks, device, cases, 2000 if device == "cuda" else 15, 5, SMALL):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [4])
def test_group(pool, num_ranks, device):
    cases = [Case(op, shape=(77,), config={"algorithm": NAME}) for op in OPS]
    for wrong in pool.run(run_group, num_ranks, device, (3, 1, 0), cases, 2):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [2])
def test_one_member_plans_again(pool, num_ranks, device):
    assert pool.run(plan_again, num_ranks, device, [NAME]) == [[], []]


@pytest.mark.parametrize("num_ranks", [2])
def test_a_rank_that_is_late_is_reported(pool, num_ranks, device):
    results = pool.run(leave_one_out, num_ranks, device, NAME, "all_reduce")
    assert [first for first, _ in results] == [[], []]
    text = results[1][1]
    assert "IRIS_DEVICE_TIMEOUT" in text
    assert "ring of packets" in text
    assert "all_reduce" in text
