"""Remote loads, stores and copies on 1, 2, 4 and 8 ranks."""

import pytest
from jobs_rma import run_rma


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("op", ["load", "store", "get", "put", "copy"])
def test_every_dtype_mask_and_hint(pool, op, num_ranks):
    problems = [line for lines in pool.run(run_rma, num_ranks, op, False) for line in lines]
    assert problems == []


@pytest.mark.parametrize("op", ["load", "store", "get", "put", "copy"])
def test_every_cache_modifier(pool, op):
    problems = [line for lines in pool.run(run_rma, 2, op, True) for line in lines]
    assert problems == []
