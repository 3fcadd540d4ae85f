"""The conformance kit of Iris on the plugins of this distribution, which is installed."""

from iris_core.testing import (
    AllocatorConformance,
    BackendConformance,
    CollectiveConformance,
    StackConformance,
)


class TestAllocator(AllocatorConformance):
    name = "example"


class TestBackend(BackendConformance):
    name = "example"


class TestBothTogether(StackConformance):
    allocator = "example"
    backend = "example"
    programs = "iris_example_backend.conformance_programs"


class TestCollective(CollectiveConformance):
    name = "example-two-shot"
    allocator = "example"
    backend = "example"
