"""Numbers of ranks to try something with."""

import pytest


def rank_counts(*counts, seldom=()):
    """Values of `num_ranks` for `pytest.mark.parametrize`, in order.

    Args:
        counts: always tried.
        seldom: on the CPU, tried with --exhaustive alone; on GPUs, where they are tiers, always.
    """
    marked = [pytest.param(count, marks=pytest.mark.exhaustive(device="cpu")) for count in seldom]
    return sorted([*counts, *marked], key=lambda each: each if isinstance(each, int) else each.values[0])
