"""The Gluon backend passes the conformance kit, alone and on each allocator of ours."""

import pytest

from iris_core.testing import BackendConformance, StackConformance


class TestGluonBackend(BackendConformance):
    name = "gluon"
    case_step = 45  # tests/compile has the same functions


class OnOurRanks(StackConformance):
    """The suites make rank processes of their own; those of the other tests are there already."""

    backend = "gluon"

    @pytest.fixture
    def pool(self, pool):
        return pool


class TestHostWithGluon(OnOurRanks):
    allocator = "host"

    @pytest.mark.exhaustive
    def test_world_device_functions(self, pool, world):
        """The methods, which are tried, call them; tests/multirank calls them as well."""
        super().test_world_device_functions(pool, world)


class TestTorchWithGluon(OnOurRanks):
    allocator = "torch"


class TestVmemWithGluon(OnOurRanks):
    allocator = "vmem"
