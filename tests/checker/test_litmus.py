"""Litmus tests of PTX: no forbidden outcome is ever seen, and the allowed ones are; `make litmus` tries 2,000 seeds."""

import itertools
import os

import numpy as np
import pytest
from litmus_programs import Program, Runner
from litmus_ptx import PTX
from tables import table

from iris_core import Iris
from iris_triton.checker.exploration.weak_memory import _matches

SEEDS = range(int(os.environ.get("SEEDS", "80")))
MISSED = 0.05 if len(SEEDS) >= 2000 else 0.25
"""The share of allowed outcomes that may not be seen."""


@pytest.fixture(scope="module")
def runner():
    with Iris("1MiB", device="cpu", check="schedules") as ctx:
        yield Runner(ctx)


def test_nothing_forbidden_is_seen(runner):
    seen = {test.name: runner.first_seed(Program(test), SEEDS) for test in PTX if not test.allowed}
    assert {name: seed for name, seed in seen.items() if seed is not None} == {}


def test_most_of_what_is_allowed_is_seen(runner):
    allowed = [test for test in PTX if test.allowed]
    missed = [test.name for test in allowed if runner.first_seed(Program(test), SEEDS) is None]
    assert len(missed) <= MISSED * len(allowed), missed


@table(("size", "other"), itertools.product([1, 2, 4, 8], repeat=2))
def test_bytes_of_elements_of_any_size_are_matched(size, other):
    rng = np.random.default_rng(size * 10 + other)
    for shift in (0, 1):
        keys = rng.permutation(np.arange(0, 64, size))[:5] + shift
        theirs = rng.permutation(np.arange(0, 64, other))[:6]
        mine, at = _matches(keys, size, theirs, other)
        found = {
            (int(keys[i // size]) + int(i) % size, int(theirs[j // other]) + int(j) % other)
            for i, j in zip(mine, at, strict=True)
        }
        ours, others = ({int(k) + b for k in each for b in range(n)} for each, n in ((keys, size), (theirs, other)))
        assert found == {(byte, byte) for byte in ours & others}
