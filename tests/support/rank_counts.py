"""Numbers of ranks to try something with."""

import pytest

GPU_TIERS = [
    pytest.param(1, marks=pytest.mark.gpu),
    *(pytest.param(count, marks=pytest.mark.multigpu(count)) for count in (2, 4, 8)),
]
"""Values of `num_ranks` on GPUs alone."""


def rank_counts(*counts, seldom=()):
    """Values of `num_ranks` for `pytest.mark.parametrize`; those tried `seldom` on the CPU are tiers on GPUs."""
    marked = [pytest.param(count, marks=pytest.mark.exhaustive(device="cpu")) for count in seldom]
    return sorted([*counts, *marked], key=lambda each: each if isinstance(each, int) else each.values[0])


def languages(triton, gluon=None):
    """Names and values of `language` and `num_ranks`, by default the same in Gluon, for `pytest.mark.parametrize`."""
    values = []
    for language, counts in (("triton", triton), ("gluon", gluon or triton)):
        for count in counts:
            number, marks = (count, ()) if isinstance(count, int) else (*count.values, count.marks)
            values.append(pytest.param(language, number, marks=marks))
    return ("language", "num_ranks"), values
