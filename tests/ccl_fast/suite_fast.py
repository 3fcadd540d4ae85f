"""The conformance kit on algorithms of packets, emulated; test_fast_kit runs it where they are installed plugins."""

import fast_plugins
import pytest

from iris_core.testing import CollectiveConformance


class _Emulated(CollectiveConformance):
    allocator, backend = "host", "triton"
    test_static_import_is_light = None  # the module of these plugins is a test's


def suite(plugin):
    return type(f"Test_{plugin.info.name}", (_Emulated,), {"plugin": pytest.fixture(lambda self: plugin)})


for _name, _plugin in vars(fast_plugins).copy().items():
    if isinstance(_plugin, fast_plugins.Emulated):
        globals()[f"Test_{_name}"] = suite(_plugin)
