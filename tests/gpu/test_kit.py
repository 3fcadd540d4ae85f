"""The kit's GPU tiers, one GPU and several, on our own allocators with our own backend."""

import pytest

from iris_core.testing import StackConformance


class OnOurRanks:
    """The suites make rank processes of their own; those of the other tests are there already."""

    @pytest.fixture
    def pool(self, pool):
        return pool


class TestTorchWithTriton(OnOurRanks, StackConformance):
    allocator = "torch"
    backend = "triton"


class TestVmemWithTriton(OnOurRanks, StackConformance):
    allocator = "vmem"
    backend = "triton"
