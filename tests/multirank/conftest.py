"""One pool of rank processes for all multi-rank tests."""

import pytest

from iris_core.testing import RankPool


@pytest.fixture(scope="session")
def pool():
    with RankPool(warm=("torch", "triton", "iris_triton.context", "iris_core.api"), timeout_s=120.0) as pool:
        yield pool
