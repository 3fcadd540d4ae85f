"""The conformance kit of Iris on the plugins of this distribution, which has to be installed."""

import pytest

from iris_core.testing import AllocatorConformance, BackendConformance, CollectiveConformance, StackConformance
from iris_example_backend import _plugin


class TestAllocator(AllocatorConformance):
    @pytest.fixture
    def plugin(self):
        return _plugin.allocator


class TestBackend(BackendConformance):
    @pytest.fixture
    def plugin(self):
        return _plugin.backend


class TestBothTogether(StackConformance):
    allocator = "example"
    backend = "example"
    programs = "iris_example_backend.conformance_programs"


class TestCollective(CollectiveConformance):
    allocator = "example"
    backend = "example"

    @pytest.fixture
    def plugin(self):
        return _plugin.two_shot
