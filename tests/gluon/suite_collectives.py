"""The conformance kit on the algorithms in Gluon; test_collectives_kit runs it where they are installed plugins."""

import collectives_plugins
import pytest

from iris_core.testing import CollectiveConformance


class _InGluon(CollectiveConformance):
    allocator, backend = "host", "gluon"
    num_ranks = 3  # one of them outside the groups
    test_static_import_is_light = None  # the module of these plugins is a test's


for _name, _plugin in vars(collectives_plugins).copy().items():
    if isinstance(_plugin, collectives_plugins.InGluon):
        globals()[f"Test_{_name}"] = type(
            f"Test_{_name}", (_InGluon,), {"plugin": pytest.fixture(lambda self, plugin=_plugin: plugin)}
        )
