"""The kit's GPU tiers, one GPU and several, on our own allocators with our own backend."""

from iris_core.testing import StackConformance


class TestTorchWithTriton(StackConformance):
    allocator = "torch"
    backend = "triton"


class TestVmemWithTriton(StackConformance):
    allocator = "vmem"
    backend = "triton"
