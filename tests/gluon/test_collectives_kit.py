"""The conformance kit passes on the algorithms in Gluon: what they say, and their calls where they are installed."""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET

import collectives_plugins
import pytest
import suite_collectives

from iris_core.testing import CollectiveConformance
from iris_core.testing.dist_info import install_distribution

HERE = pathlib.Path(__file__).parent
LIMIT_S = 600
_NEEDS_AN_INSTALLATION = ("test_static_entry_point_names_the_plugin",)
MUST_PASS = (
    "test_world_results[host]",
    "test_world_again_with_ranks_that_are_late[host]",
    "test_world_of_a_group[host]",
)

for _name, _suite in vars(suite_collectives).copy().items():
    if _name.startswith("Test_"):
        _left_out = [name for name in dir(CollectiveConformance) if name.startswith("test_world")]
        globals()[_name] = type(_name, (_suite,), dict.fromkeys([*_left_out, *_NEEDS_AN_INSTALLATION]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_reduce_two_shot"])
def test_kit_on_ranks(name, tmp_path):
    """In a process of its own, which finds the plugin by its entry point."""
    plugin = getattr(collectives_plugins, name)
    points = {"iris.collectives": {plugin.info.name: f"collectives_plugins:{name}"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        install_distribution(tmp_path / "site", "iris-gluon-in-the-kit", entry_points=points)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    report = tmp_path / "report.xml"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTEST_"))}
    paths = [str(tmp_path / "site"), str(HERE), os.environ.get("PYTHONPATH")]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += ["-c", str(tmp_path / "pytest.ini"), str(HERE / "suite_collectives.py") + f"::Test_{name}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    passed = {case.get("name") for case in ET.parse(report).iter("testcase") if len(case) == 0}
    assert set(MUST_PASS) <= passed
