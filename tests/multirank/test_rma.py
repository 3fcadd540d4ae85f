"""Remote loads, stores and copies in each language."""

import pytest
from jobs_common import in_language
from jobs_rma import run_rma
from rank_counts import languages, rank_counts

OPS = ["load", "store", "get", "put", "copy"]


@pytest.mark.slow
@pytest.mark.parametrize(*languages(rank_counts(2, seldom=[1, 8]), gluon=rank_counts(2, seldom=[1, 4, 8])))
def test_every_dtype_mask_and_hint(pool, some, language, num_ranks, device):
    """Of Gluon a copy on the CPU: tests/gluon/test_conformance.py moves by every function."""
    for op in some(OPS, 5, 4) if (language, device) == ("gluon", "cpu") else OPS:
        assert pool.run(in_language, num_ranks, language, run_rma, op, False, device) == [[]] * num_ranks, op


@pytest.mark.slow
@pytest.mark.parametrize(*languages([2], gluon=rank_counts(seldom=[2])))
def test_every_cache_modifier(pool, some, language, num_ranks, device):
    for op in OPS if device == "cuda" else some(OPS, 5, 4):  # the executor caches nothing
        assert pool.run(in_language, num_ranks, language, run_rma, op, True, device) == [[]] * num_ranks, op
