"""The conformance kit on algorithms of both languages: what they say of themselves, and calls as installed plugins."""

import pathlib

import kit_plugins
import kit_runner
import pytest
import suite_kit

from iris_core.testing import CollectiveConformance

_LEFT_OUT = [name for name in dir(CollectiveConformance) if name.startswith("test_world")]
_LEFT_OUT.append("test_static_entry_point_names_the_plugin")
globals().update({f"Test_{name}": suite_kit.suite(name, *_LEFT_OUT) for name in kit_plugins.NAMES})


@pytest.mark.slow
@pytest.mark.exhaustive  # tests/kit has right ones of every operation
@pytest.mark.parametrize("name", [
    "all_reduce_two_shot", "all_gather_persistent", "all_reduce_gluon_two_shot",
    *(f"{op}_{each}" for op, names in (*kit_plugins.PACKETS.items(), *kit_plugins.NVLS.items()) for each in names),
])  # fmt: skip
def test_installed(name, tmp_path):
    """In a process of its own, which finds the plugin by its entry point."""
    suite = pathlib.Path(__file__).parent / "suite_kit.py"
    passed = kit_runner.passed(tmp_path, kit_plugins, name, suite)
    # a rank alone is served by the core, and the kit leaves the tests out in which it is refused
    assert {each for each in kit_runner.MUST_PASS if "split" not in name or "results" not in each} <= passed
