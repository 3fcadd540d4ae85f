"""Remote loads, stores and copies on 1, 2 and 8 ranks."""

import pytest
from jobs_rma import run_rma
from rank_counts import on_many_ranks

OPS = ["load", "store", "get", "put", "copy"]


@pytest.mark.parametrize(("op", "num_ranks"), on_many_ranks(OPS, 1, 2, always=("copy",)))
def test_every_dtype_mask_and_hint(pool, op, num_ranks, device):
    problems = [line for lines in pool.run(run_rma, num_ranks, op, False, device) for line in lines]
    assert problems == []


@pytest.mark.parametrize("num_ranks", [2])
@pytest.mark.parametrize("op", OPS)
def test_every_cache_modifier(pool, op, num_ranks, device):
    problems = [line for lines in pool.run(run_rma, num_ranks, op, True, device) for line in lines]
    assert problems == []
