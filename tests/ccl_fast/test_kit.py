"""The conformance kit on algorithms of both languages: what they say of themselves, and calls as installed plugins."""

import os
import pathlib
import xml.etree.ElementTree as ET

import forked
import kit_plugins
import pytest
import suite_kit
from dist_info import install_distribution

from iris_core.testing import CollectiveConformance

HERE = pathlib.Path(__file__).parent
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
    site, report = tmp_path / "site", tmp_path / "report.xml"
    points = {"iris.collectives": {getattr(kit_plugins, name).info.name: f"kit_plugins:{name}"}}
    install_distribution(site, "iris-in-the-kit", entry_points=points)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTEST_"))}
    environment["OMP_NUM_THREADS"] = "1"
    options = ["-q", "--tb=short", f"--junitxml={report}", "-p", "no:cacheprovider", "-c", tmp_path / "pytest.ini"]
    arguments = [*options, f"{HERE / 'suite_kit.py'}::Test_{name}"]
    done = forked.run(forked.pytest_main, arguments, [site, HERE], environ=environment, timeout_s=900.0)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    passed = {case.get("name") for case in ET.parse(report).iter("testcase") if len(case) == 0}
    must_pass = {"test_world_of_a_group[host]", "test_world_calls[host-results]"}
    # a rank alone is served by the core, and the kit leaves the tests out in which it is refused
    assert {each for each in must_pass if "split" not in name or "results" not in each} <= passed
