"""Every operation with every dtype, reduction, shape and place, against torch on one process."""

import pytest
from ccl_cases import moving_cases, place_cases, reducing_cases, reducing_pairs, shape_cases, way_cases
from jobs_ccl import run_cases
from rank_counts import rank_counts


def check(pool, some, num_ranks, device, cases, turns):
    cases = list(cases)
    if device == "cpu" and num_ranks in (1, 8):  # a rank alone, and more than processors, here and there
        cases = some(cases, 5)
    if device == "cuda":  # each kind of call is a kernel to be compiled, for each number of ranks
        cases = cases[num_ranks % 3 :: {2: 2, 8: 2}.get(num_ranks, 5)]
    for wrong in pool.run(run_cases, num_ranks, device, cases, turns, timeout_s=500.0):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", rank_counts(1, 3, 8, seldom=[2, 4]))
def test_dtypes_and_reductions(pool, some, num_ranks, device):
    if num_ranks == 3 and device == "cpu":
        reducing = reducing_pairs()
    else:
        reducing = reducing_cases({3: None, 4: 3}.get(num_ranks, 1))
    moving = some(moving_cases(), 2) if device == "cpu" else moving_cases()
    check(pool, some, num_ranks, device, [*reducing, *moving], turns=1)


@pytest.mark.exhaustive
def test_every_operation_dtype_and_reduction(pool, some):
    check(pool, some, 3, "cpu", reducing_cases(), turns=1)


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[8]))
def test_shapes(pool, some, num_ranks, device):
    check(pool, some, num_ranks, device, shape_cases(), turns=1)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_places(pool, some, num_ranks, device):
    cases = some(place_cases(), 3) if device == "cpu" else place_cases()
    check(pool, some, num_ranks, device, cases, turns=1)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[1, 2]))
def test_ways(pool, some, num_ranks, device):
    cases = some(way_cases(num_ranks), 2) if device == "cpu" else way_cases(num_ranks)
    check(pool, some, num_ranks, device, cases, turns=2)
