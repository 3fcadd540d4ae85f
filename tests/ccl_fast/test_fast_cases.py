"""Every algorithm of packets with every dtype, reduction, shape and place, against torch on one process."""

import fast_cases
import pytest
from ccl_cases import Case
from fast_cases import ENCODINGS
from jobs_fast import SMALL, run_cases
from rank_counts import rank_counts

CASES_OF_A_JOB = 24  # a job on ranks has a limit of time, and the machine may be busy


def check(pool, num_ranks, device, cases, turns=1, workspace=None):
    cases = list(cases)
    for begin in range(0, len(cases), CASES_OF_A_JOB):
        for wrong in pool.run(run_cases, num_ranks, device, cases[begin : begin + CASES_OF_A_JOB], turns, workspace):
            assert wrong == []


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2, 8]))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_dtypes_and_reductions(pool, some, encoding, num_ranks, device):
    cases = list(fast_cases.dtype_cases(encoding))
    check(pool, num_ranks, device, some(cases, 101 if num_ranks == 8 else 13, num_ranks))


def test_lines_of_eight_members(pool):
    """As many members as there can be, on the CPU; on GPUs they are a tier."""
    check(pool, 8, "cpu", [Case("all_reduce", "bfloat16", shape=(203,), config={"algorithm": "ll128_two_shot"})])


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[3]))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_shapes(pool, some, encoding, num_ranks, device):
    check(pool, num_ranks, device, some(fast_cases.shape_cases(encoding), 7, num_ranks))


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_places(pool, some, encoding, num_ranks, device):
    check(pool, num_ranks, device, some(fast_cases.place_cases(encoding), 7, num_ranks))


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[2]))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_ways(pool, some, encoding, num_ranks, device):
    check(pool, num_ranks, device, some(fast_cases.way_cases(encoding), 3, num_ranks), turns=2)


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[3, 8]))
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_pieces(pool, some, encoding, num_ranks, device):
    cases = list(fast_cases.piece_cases(encoding))
    cases = some(cases, 23 if num_ranks == 8 else 7, num_ranks)
    check(pool, num_ranks, device, cases, turns=2, workspace=SMALL)
