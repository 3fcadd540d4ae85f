"""The kit on every mutant of an allocator or of a plugin; run by test_mutants in another process."""

import pytest
from kit_mutants import growing, heavy, killers
from kit_mutants.killers import RUN_ALL, functions_about
from kit_mutants.plugins import ALLOCATORS, GROWING, PLUGINS

from iris_core.testing import AllocatorConformance, PluginConformance
from iris_core.types import PluginKind

PASSED = {"test_static_info_is_complete", "test_static_probe_answers_for_every_device", "test_host_size_and_alignment"}
"""What mutants pass, if it is not about their mistakes."""
COSTLY = {"test_static_import_is_light", "test_peers_in_other_processes", "test_host_tensors_outlive_close"}
"""Each costs processes or jobs: only for the mutants that it is there for."""


def suite(base, name, plugin, about=None, **attributes):
    """A third party's test class, as docs/conformance_kit.md shows it; for a mutant, some of the tests."""
    if about is None:
        left_out = {"test_static_import_is_light"}  # nobody but "heavy" is wrong in that
    else:
        tests = {test for test in dir(base) if test.startswith("test_")}
        left_out = (COSTLY if RUN_ALL else tests - PASSED) - functions_about(about)
    fixture = pytest.fixture(lambda self: plugin)
    return type(f"Test_{name}", (base,), {"plugin": fixture, "num_cycles": 20, **dict.fromkeys(left_out), **attributes})


class _Growing(AllocatorConformance):
    """What only allocators that grow and import do; the rest of "vmem" passes in tests/allocators."""

    make_importable = pytest.fixture(lambda self: growing.make_importable)


for _name in dir(AllocatorConformance):
    if _name.startswith("test_") and not _name.startswith(
        ("test_peers_growth", "test_peers_import_is", "test_host_import")
    ):
        setattr(_Growing, _name, None)


for _name, _plugin in ALLOCATORS.items():
    globals()[f"Test_{_name}"] = suite(AllocatorConformance, _name, _plugin, killers.ALLOCATORS.get(_name))
for _name, _plugin in GROWING.items():
    globals()[f"Test_{_name}"] = suite(_Growing, _name, _plugin, heap_nbytes=4 << 20)
for _name, _plugin in {**PLUGINS, "heavy": heavy.plugin}.items():
    globals()[f"Test_{_name}"] = suite(
        PluginConformance, _name, _plugin, killers.PLUGINS[_name], kind=PluginKind.ALLOCATOR
    )
