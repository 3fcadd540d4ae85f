"""Exchanges between hosts: every kind and size; ranks that are in different ones are told, and can go on."""

import pytest
from jobs_exchanges import after_an_error, exchanges, out_of_step


def test_integers_and_objects_of_any_size(pool):
    assert pool.run(exchanges, 3) == [[], [], []]


@pytest.mark.parametrize(
    "pair", [("two", "three"), ("two", "object"), ("barrier", "two"), ("object", "barrier"), ("broadcast", "object")]
)
def test_ranks_in_different_exchanges(pool, pair):
    for said, after in pool.run(out_of_step, 2, pair):
        assert "rank 0: " in said
        assert "rank 1: " in said
        assert said.count("jobs_exchanges.py") == 2
        assert after == [0, 1]


def test_a_rank_that_goes_on_after_an_error(pool):
    results = pool.run(after_an_error, 3)
    assert "it has failed here" in results[1][0].pop(0)
    for (said,), result in results:
        assert "ranks 0, 2: matmul_all_reduce(), called at jobs_exchanges.py:" in said
        assert "rank 1: barrier(), called at jobs_exchanges.py:" in said
        assert result == [24.0]
