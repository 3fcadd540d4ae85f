"""The kit on every mutant of an allocator or of a plugin; run by test_mutants in a process of its own."""

import pytest
from kit_mutants import growing, heavy
from kit_mutants.plugins import ALLOCATORS, GROWING, PLUGINS

from iris_core.testing import AllocatorConformance, PluginConformance
from iris_core.types import PluginKind


def suite(base, name, plugin, **attributes):
    """A third party's test class, as docs/conformance_kit.md shows it."""
    fixture = pytest.fixture(lambda self: plugin)
    return type(f"Test_{name}", (base,), {"plugin": fixture, "num_cycles": 20, **attributes})


# each test in a worker costs a job: only the mutants that it is there for
IN_WORKERS = {
    "right-allocator",
    "owns-peers",
    "copied-tensor",
    "release-at-close",
    "close-takes-memory",
    "short-export",
    "wrong-peer",
    "own-peer",
    "shifted-peer",
    "snapshot-peer",
}


class _InWorkers(AllocatorConformance):
    test_static_import_is_light = None  # costs a process each, and no allocator here is wrong in that


class _Quick(_InWorkers):
    test_peers_in_other_processes = None
    test_host_tensors_outlive_close = None


class _Growing(_Quick):
    """What only allocators that grow and import do; the rest of "vmem" passes in tests/allocators."""

    @pytest.fixture
    def make_importable(self):
        return growing.make_importable


for _name in dir(AllocatorConformance):
    if _name.startswith("test_") and not _name.startswith(
        ("test_peers_growth", "test_peers_import_is", "test_host_import")
    ):
        setattr(_Growing, _name, None)


class _LightPlugin(PluginConformance):
    test_static_import_is_light = None


for _name, _plugin in ALLOCATORS.items():
    globals()[f"Test_{_name}"] = suite(_InWorkers if _name in IN_WORKERS else _Quick, _name, _plugin)
for _name, _plugin in GROWING.items():
    globals()[f"Test_{_name}"] = suite(_Growing, _name, _plugin, heap_nbytes=4 << 20)
for _name, _plugin in {**PLUGINS, "heavy": heavy.plugin}.items():
    _base = PluginConformance if _name == "heavy" else _LightPlugin
    globals()[f"Test_{_name}"] = suite(_base, _name, _plugin, kind=PluginKind.ALLOCATOR)
