"""The heap on the "host" allocator allocates and frees for ever."""

import pytest

from .host_jobs import many_cycles


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_is_left_of_100000_cycles(pool, num_ranks):
    for before, after, mapped in pool.run(many_cycles, num_ranks, 100_000):
        assert after == before
        assert after[0][:3] == (0, 0, 0)
        assert mapped < 8 << 20, "the interpreter may ask for a little"
