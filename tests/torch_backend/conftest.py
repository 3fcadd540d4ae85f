"""Rank processes of the tests of the backend "iris"."""

import pytest

from iris_core.testing import RankPool


@pytest.fixture(scope="package")
def ranks():
    """Rank processes for which torch.distributed is not initialised; most have imported torch.compile."""
    environ = {"IRIS_HEAP_SIZE": "32MiB", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else ranks start compilers, too
    with RankPool(timeout_s=600.0, environ=environ) as pool:
        yield pool


@pytest.fixture
def on_ranks(ranks, tmp_path):
    """Runs a job, with a store, on some ranks."""
    return lambda job, num_ranks, *args: ranks.run(job, num_ranks, str(tmp_path / "store"), *args)
