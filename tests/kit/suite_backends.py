"""The kit on every mutant of a backend, alone and in a stack; run by test_mutants in another process."""

import pytest
from kit_mutants import killers, suite
from kit_mutants.killers import RUN_ALL, functions_about
from kit_mutants.plugins import BACKENDS, FAMILIES, OPTIONAL

from iris_core.testing import BackendConformance, StackConformance

PASSED = {"test_static_info_is_complete"}
"""What mutants pass, if it is not about their mistakes."""
ALONE = {test for test in dir(BackendConformance) if test.startswith("test_")} - {"test_static_import_is_light"}
"""The other one costs a process each, and no backend here is wrong in that."""
TESTS = {name for name in dir(StackConformance) if name.startswith("test_world_")}
BARRIER = "test_world_device_barrier_of_the_host"
"""What most pass."""


def stack(name, backend, tests, allocator="right-allocator", **attributes):
    attributes = {"backend": backend, "allocator": allocator, "num_ranks": 2, **attributes}
    globals()[f"Test_{name}"] = suite(StackConformance, name, tests, **attributes)


for _name, _plugin in BACKENDS.items():
    _mine = _name not in killers.BACKENDS or RUN_ALL
    _tests = ALONE if _mine else ALONE & (PASSED | functions_about(killers.BACKENDS[_name]))
    _made = {"plugin": pytest.fixture(lambda self, plugin=_plugin: plugin)}
    _made["cases"] = pytest.fixture(lambda self, backend: backend.compile_cases()[:1])
    globals()[f"Test_{_name}"] = suite(BackendConformance, _name, _tests, **_made)
for _name in OPTIONAL:
    _passed = {"test_world_wait_that_gives_up" if _name == "open-barrier" else BARRIER}
    stack(_name, _name, functions_about(killers.OPTIONAL[_name]) | _passed)
for _name in FAMILIES:
    _test = f"test_world_device_{'methods' if _name == 'mute-methods' else 'functions'}"
    _ranks = 3 if RUN_ALL or _name == "near" else 2  # a near copy is right where the rank after the next is this one
    _bound = 0.6 if _name == "near" else 0.2 if _name in ("mute", "blind", "mute-methods") else 20.0
    stack(_name, _name, {_test}, num_ranks=_ranks, timeout_s=_bound)
stack("right-stack", "right-backend", TESTS, num_ranks=3)
stack("crossed-stack", "right-backend", {BARRIER}, "own-peer", timeout_s=0.3)
