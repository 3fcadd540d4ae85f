"""Remote atomics on 1, 2 and 8 ranks."""

import pytest
from jobs_atomics import LEGAL, run_atomic, run_contention
from rank_counts import rank_counts


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1, 8]))
def test_every_dtype_mask_sem_and_scope(pool, num_ranks, device):
    # compiling takes the time on GPUs: there, two ranks try each order with every dtype, the others with one
    orders_of_all_dtypes = device == "cpu" or num_ranks == 2
    for op in LEGAL:
        results = pool.run(run_atomic, num_ranks, op, device, orders_of_all_dtypes)
        assert results == [[]] * num_ranks, op


@pytest.mark.parametrize("num_ranks", rank_counts(4, seldom=[2]))
def test_no_update_is_lost_between_processes(pool, num_ranks, device):
    # as many updates as every dtype counts without rounding (bfloat16: 256), more for integers on GPUs
    for dtype in ("int32", "int64", "float32", "float16", "bfloat16"):
        rounds = 100 if device == "cuda" and dtype.startswith("int") else 8
        programs = 2 if device == "cpu" else 4
        total = num_ranks * rounds * programs
        (cells, counter), *_ = pool.run(run_contention, num_ranks, dtype, rounds, programs, device)
        assert (cells, counter) == ([total, -total], total), dtype
