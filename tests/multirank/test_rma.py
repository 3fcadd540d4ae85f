"""Remote loads, stores and copies on 1, 2 and 8 ranks."""

import pytest
from jobs_rma import run_rma

OPS = ["load", "store", "get", "put", "copy"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_every_dtype_mask_and_hint(pool, some, num_ranks, device):
    for op in OPS if device == "cuda" or num_ranks < 8 else some(OPS, 5, 4):  # copy, which does what the others do
        assert pool.run(run_rma, num_ranks, op, False, device) == [[]] * num_ranks, op


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2])
def test_every_cache_modifier(pool, num_ranks, device):
    for op in OPS:
        assert pool.run(run_rma, num_ranks, op, True, device) == [[]] * num_ranks, op
