"""The kit passes on the reference implementations: the host allocator, the Triton backend, and both together."""

from iris_core.testing import AllocatorConformance, BackendConformance, StackConformance


class TestHostAllocator(AllocatorConformance):
    name = "host"


class TestTritonBackend(BackendConformance):
    name = "triton"
    case_step = 12  # tests/compile has all of them


class TestHostWithTriton(StackConformance):
    allocator = "host"
    backend = "triton"
