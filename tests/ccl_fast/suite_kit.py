"""The conformance kit on algorithms of both languages; test_kit runs it where they are installed plugins."""

import kit_plugins
import pytest

from iris_core.testing import CollectiveConformance


def suite(name, *left_out):
    """The kit's tests of an algorithm, but for some."""
    plugin = getattr(kit_plugins, name)
    own = {"allocator": "host", "backend": plugin.backend, "plugin": pytest.fixture(lambda self: plugin)}
    left_out = ("test_static_import_is_light", *left_out)  # the module of these plugins is a test's
    return type(f"Test_{name}", (CollectiveConformance,), dict.fromkeys(left_out) | own)


globals().update({f"Test_{name}": suite(name) for name in kit_plugins.NAMES})
