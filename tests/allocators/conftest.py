"""What makes allocators and ranks, and sees that nothing is left of them."""

import gc

import pytest

from .cluster import Made


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
