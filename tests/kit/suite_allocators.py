"""The kit on every mutant of an allocator or of a plugin; run by test_mutants in another process."""

import pytest
from kit_mutants import growing, heavy, suite
from kit_mutants.killers import ALLOCATORS as KILLERS
from kit_mutants.killers import PLUGINS as ABOUT_PLUGINS
from kit_mutants.killers import RUN_ALL, functions_about
from kit_mutants.plugins import ALLOCATORS, GROWING, PLUGINS

from iris_core.testing import AllocatorConformance, PluginConformance
from iris_core.types import PluginKind

PASSED = {"test_static_info_is_complete", "test_static_probe_answers_for_every_device", "test_host_size_and_alignment"}
"""What mutants pass, if it is not about their mistakes."""
COSTLY = {"test_static_import_is_light", "test_peers_in_other_processes", "test_host_tensors_outlive_close"}
"""Each costs processes or jobs: only for the mutants that it is there for."""
TESTS = {test for test in dir(AllocatorConformance) if test.startswith("test_")}
ABOUT_GROWTH = "test_peers_growth", "test_peers_import_is", "test_host_import"
"""What only allocators that grow and import do; the rest of "vmem" passes in tests/allocators."""


def enter(base, name, plugin, tests, **attributes):
    fixture = pytest.fixture(lambda self: plugin)
    globals()[f"Test_{name}"] = suite(base, name, tests, plugin=fixture, num_cycles=20, **attributes)


def chosen(about):
    return (TESTS - COSTLY if RUN_ALL else PASSED) | functions_about(about)


for _name, _plugin in ALLOCATORS.items():
    _tests = chosen(KILLERS[_name]) if _name in KILLERS else TESTS - {"test_static_import_is_light"}
    enter(AllocatorConformance, _name, _plugin, _tests)
for _name, _plugin in GROWING.items():
    _made = pytest.fixture(lambda self: growing.make_importable)
    _tests = {test for test in TESTS if test.startswith(ABOUT_GROWTH)}
    enter(AllocatorConformance, _name, _plugin, _tests, heap_nbytes=4 << 20, make_importable=_made)
for _name, _plugin in {**PLUGINS, "heavy": heavy.plugin}.items():
    enter(PluginConformance, _name, _plugin, chosen(ABOUT_PLUGINS[_name]), kind=PluginKind.ALLOCATOR)
