"""Calls one after the other, beside each other, and in groups; messages; observers."""

import jobs_sequences as jobs
import pytest
from rank_counts import rank_counts


def all_right(results):
    for wrong in results:
        assert wrong == []


@pytest.mark.parametrize("num_ranks", [4])
def test_groups_of_any_ranks_in_any_order(pool, num_ranks, device):
    sets = [[0, 3], [3, 1], [2, 0, 1], [3, 0], [1, 2, 3, 0], [2]]
    all_right(pool.run(jobs.in_groups, num_ranks, device, sets, 5 if device == "cuda" else 3))


@pytest.mark.parametrize(("num_ranks", "slow"), [
    (3, False), *(pytest.param(n, False, marks=pytest.mark.exhaustive(device="cpu")) for n in (2, 8)), (4, True),
])  # fmt: skip
def test_back_to_back(pool, num_ranks, slow, device):
    many, few = ((500, 10), (30, 10)) if slow else ((10_000, 24), (60, 12))
    calls, kinds = many if device == "cuda" else few
    all_right(pool.run(jobs.back_to_back, num_ranks, device, calls, kinds, slow, timeout_s=300.0))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_the_layout_of_tiles(pool, num_ranks, device):
    all_right(pool.run(jobs.in_tiles, num_ranks, device))


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_messages_between_two_ranks(pool, num_ranks, device):
    all_right(pool.run(jobs.messages, num_ranks, device, 3 if device == "cuda" else 1))


@pytest.mark.parametrize("num_ranks", [2])
def test_asynchronous_calls(pool, num_ranks, device):
    wanted = [[1.0, 3.0, 5.0, 7.0], True, [0.0, 1.0], [1.0], True]
    assert pool.run(jobs.asynchronous, num_ranks, device) == [wanted] * num_ranks


@pytest.mark.parametrize("num_ranks", [2])
def test_observers_hear_of_launches(pool, num_ranks, device):
    for heard, chosen in pool.run(jobs.observed, num_ranks, device):
        assert heard == [("all_reduce", chosen[0], 40), ("broadcast", chosen[1], 40)]


@pytest.mark.parametrize("num_ranks", [2])
def test_explain(pool, num_ranks, device):
    for text, algorithm, names, refused_text in pool.run(jobs.explained, num_ranks, device):
        assert {"one_shot", "two_shot", "local"} <= set(names)
        assert algorithm in names
        assert f"all_reduce: {algorithm}, " in text
        assert "local (local): no, it serves groups of one rank, and this group has 2" in text
        assert "no algorithm" in refused_text
        assert "it has no use for num_xcds of the config" in refused_text
