"""Targets to compile something for."""

import pytest

from iris_triton.testing.compile_only import TARGETS


def case_targets(names, each_vendor=True):
    """Values of ("name", "target") for `pytest.mark.parametrize`: every case for every target.

    The suite takes one target of each vendor, from case to case another one; with --exhaustive it takes all.

    Args:
        names: of the cases.
        each_vendor: not one target of each, but only one.
    """
    vendors = {}
    for target, gpu in TARGETS.items():
        vendors.setdefault(gpu.backend if each_vendor else "all", []).append(target)
    values = []
    for i, name in enumerate(names):
        chosen = {targets[i % len(targets)] for targets in vendors.values()}
        for target in TARGETS:
            marks = [] if target in chosen else [pytest.mark.exhaustive]
            values.append(pytest.param(name, target, marks=marks, id=f"{name}-{target}"))
    return values
