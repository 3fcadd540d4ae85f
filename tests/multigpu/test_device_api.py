"""The multi-rank tests of the device API, on GPUs."""

import pytest
from jobs_atomics import LEGAL, run_atomic, run_contention
from jobs_rma import run_rma
from jobs_sync import run_barrier, run_count, run_ring, run_timeout

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("op", ["load", "store", "get", "put", "copy"])
def test_rma(pool, op, num_ranks):
    assert [line for lines in pool.run(run_rma, num_ranks, op, False, "cuda") for line in lines] == []


@pytest.mark.parametrize("op", ["load", "store", "get", "put", "copy"])
def test_cache_modifiers(pool, op):
    assert [line for lines in pool.run(run_rma, 2, op, True, "cuda") for line in lines] == []


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("op", list(LEGAL))
def test_atomics(pool, op, num_ranks):
    assert [line for lines in pool.run(run_atomic, num_ranks, op, "cuda") for line in lines] == []


def test_contention(pool):
    (cells, counter), *_ = pool.run(run_contention, 2, "int32", 100, 4, "cuda")
    assert cells == [800, -800]
    assert counter == 800


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("form", ["store", "put_signal"])
def test_ring(pool, form, num_ranks):
    assert pool.run(run_ring, num_ranks, form, 100, "cuda")[-1] == [99 + num_ranks]


def test_counting_signals(pool):
    assert pool.run(run_count, 2, "int64", 100, "cuda")[0] == 200


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_barrier(pool, num_ranks):
    assert pool.run(run_barrier, num_ranks, 0, 1, num_ranks, 50, 3, "cuda") == [0] * num_ranks


def test_bounded_wait(pool):
    (quiet, _), (text, names_address) = pool.run(run_timeout, 2, "cuda")
    assert quiet == ""
    assert "rank 1" in text
    assert names_address
