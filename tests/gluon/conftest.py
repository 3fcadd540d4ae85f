"""The same tests on the CPU and on GPUs."""

import pytest

import iris_gluon.interpreter  # noqa: F401 - the executor knows Gluon
from iris_triton import interpreter


@pytest.fixture(autouse=True)
def executor():
    interpreter.enable()
