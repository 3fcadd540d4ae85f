"""Portable algorithms by name, with every dtype, reduction, shape and place, against torch on one process."""

import pytest
import variant_cases
from jobs_ccl import run_cases
from jobs_sequences import in_pieces

CASES_OF_A_JOB = 40  # a job on ranks has a limit of time, and the machine may be busy


def check(pool, num_ranks, job, device, cases, *more):
    cases = list(cases)
    for begin in range(0, len(cases), CASES_OF_A_JOB):
        for wrong in pool.run(job, num_ranks, device, cases[begin : begin + CASES_OF_A_JOB], *more):
            assert wrong == []


@pytest.mark.parametrize(("num_ranks", "number"), [(1, 2), (2, 6), (3, 8), (4, 3), (8, 1)])
def test_calls_of_many_kinds(pool, num_ranks, number, device):
    check(pool, num_ranks, run_cases, device, variant_cases.some_cases(num_ranks, number), 1)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_kind_of_call(pool, num_ranks, device):
    check(pool, num_ranks, run_cases, device, variant_cases.all_cases(num_ranks), 2)


@pytest.mark.parametrize("num_ranks", [3])
def test_what_is_larger_than_the_workspace_goes_in_pieces(pool, num_ranks, device):
    check(pool, num_ranks, in_pieces, device, variant_cases.piece_cases(num_ranks), "4KiB")
