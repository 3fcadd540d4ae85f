"""The conformance kit on the portable algorithms: what they say of themselves, and some of them as installed plugins.

The kit's calls on ranks need an installed plugin; test_operations, test_sequences and test_variants make others through
`ctx.ccl`.
"""

import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ET

import kit_plugins
import pytest

from iris_core.testing import CollectiveConformance
from iris_core.testing.dist_info import install_distribution

HERE = pathlib.Path(__file__).parent
LIMIT_S = 900
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
@pytest.mark.parametrize(
    "name", ["all_reduce_ring", pytest.param("all_gather_copy_engine", marks=pytest.mark.exhaustive)]
)
def test_installed(name, tmp_path):
    plugin = getattr(kit_plugins, name)
    points = {"iris.collectives": {plugin.info.name: f"kit_plugins:{name}"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        install_distribution(tmp_path / "site", "iris-portable-alone", entry_points=points)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    report = tmp_path / "report.xml"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTEST_"))}
    paths = [str(tmp_path / "site"), str(HERE), os.environ.get("PYTHONPATH")]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += ["-c", str(tmp_path / "pytest.ini"), str(HERE / "suite_portable.py") + f"::Test_{name}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-5000:]
    passed = {case.get("name") for case in ET.parse(report).iter("testcase") if len(case) == 0}
    tests = ("test_world_results", "test_world_again_with_ranks_that_are_late", "test_world_of_a_group")
    assert {f"{test}[host]" for test in tests} <= passed
