"""Many calls one after the other, in groups, beside each other, in graphs; calls that are refused."""

import re

import jobs_sequences_ops as jobs
import pytest
from ops_cases import OPS, Case, algorithms, dims
from rank_counts import rank_counts


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    assert pool.run(jobs.in_groups, num_ranks, device, [[3, 1], [2, 0, 3], [2], [1, 3, 0, 2]], 4) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(1, 3, seldom=[2]))
def test_back_to_back_with_changing_data(pool, num_ranks, device):
    kinds, calls = (5, 12) if device == "cpu" else (12, 300)
    assert pool.run(jobs.back_to_back, num_ranks, device, kinds, calls, timeout_s=300.0) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_workspaces(pool, num_ranks, device):
    assert pool.run(jobs.workspaces, num_ranks, device) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_without_room(pool, num_ranks, device, deterministic):
    for *said, right in pool.run(jobs.without_room, num_ranks, device, deterministic):
        assert len(said) == 2
        assert all("no room for them" in text for text in said)
        assert right != deterministic


@pytest.mark.parametrize("num_ranks", [2])
def test_refused_calls(pool, num_ranks, device):
    for wrong, explained in pool.run(jobs.refused, num_ranks, device):
        assert wrong == []
        text = "all_gather_matmul: \\w+, the cheapest by its model\n  unfused .*us, model\n  fetch .*\n  copy_engine"
        assert re.match(text, explained, re.DOTALL)


@pytest.mark.slow
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_replays_with_changing_data(pool, num_ranks):
    cases = [
        Case(op, algorithm, (130, 264, 96), "bfloat16", place=place, out_place=place, dim=dim, bias="columns")
        for op in OPS
        for algorithm in (*algorithms(op, num_ranks), *jobs.ENGINES.get(op, ()))
        for dim in (dims(op)[:1] if algorithm in jobs.ENGINES.get(op, ()) else dims(op))
        for place in ("heap", "ordinary")
    ]
    for said, wrong in pool.run(jobs.captured, num_ranks, "cuda", cases, 50, timeout_s=500.0):
        assert len(said) == 1
        assert wrong == []
