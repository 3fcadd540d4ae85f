"""`Iris(deterministic=True)`: every algorithm that promises its bits gives those of plain torch; others are refused."""

import jobs_bits as jobs
import pytest
import torch
from rank_counts import rank_counts


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2, 4]))
def test_every_algorithm_gives_the_bits_of_plain_torch(pool, num_ranks, device):
    places = ("heap", "ordinary", "in place")
    turns = 2 if device == "cpu" else 3
    assert pool.run(jobs.wrong_bits, num_ranks, device, places, turns) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [3])
def test_nans_go_on_whichever_rank_they_come_from(pool, num_ranks, device):
    calls = [
        (*algorithm, reduction, dtype)
        for algorithm in (("all_reduce", "one_shot"), ("all_reduce", "two_shot"), ("reduce_scatter", "pull"))
        for reduction, dtype in (("MIN", torch.float32), ("MAX", torch.bfloat16), ("SUM", torch.float16))
    ]
    assert pool.run(jobs.with_nans, num_ranks, device, calls) == [[]] * num_ranks


@pytest.mark.parametrize("num_ranks", [2])
def test_those_that_promise_nothing_are_refused_on_all_ranks(pool, num_ranks, device):
    assert pool.run(jobs.refusals, num_ranks, device) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2, 4]))
def test_products_have_the_same_bits_wherever_tensors_lie(pool, num_ranks, device):
    first, *others = pool.run(jobs.of_products, num_ranks, device)
    assert others == [first] * (num_ranks - 1)
