"""Wheels are built and installed once for all tests."""

import pytest

from .installation import Environment, build_wheels


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """A folder with wheels of the four distributions and of the example."""
    return build_wheels(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="session")
def installed(tmp_path_factory, wheels):
    """An environment in which a user has installed all of them."""
    return Environment(tmp_path_factory.mktemp("installed"), wheels)
