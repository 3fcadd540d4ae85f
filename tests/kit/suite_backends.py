"""The kit on every mutant of a backend, alone and in a stack; run by test_mutants in a process of its own."""

import pytest
from kit_mutants.plugins import BACKENDS, DEVICE, FAMILIES

from iris_core.testing import BackendConformance, StackConformance


class _Backend(BackendConformance):
    test_static_import_is_light = None  # costs a process each, and no backend here is wrong in that

    @pytest.fixture
    def cases(self, backend):
        return [case for case in backend.compile_cases() if case.name == "initialize"]


def alone(name, plugin):
    return type(f"Test_{name}", (_Backend,), {"plugin": pytest.fixture(lambda self: plugin)})


TESTS = {name for name in dir(StackConformance) if name.startswith("test_world_")}
DEVICE_TESTS = {"test_world_device_function", "test_world_device_method"}


def stack(name, backend, tests, allocator="right-allocator", **attributes):
    attributes = {"backend": backend, "allocator": allocator, "num_ranks": 2, **attributes}
    return type(f"Test_{name}", (StackConformance,), {**attributes, **dict.fromkeys(TESTS - tests)})


for _name, _plugin in BACKENDS.items():
    globals()[f"Test_{_name}"] = alone(_name, _plugin)
for _name in DEVICE:
    # what this one waits for never comes
    _attributes = {"timeout_s": 0.3} if _name == "no-signal-sent" else {}
    globals()[f"Test_{_name}"] = stack(_name, _name, TESTS - DEVICE_TESTS, **_attributes)
for _name in FAMILIES:
    _test = "test_world_device_method" if _name == "mute-methods" else "test_world_device_function"
    globals()[f"Test_{_name}"] = stack(_name, _name, {_test}, num_ranks=3, timeout_s=0.5)
Test_right_stack = stack("right-stack", "right-backend", TESTS, num_ranks=3)
Test_crossed_stack = stack("crossed-stack", "right-backend", TESTS - DEVICE_TESTS, "own-peer", timeout_s=0.3)
