"""Numbers of ranks to try something with."""

import itertools

import pytest


def rank_counts(*counts, seldom=()):
    """Values of `num_ranks` for `pytest.mark.parametrize`, in order.

    Args:
        counts: always tried.
        seldom: on the CPU, tried with --exhaustive alone; on GPUs, where they are tiers, always.
    """
    marked = [pytest.param(count, marks=pytest.mark.exhaustive(device="cpu")) for count in seldom]
    return sorted([*counts, *marked], key=lambda each: each if isinstance(each, int) else each.values[0])


def on_many_ranks(names, *counts, many=8, always):
    """Values of (name, `num_ranks`): all names with all counts, and on the CPU only some with `many` ranks.

    Args:
        names: of operations.
        counts: numbers of ranks.
        many: more ranks than processors; the others run with --exhaustive, and on GPUs, where they are tiers.
        always: names for `many` ranks.
    """
    seldom = pytest.mark.exhaustive(device="cpu")
    return [
        *itertools.product(names, counts),
        *(pytest.param(name, many, marks=[] if name in always else seldom) for name in names),
    ]
