"""The conformance kit on the portable algorithms: what they say of themselves, and some of them as installed plugins.

The kit's calls on ranks need an installed plugin; test_operations, test_sequences and test_variants make others through
`ctx.ccl`.
"""

import pathlib

import kit_plugins
import kit_runner
import pytest

from iris_core.testing import CollectiveConformance

HERE = pathlib.Path(__file__).parent
_NOT_INSTALLED = ("test_static_entry_point_names_the_plugin", "test_static_import_is_light")


def suite(plugin):
    """The kit's tests of one algorithm that need no rank processes."""
    left_out = [name for name in dir(CollectiveConformance) if name.startswith("test_world") or name in _NOT_INSTALLED]
    attributes = dict.fromkeys(left_out) | {"plugin": pytest.fixture(lambda self: plugin)}
    return type(f"Test_{plugin.info.name}", (CollectiveConformance,), attributes)


for _name, _plugin in vars(kit_plugins).copy().items():
    if isinstance(_plugin, kit_plugins.AsPlugin):
        globals()[f"Test_{_name}"] = suite(_plugin)


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/gluon has one, and tests/kit right ones of every operation
@pytest.mark.parametrize("name", ["all_reduce_two_shot", "all_gather_persistent"])
def test_installed(name, tmp_path):
    assert kit_runner.passed(tmp_path, kit_plugins, name, HERE / "suite_portable.py") >= kit_runner.MUST_PASS
