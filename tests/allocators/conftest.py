"""Rank processes import the modules of this folder by name."""

import sys
from pathlib import Path

import pytest

from iris_core.testing import RankPool


@pytest.fixture(scope="package")
def pool():
    root = str(Path(__file__).parents[2])
    sys.path.append(root)
    try:
        with RankPool(timeout_s=90.0) as pool:
            yield pool
    finally:
        sys.path.remove(root)
