"""The kit fails on plugins that are wrong: each mutant at the tests that are about its mistake.

The mutants stand in kit_mutants.  They run in one process; the tests here look at its report.  A mutant may fail
further tests, but skips none that the right plugin does not skip.  Allocators, plugins and backends by themselves run
the tests that are about their mistakes and a few others, which they pass; with --exhaustive all of them.
"""

import os
import pathlib
import re
import xml.etree.ElementTree as ET

import forked
import pytest
from dist_info import install_distribution
from kit_mutants import plugins
from kit_mutants.device import FAMILIES
from kit_mutants.killers import ALLOCATORS, BACKENDS, COLLECTIVES, GROWING, OPTIONAL, PLUGINS

from iris_core.testing.conformance.device_functions import NAMES

HERE = pathlib.Path(__file__).parent
pytestmark = pytest.mark.slow

STACKS = {"crossed-stack": ["world_device_barrier_of_the_host[host]"], **OPTIONAL}
DEVICE = {
    mutant: [f"world_device_{'methods' if mutant == 'mute-methods' else 'functions'}[host]"] for mutant in FAMILIES
}


def entry_points():
    """The mutants as an installed distribution names them."""
    points = {
        kind.group: {name: f"kit_mutants.plugins:{plugins.attribute(kind, name)}" for name in named}
        for kind, named in plugins.KINDS.items()
    }
    points["iris.allocators"]["heavy"] = "kit_mutants.heavy:plugin"
    return points


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory):
    """Outcome by mutant and test."""
    folder = tmp_path_factory.mktemp("mutants")
    site = folder / "site"
    install_distribution(site, "iris-kit-mutants", entry_points=entry_points())
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("IRIS_", "PYTEST_"))}
    environment["OMP_NUM_THREADS"] = environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if request.config.getoption("exhaustive"):
        environment["KIT_MUTANTS_RUN_ALL"] = "1"
    report = folder / "report.xml"
    # native: pytest's own tracebacks parse the suites' sources again for each failure, and most tests fail here
    options = ["-q", f"--junitxml={report}", "-c", folder / "pytest.ini", "--tb=native"]
    suites = sorted(HERE.glob("suite_*.py"))
    arguments = [*options, "-p", "no:cacheprovider", "-p", "no:logging", *suites]
    done = forked.run(forked.pytest_main, arguments, [site, HERE], environ=environment, timeout_s=900.0)
    assert done.returncode == 1, (done.stdout + done.stderr)[-5000:]  # tests failed, and nothing else went wrong
    return read_report(report)


def read_report(path):
    outcomes = {}
    for case in ET.parse(path).iter("testcase"):
        mutant = case.get("classname").rpartition("Test_")[2].replace("_", "-")
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = "skipped" if kinds == {"skipped"} else "failed" if kinds else "passed"
        outcomes.setdefault(mutant, {})[case.get("name").removeprefix("test_")] = outcome
        if mutant in DEVICE and (said := case.findtext("failure")):
            outcomes[f"{mutant} says"] = {
                name for name in NAMES if re.search(rf"^(AssertionError: | *){name}[ ,].*, rank \d+: ", said, re.M)
            }
    return outcomes


def with_outcome(report, outcome):
    return {name for name, each in report.items() if each == outcome}


def test_the_right_ones_pass(reports):
    rights = ["right-allocator", "right-growing", "right-backend", "right-stack", *plugins.RIGHT_COLLECTIVES]
    for right in rights:
        assert with_outcome(reports[right], "failed") == set(), right
        assert len(with_outcome(reports[right], "passed")) >= 4, right
    mutants = {*ALLOCATORS, *GROWING, *PLUGINS, *BACKENDS, *STACKS, *DEVICE, *COLLECTIVES}
    assert reports.keys() - {f"{mutant} says" for mutant in DEVICE} == mutants.union(rights)


KINDS = (
    (ALLOCATORS, "right-allocator"), (GROWING, "right-growing"), (PLUGINS, "right-allocator"),
    (BACKENDS, "right-backend"), (STACKS, "right-stack"), (COLLECTIVES, "right-all-reduce"),
)  # fmt: skip
_OF_ALL = ("world_calls[host-agreement]", "world_calls[host-bits]", "world_again_with_ranks_that_are_late[host-bits]")
MAY_SKIP = {"untold-capability": ("host_decommit_gives_memory_back",)}
MAY_SKIP |= dict.fromkeys(COLLECTIVES, _OF_ALL)  # that give every rank something of its own, or reduce nothing


def test_every_mutant_is_noticed(reports):
    """By the tests that are about its mistake; others pass, or the failures would not be about it."""
    problems = []
    for mutants, right in KINDS:
        for mutant, killers in mutants.items():
            failed, passed, skipped = (with_outcome(reports[mutant], each) for each in ("failed", "passed", "skipped"))
            if missed := set(killers) - failed:
                problems.append(f"{mutant}: {missed} did not notice; {failed} did")
            if more := skipped.difference(with_outcome(reports[right], "skipped"), MAY_SKIP.get(mutant, ())):
                problems.append(f"{mutant}: {more} were skipped")
            if not passed and mutant != "crossed-stack":  # where every message goes astray
                problems.append(f"{mutant}: nothing passed")
    assert not problems, "\n".join(problems)


def test_device_functions(reports):
    """Each function is wrong by itself, so it is named, and the right ones are not."""
    for mutant, names in FAMILIES.items():
        assert with_outcome(reports[mutant], "failed") == set(DEVICE[mutant])
        assert reports[f"{mutant} says"] == names, mutant


def test_every_test_of_the_kit_can_fail(reports):
    """Some mutant is there for it: a test that passes on all of them would be worth nothing."""
    for mutants, right in (
        (ALLOCATORS | PLUGINS, "right-allocator"), (GROWING, "right-growing"), (BACKENDS | PLUGINS, "right-backend"),
        (STACKS | DEVICE, "right-stack"), (COLLECTIVES | PLUGINS, "right-all-reduce"),
    ):  # fmt: skip
        noticed = {name.partition("[")[0] for killers in mutants.values() for name in killers}
        assert {name.partition("[")[0] for name in with_outcome(reports[right], "passed")} <= noticed
