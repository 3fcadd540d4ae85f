"""Remote atomics on 1, 2, 4 and 8 ranks."""

import pytest
from jobs_atomics import LEGAL, run_atomic, run_contention


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("op", list(LEGAL))
def test_every_dtype_mask_sem_and_scope(pool, op, num_ranks):
    problems = [line for lines in pool.run(run_atomic, num_ranks, op) for line in lines]
    assert problems == []


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float16", "bfloat16"])
def test_no_update_is_lost_between_processes(pool, dtype):
    ranks, rounds, programs = 4, 8, 2  # 64 updates: exact also in bfloat16
    (cells, counter), *_ = pool.run(run_contention, ranks, dtype, rounds, programs)
    assert cells == [ranks * rounds * programs, -ranks * rounds * programs]
    assert counter == ranks * rounds * programs
