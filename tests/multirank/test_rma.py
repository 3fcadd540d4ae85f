"""Remote loads, stores, copies and atomics in each language."""

import pytest
from jobs_common import in_language
from jobs_rma import LEGAL, run_atomic, run_contention, run_rma
from rank_counts import languages, rank_counts

OPS = ["load", "store", "get", "put", "copy"]
EVERY = languages(rank_counts(2, seldom=[1, 8]), gluon=rank_counts(2, seldom=[1, 4, 8]))


@pytest.mark.slow
@pytest.mark.parametrize(*EVERY)
def test_every_dtype_mask_and_hint(pool, some, language, num_ranks, device):
    """Of Gluon a copy on the CPU: tests/gluon/test_plugin.py moves by every function."""
    for op in some(OPS, 5, 4) if (language, device) == ("gluon", "cpu") else OPS:
        pool.run(in_language, num_ranks, language, run_rma, op, device)


@pytest.mark.slow
@pytest.mark.parametrize(*EVERY)
def test_every_dtype_mask_sem_and_scope_of_atomics(pool, language, num_ranks, device):
    for op in LEGAL:
        pool.run(in_language, num_ranks, language, run_atomic, op, device)


@pytest.mark.parametrize(*languages(rank_counts(4, seldom=[2]), gluon=rank_counts(seldom=[2, 4])))
def test_no_update_is_lost_between_processes(pool, language, num_ranks, device):
    # as many updates as every dtype counts without rounding (bfloat16: 256), more for integers in Triton on GPUs
    many = (language, device) == ("triton", "cuda")
    for dtype in ("int32", "float32", "bfloat16", *(("int64", "float16") if many else ())):
        rounds, programs = 100 if many and dtype.startswith("int") else 8, 4 if many else 2
        total = num_ranks * rounds * programs
        cells, *_ = pool.run(in_language, num_ranks, language, run_contention, dtype, rounds, programs, device)
        assert cells == [total, -total], dtype
