"""Calls that are bound to their tensors: `ctx.ccl.bind` and `ctx.ops.bind`."""

import jobs_bound as jobs
import pytest


@pytest.mark.parametrize("num_ranks", [3])
@pytest.mark.parametrize("group", [None, [2, 0]])
def test_bound_calls_are_right(pool, group, device, num_ranks):
    assert pool.run(jobs.calls, num_ranks, device, group) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2])
def test_messages(pool, num_ranks, device):
    assert pool.run(jobs.messages, num_ranks, device) == [None] * 2


def test_what_is_refused(pool):
    assert pool.run(jobs.refused, 2) == [None] * 2


@pytest.mark.multigpu(2)
def test_a_graph_keeps_what_it_captured(pool):
    wanted = [([2.0 * turn], [64.0 * turn]) for turn in range(5)]
    assert pool.run(jobs.replays, 2, "cuda") == [wanted] * 2
