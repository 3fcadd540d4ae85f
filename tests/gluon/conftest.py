"""The same tests on the CPU and on GPUs."""

import pytest

import iris_gluon.interpreter  # noqa: F401 - the executor knows Gluon
from iris_triton import interpreter


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def device(request):
    """Where the ranks compute; on GPUs, the test's `num_ranks` decides about its tier."""
    return request.param


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()
