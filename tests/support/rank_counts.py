"""Numbers of ranks to try something with."""

import pytest

GPU_TIERS = [
    pytest.param(1, marks=pytest.mark.gpu),
    *(pytest.param(count, marks=pytest.mark.multigpu(count)) for count in (2, 4, 8)),
]
"""Values of `num_ranks` on GPUs alone."""


def rank_counts(*counts, seldom=()):
    """Values of `num_ranks` for `pytest.mark.parametrize`, in order.

    Args:
        counts: always tried.
        seldom: on the CPU, tried with --exhaustive alone; on GPUs, where they are tiers, always.
    """
    marked = [pytest.param(count, marks=pytest.mark.exhaustive(device="cpu")) for count in seldom]
    return sorted([*counts, *marked], key=lambda each: each if isinstance(each, int) else each.values[0])


def languages(triton, gluon=None):
    """Names and values of `language` and `num_ranks` for `pytest.mark.parametrize`.

    Args:
        triton, gluon: numbers of ranks as `rank_counts` makes them; in Gluon the same ones unless they are given.
    """
    values = []
    for language, counts in (("triton", triton), ("gluon", gluon or triton)):
        for count in counts:
            number, marks = (count, ()) if isinstance(count, int) else (*count.values, count.marks)
            values.append(pytest.param(language, number, marks=marks))
    return ("language", "num_ranks"), values
