"""Targets to compile something for."""

import itertools

import pytest

from iris_triton.testing.compile_only import TARGETS

(NVIDIA,), AMD = ([name for name, gpu in TARGETS.items() if gpu.backend == each] for each in ("cuda", "hip"))


def case_targets(names, each_vendor=True, kernel=None, rare=()):
    """Values of ("name", "target") for `pytest.mark.parametrize`: every case for every target.

    The suite takes one target of each vendor, from case to case another one; with --exhaustive it takes all.

    Args:
        names: of the cases.
        each_vendor: not one target of each, but only one.
        kernel: says for a name of which kernel it is a case, if cases of the same kernel are to share the targets: each
            is compiled for one, and together they have both vendors.
        rare: names that only --exhaustive takes.
    """
    values, cases_of = [], {}
    for i, name in enumerate(sorted(names, key=lambda name: name in rare)):
        cases_of.setdefault(kernel(name) if kernel else i, []).append((i, name))
    for cases in cases_of.values():
        first = cases[0][0] % len(AMD)
        turns = itertools.cycle(each for amd in AMD[first:] + AMD[:first] for each in (amd, NVIDIA))
        for i, name in cases:
            if name in rare:
                chosen = set()
            elif not each_vendor:
                chosen = {list(TARGETS)[i % len(TARGETS)]}
            elif len(cases) == 1:
                chosen = {NVIDIA, AMD[i % len(AMD)]}
            else:
                chosen = {next(turns)}
            for target in TARGETS:
                marks = [] if target in chosen else [pytest.mark.exhaustive]
                values.append(pytest.param(name, target, marks=marks, id=f"{name}-{target}"))
    return values
