"""The Gluon backend passes the conformance kit, alone and on each allocator of ours."""

from iris_core.testing import BackendConformance, StackConformance


class TestGluonBackend(BackendConformance):
    name = "gluon"
    case_step = 12  # test_compile has all of them


class TestHostWithGluon(StackConformance):
    allocator = "host"
    backend = "gluon"
    programs = "gluon_programs"


class TestTorchWithGluon(StackConformance):
    allocator = "torch"
    backend = "gluon"
    programs = "gluon_programs"


class TestVmemWithGluon(StackConformance):
    allocator = "vmem"
    backend = "gluon"
    programs = "gluon_programs"
