"""Rank processes import the modules of this folder by name."""

import gc
import sys
from pathlib import Path

import pytest

from iris_core.testing import RankPool


@pytest.fixture(scope="package")
def pool():
    root = str(Path(__file__).parents[2])
    sys.path.append(root)
    try:
        with RankPool(timeout_s=300.0) as pool:
            yield pool
    finally:
        sys.path.remove(root)


@pytest.fixture(autouse=True)
def little_garbage():
    """The garbage collector, which the tests call often, does not look at what was there before."""
    gc.freeze()
    yield
    gc.unfreeze()
