"""Remote loads, stores and copies on 1, 2 and 8 ranks."""

import pytest
from jobs_rma import run_rma
from rank_counts import rank_counts

OPS = ["load", "store", "get", "put", "copy"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1, 8]))
def test_every_dtype_mask_and_hint(pool, num_ranks, device):
    for op in OPS:
        assert pool.run(run_rma, num_ranks, op, False, device) == [[]] * num_ranks, op


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2])
def test_every_cache_modifier(pool, some, num_ranks, device):
    for op in OPS if device == "cuda" else some(OPS, 4):  # the executor caches nothing
        assert pool.run(run_rma, num_ranks, op, True, device) == [[]] * num_ranks, op
