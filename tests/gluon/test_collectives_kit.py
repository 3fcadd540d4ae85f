"""The conformance kit passes on the algorithms in Gluon: what they say, and their calls where they are installed."""

import pathlib

import collectives_plugins
import kit_runner
import pytest
import suite_collectives

from iris_core.testing import CollectiveConformance

HERE = pathlib.Path(__file__).parent
_NEEDS_AN_INSTALLATION = ("test_static_entry_point_names_the_plugin",)

for _name, _suite in vars(suite_collectives).copy().items():
    if _name.startswith("Test_"):
        _left_out = [name for name in dir(CollectiveConformance) if name.startswith("test_world")]
        globals()[_name] = type(_name, (_suite,), dict.fromkeys([*_left_out, *_NEEDS_AN_INSTALLATION]))


@pytest.mark.slow
@pytest.mark.exhaustive  # test_collectives has its calls; tests/ccl_fast has one algorithm in a process of its own
@pytest.mark.parametrize("name", ["all_reduce"])
def test_kit_on_ranks(name, tmp_path):
    """In a process of its own, which finds the plugin by its entry point."""
    suite = HERE / "suite_collectives.py"
    assert kit_runner.passed(tmp_path, collectives_plugins, name, suite) >= kit_runner.MUST_PASS
