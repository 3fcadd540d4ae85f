"""The conformance kit on portable algorithms, for a process in which they are installed plugins; see test_kit."""

import kit_plugins
import pytest

from iris_core.testing import CollectiveConformance


class _Portable(CollectiveConformance):
    allocator, backend = "host", "triton"
    test_static_import_is_light = None  # the module of these plugins is a test's


for _name, _plugin in vars(kit_plugins).copy().items():
    if isinstance(_plugin, kit_plugins.AsPlugin):
        globals()[f"Test_{_name}"] = type(
            f"Test_{_name}", (_Portable,), {"plugin": pytest.fixture(lambda self, plugin=_plugin: plugin)}
        )
