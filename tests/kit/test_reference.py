"""The kit passes on the reference implementations: the host allocator, the Triton backend, and both together."""

import pytest

from iris_allocators._plugin import host
from iris_allocators.host import HostAllocator
from iris_allocators.settings import HostSettings
from iris_core.testing import AllocatorConformance, BackendConformance, StackConformance
from iris_core.types import CreateRequest
from iris_triton._plugin import plugin as triton_plugin
from iris_triton.compile_only import assembly, compile_for


class TestHostAllocator(AllocatorConformance):
    @pytest.fixture
    def plugin(self):
        return host

    @pytest.fixture
    def make_allocator(self, target):
        def make(nbytes, rank=0, world_size=1):
            return HostAllocator(CreateRequest(target, rank, world_size, nbytes, HostSettings()))

        return make


class TestTritonBackend(BackendConformance):
    @pytest.fixture
    def plugin(self):
        return triton_plugin

    @pytest.fixture
    def compile(self):
        def compile_case(case, target):
            return assembly(compile_for(case.kernel, case.args, {**case.kwargs, **case.options}, target))

        return compile_case

    @pytest.fixture
    def cases(self, backend):
        return backend.compile_cases()[::12]  # tests/compile has all of them


class TestHostWithTriton(StackConformance):
    allocator = "host"
    backend = "triton"
