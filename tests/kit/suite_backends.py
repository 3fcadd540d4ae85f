"""The kit on every mutant of a backend, alone and in a stack; run by test_mutants in a process of its own."""

import pytest
from kit_mutants.plugins import BACKENDS, DEVICE

from iris_core.testing import BackendConformance, StackConformance
from iris_triton.compile_only import assembly, compile_for


class _Backend(BackendConformance):
    test_static_import_is_light = None  # costs a process each, and no backend here is wrong in that

    @pytest.fixture
    def compile(self):
        def compile_case(case, target):
            return assembly(compile_for(case.kernel, case.args, {**case.kwargs, **case.options}, target))

        return compile_case

    @pytest.fixture
    def cases(self, backend):
        return [case for case in backend.compile_cases() if case.name == "initialize"]


def alone(name, plugin):
    return type(f"Test_{name}", (_Backend,), {"plugin": pytest.fixture(lambda self: plugin)})


def stack(name, backend, allocator="right-allocator", **attributes):
    attributes = {"backend": backend, "allocator": allocator, "num_ranks": 2, **attributes}
    return type(f"Test_{name}", (StackConformance,), attributes)


for _name, _plugin in BACKENDS.items():
    globals()[f"Test_{_name}"] = alone(_name, _plugin)
for _name in DEVICE:
    # what this one waits for never comes
    _attributes = {"timeout_s": 0.3} if _name == "no-signal-sent" else {}
    globals()[f"Test_{_name}"] = stack(_name, _name, **_attributes)
Test_right_stack = stack("right-stack", "right-backend")
Test_crossed_stack = stack("crossed-stack", "right-backend", "own-peer", timeout_s=0.3)
