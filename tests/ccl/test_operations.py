"""Every operation with every dtype, reduction, shape and place, against torch on one process."""

import pytest
from ccl_cases import moving_cases, place_cases, reducing_cases, reducing_pairs, shape_cases, way_cases
from jobs_ccl import run_cases
from rank_counts import rank_counts


def check(pool, num_ranks, device, cases, turns):
    cases = list(cases)
    if device == "cpu" and num_ranks == 8:  # more ranks than processors, here and there
        cases = cases[::5]
    if device == "cuda":  # each kind of call is a kernel to be compiled, for each number of ranks
        cases = cases[num_ranks % 3 :: {2: 2, 8: 2}.get(num_ranks, 5)]
    for wrong in pool.run(run_cases, num_ranks, device, cases, turns, timeout_s=500.0):
        assert wrong == []


@pytest.mark.parametrize("num_ranks", rank_counts(1, 2, 3, 8, seldom=[4]))
def test_dtypes_and_reductions(pool, num_ranks, device):
    if num_ranks == 3 and device == "cpu":
        reducing = reducing_pairs()
    else:
        reducing = reducing_cases({3: None, 4: 3}.get(num_ranks, 1))
    check(pool, num_ranks, device, [*reducing, *moving_cases()], turns=1)


@pytest.mark.exhaustive
def test_every_operation_dtype_and_reduction(pool):
    check(pool, 3, "cpu", reducing_cases(), turns=1)


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_shapes(pool, num_ranks, device):
    check(pool, num_ranks, device, shape_cases(), turns=1)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
def test_places(pool, some, num_ranks, device):
    cases = some(place_cases(), 3) if device == "cpu" else place_cases()
    check(pool, num_ranks, device, cases, turns=1)


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[1, 2]))
def test_ways(pool, num_ranks, device):
    check(pool, num_ranks, device, way_cases(num_ranks), turns=2)
