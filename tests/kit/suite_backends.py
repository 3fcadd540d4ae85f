"""The kit on every mutant of a backend, alone and in a stack; run by test_mutants in a process of its own."""

import pytest
from kit_mutants.backends import OPTIONAL as KILLERS
from kit_mutants.plugins import BACKENDS, DEVICE, FAMILIES, OPTIONAL

from iris_core.testing import BackendConformance, StackConformance


class _Backend(BackendConformance):
    test_static_import_is_light = None  # costs a process each, and no backend here is wrong in that

    @pytest.fixture
    def cases(self, backend):
        return [case for case in backend.compile_cases() if case.name == "initialize"]


def alone(name, plugin):
    return type(f"Test_{name}", (_Backend,), {"plugin": pytest.fixture(lambda self: plugin)})


TESTS = {name for name in dir(StackConformance) if name.startswith("test_world_")}
MESSAGES = {"test_world_ring_put_with_signal", "test_world_all_to_all_store", "test_world_barrier"}


def stack(name, backend, tests, allocator="right-allocator", **attributes):
    attributes = {"backend": backend, "allocator": allocator, "num_ranks": 2, **attributes}
    return type(f"Test_{name}", (StackConformance,), {**attributes, **dict.fromkeys(TESTS - tests)})


for _name, _plugin in BACKENDS.items():
    globals()[f"Test_{_name}"] = alone(_name, _plugin)
for _name in DEVICE:
    # what this one waits for never comes
    _attributes = {"timeout_s": 0.3} if _name == "no-signal-sent" else {}
    globals()[f"Test_{_name}"] = stack(_name, _name, MESSAGES, **_attributes)
for _name in OPTIONAL:
    _tests = {f"test_{killer.partition('[')[0]}" for killer in KILLERS[_name]}
    globals()[f"Test_{_name}"] = stack(_name, _name, _tests | {"test_world_all_to_all_store"})
for _name in FAMILIES:
    _test = "test_world_device_method" if _name == "mute-methods" else "test_world_device_function"
    globals()[f"Test_{_name}"] = stack(_name, _name, {_test}, num_ranks=3, timeout_s=0.3)
Test_right_stack = stack("right-stack", "right-backend", TESTS, num_ranks=3)
Test_crossed_stack = stack("crossed-stack", "right-backend", MESSAGES, "own-peer", timeout_s=0.3)
