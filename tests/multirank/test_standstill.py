"""A deadlock of all ranks' kernels is an error of all of them at once; a slow rank is none."""

import pytest
from jobs_standstill import tokens


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4))])
def test_a_deadlock_of_all_ranks(pool, num_ranks):
    results = pool.run(tokens, num_ranks, num_ranks, 3, 2)
    assert results == [((2, rank, 1, True), 3) for rank in range(num_ranks)]
