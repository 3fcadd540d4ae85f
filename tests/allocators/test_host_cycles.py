"""The heap on the "host" allocator allocates and frees for ever."""

import pytest

from .host_jobs import many_cycles


@pytest.mark.parametrize(
    ("num_ranks", "cycles"), [(1, 5_000), (2, 1_500), pytest.param(2, 100_000, marks=pytest.mark.exhaustive)]
)
def test_nothing_is_left_of_many_cycles(pool, num_ranks, cycles):
    for before, after, mapped in pool.run(many_cycles, num_ranks, cycles):
        assert after == before
        assert after[0][:3] == (0, 0, 0)
        assert mapped < 8 << 20, "the interpreter may ask for a little"
