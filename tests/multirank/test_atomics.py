"""Remote atomics on 1, 2 and 8 ranks."""

import pytest
from jobs_atomics import LEGAL, run_atomic, run_contention
from rank_counts import on_many_ranks


@pytest.mark.parametrize(("op", "num_ranks"), on_many_ranks(LEGAL, 1, 2, always=("add", "cas")))
def test_every_dtype_mask_sem_and_scope(pool, op, num_ranks, device):
    # compiling takes the time on GPUs: there, two ranks try each order with every dtype, the others with one
    orders_of_all_dtypes = device == "cpu" or num_ranks == 2
    problems = [line for lines in pool.run(run_atomic, num_ranks, op, device, orders_of_all_dtypes) for line in lines]
    assert problems == []


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float16", "bfloat16"])
def test_no_update_is_lost_between_processes(pool, dtype, num_ranks, device):
    # as many updates as every dtype counts without rounding (bfloat16: 256), more for integers on GPUs
    rounds = 100 if device == "cuda" and dtype.startswith("int") else 8
    programs = 2 if device == "cpu" else 4
    total = num_ranks * rounds * programs
    (cells, counter), *_ = pool.run(run_contention, num_ranks, dtype, rounds, programs, device)
    assert cells == [total, -total]
    assert counter == total
