"""The conformance kit on a collective that is an installed plugin, in a process that finds it by its entry point."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from dist_info import install_distribution

LIMIT_S = 900
MUST_PASS = frozenset(
    f"test_world_{test}]"
    for test in ("calls[host-results", "again_with_ranks_that_are_late[host-results", "of_a_group[host")
)
"""Tests that must not be left out."""


def passed(tmp_path, module, name, suite):
    """Install a plugin and run its suite, all of which must pass or be skipped; returns the names of what has passed.

    Args:
        tmp_path: an empty folder.
        module: of the plugins, beside the suite.
        name: of the plugin in there; its suite is Test_<name>.
        suite: file of the suites.
    """
    folder = suite.parent
    points = {"iris.collectives": {getattr(module, name).info.name: f"{module.__name__}:{name}"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        install_distribution(tmp_path / "site", "iris-in-the-kit", entry_points=points)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    report = tmp_path / "report.xml"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTEST_"))}
    paths = [str(tmp_path / "site"), str(folder), str(folder.parent / "multirank"), os.environ.get("PYTHONPATH")]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += ["-c", str(tmp_path / "pytest.ini"), f"{suite}::Test_{name}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return {case.get("name") for case in ET.parse(report).iter("testcase") if len(case) == 0}
