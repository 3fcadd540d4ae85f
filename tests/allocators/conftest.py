"""Rank processes import the modules of this folder by name."""

import gc

import pytest

from iris_core.testing import RankPool

from .cluster import Made


@pytest.fixture(scope="package")
def pool():
    with RankPool(timeout_s=300.0) as pool:
        yield pool


@pytest.fixture(autouse=True)
def little_garbage():
    """The garbage collector, which the tests call often, does not look at what was there before."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def made():
    """Makes allocators and ranks, which must have left nothing after the test."""
    made = Made()
    yield made
    made.finish()
