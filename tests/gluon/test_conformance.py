"""The Gluon backend passes the conformance kit, alone and on each allocator of ours."""

import pytest

from iris_core.testing import BackendConformance, StackConformance
from iris_gluon._plugin import plugin as gluon_plugin
from iris_triton.compile_only import assembly, compile_for


class TestGluonBackend(BackendConformance):
    @pytest.fixture
    def plugin(self):
        return gluon_plugin

    @pytest.fixture
    def compile(self):
        def compile_case(case, target):
            return assembly(compile_for(case.kernel, case.args, {**case.kwargs, **case.options}, target))

        return compile_case

    @pytest.fixture
    def cases(self, backend):
        return backend.compile_cases()[::12]  # test_compile has all of them


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
