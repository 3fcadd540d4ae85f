"""One pool of rank processes, a GPU each."""

import pytest
import torch

from iris_core.testing import RankPool

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items):
    for item in items:
        needed = item.callspec.params.get("num_ranks", 2) if hasattr(item, "callspec") else 2
        if "multigpu" in item.keywords and needed > GPUS:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, torch sees {GPUS}"))


@pytest.fixture(scope="session")
def pool():
    with RankPool(warm=("torch", "triton", "iris_triton.context", "iris_core.api"), timeout_s=240.0) as pool:
        yield pool
