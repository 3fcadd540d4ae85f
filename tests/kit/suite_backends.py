"""The kit on every mutant of a backend, alone and in a stack; run by test_mutants in another process."""

import pytest
from kit_mutants import killers
from kit_mutants.killers import RUN_ALL, functions_about
from kit_mutants.plugins import BACKENDS, FAMILIES, OPTIONAL

from iris_core.testing import BackendConformance, StackConformance


class _Backend(BackendConformance):
    test_static_import_is_light = None  # costs a process each, and no backend here is wrong in that

    @pytest.fixture
    def cases(self, backend):
        return backend.compile_cases()[:1]


PASSED = {"test_static_info_is_complete"}
"""What mutants pass, if it is not about their mistakes."""


def alone(name, plugin):
    """All tests of a backend by itself for the right one; for a mutant, some of them."""
    left_out = set()
    if name in killers.BACKENDS and not RUN_ALL:
        tests = {test for test in dir(_Backend) if test.startswith("test_")}
        left_out = tests - PASSED - functions_about(killers.BACKENDS[name])
    return type(f"Test_{name}", (_Backend,), {"plugin": pytest.fixture(lambda self: plugin), **dict.fromkeys(left_out)})


TESTS = {name for name in dir(StackConformance) if name.startswith("test_world_")}
BARRIER = "test_world_device_barrier_of_the_host"
"""What most pass."""


def stack(name, backend, tests, allocator="right-allocator", **attributes):
    attributes = {"backend": backend, "allocator": allocator, "num_ranks": 2, **attributes}
    return type(f"Test_{name}", (StackConformance,), {**attributes, **dict.fromkeys(TESTS - tests)})


for _name, _plugin in BACKENDS.items():
    globals()[f"Test_{_name}"] = alone(_name, _plugin)
for _name in OPTIONAL:
    _passed = {"test_world_wait_that_gives_up" if _name == "open-barrier" else BARRIER}
    globals()[f"Test_{_name}"] = stack(_name, _name, functions_about(killers.OPTIONAL[_name]) | _passed)
for _name in FAMILIES:
    _test = f"test_world_device_{'methods' if _name == 'mute-methods' else 'functions'}"
    _ranks = 3 if RUN_ALL or _name == "near" else 2  # a near copy is right where the rank after the next is this one
    _bound = 0.6 if _name == "near" else 0.2 if _name in ("mute", "blind", "mute-methods") else 20.0
    globals()[f"Test_{_name}"] = stack(_name, _name, {_test}, num_ranks=_ranks, timeout_s=_bound)
globals()["Test_right-stack"] = stack("right-stack", "right-backend", TESTS, num_ranks=3)
globals()["Test_crossed-stack"] = stack("crossed-stack", "right-backend", {BARRIER}, "own-peer", timeout_s=0.3)
