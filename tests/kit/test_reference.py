"""The kit passes on the Triton backend.  The host allocator, and both together: test_documentation."""

from iris_core.testing import BackendConformance


class TestTritonBackend(BackendConformance):
    name = "triton"
    case_step = 15
