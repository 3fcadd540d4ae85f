"""The kit fails on plugins that are wrong: each mutant at the tests that are about its mistake.

The mutants stand in kit_mutants.  Each part of them runs in a process of its own, whose report is judged here.  A
mutant may fail further tests, but skips none on ranks of the CPU that the right plugin does not skip.  Mutants run the
tests that are about their mistakes and a few others, which they pass; without --exhaustive, every third mutant.
"""

import collections
import os
import pathlib
import re
import xml.etree.ElementTree as ET

import forked
import pytest
from dist_info import install_distribution
from kit_mutants import mutants, plugins
from kit_mutants.device import FAMILIES

from iris_core.testing.conformance.stack_jobs import NAMES

HERE = pathlib.Path(__file__).parent
STACKS = {"crossed-stack": ("world_device_barrier_of_the_host[host]",), **mutants.OPTIONAL}
DEVICE, COLLECTIVES, PLUGINS = mutants.FAMILIES, mutants.COLLECTIVES, mutants.PLUGINS
OF_CALLS = {name: killers for name, killers in COLLECTIVES.items() if killers[0].startswith("world_calls")}
OTHERS = {name: killers for name, killers in COLLECTIVES.items() if name not in OF_CALLS}
RIGHT_OPS = {name for name in plugins.COLLECTIVES if name.startswith("right-")} - {"right-AllReduce"}
PARTS = {
    "allocators": ({**mutants.ALLOCATORS, **mutants.GROWING, **PLUGINS}, {"right-allocator", "right-growing"}),
    "backends": (mutants.BACKENDS, {"right-backend"}),
    "backends in stacks": ({**STACKS, **DEVICE}, {"right-stack"}),
    "collectives by call": (OF_CALLS, RIGHT_OPS),
    "collectives": (OTHERS, {"right-AllReduce"}),
}
"""Mutants with the tests that kill them, and right plugins."""
_OF_ALL = ("world_calls[host-agreement]", "world_calls[host-bits]")
MAY_SKIP = {"undeclared-capability": ("host_decommit_gives_memory_back",)}
MAY_SKIP |= dict.fromkeys(COLLECTIVES, _OF_ALL)  # that give every rank something of its own, or reduce nothing


@pytest.fixture
def reports(tmp_path):
    """Returns a function (names of plugins): the outcome by plugin and test."""
    site = tmp_path / "site"
    points = collections.defaultdict(dict)
    for name, plugin in plugins.ALL.items():
        points[plugin.info.kind.group][name] = f"kit_mutants.plugins:{name.replace('-', '_')}"
    points["iris.allocators"]["heavy"] = "kit_mutants.heavy:plugin"
    install_distribution(site, "iris-kit-mutants", entry_points=points)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def run(names):
        report = tmp_path / "report.xml"
        classes = [f"{HERE / 'suites.py'}::Test_{name}" for name in sorted(names)]
        # native: pytest's own tracebacks parse the suites' sources again for each failure, and most tests fail here
        options = ["-q", f"--junitxml={report}", "-c", tmp_path / "pytest.ini", "--tb=native"]
        arguments = [*options, "-p", "no:logging", *classes]
        done = forked.run(forked.pytest_main, arguments, [site, HERE], environ=environment, timeout_s=900.0)
        assert done.returncode == 1, (done.stdout + done.stderr)[-5000:]  # tests failed, and nothing else went wrong
        return read_report(report)

    return run


def read_report(path):
    outcomes = {}
    for case in ET.parse(path).iter("testcase"):
        mutant = case.get("classname").rpartition("Test_")[2]
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


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_every_mutant_is_noticed(reports, some, part):
    """By the tests that are about its mistake; others pass, or the failures would not be about it."""
    every, rights = PARTS[part]
    chosen = {name: every[name] for name in some(sorted(every), 3)}
    found = reports(rights.union(chosen))
    assert found.keys() - {f"{mutant} says" for mutant in DEVICE} == rights.union(chosen)
    for right in rights:
        assert with_outcome(found[right], "failed") == set(), right
        assert len(with_outcome(found[right], "passed")) >= 4, right
    may_skip = set().union(*(with_outcome(found[right], "skipped") for right in rights))
    problems = []
    for mutant, (killers, *_) in chosen.items():
        killers = set(killers.split())
        failed, passed, skipped = (with_outcome(found[mutant], each) for each in ("failed", "passed", "skipped"))
        skipped = {name for name in skipped if "[gpu" not in name}
        if missed := killers - failed:
            problems.append(f"{mutant}: {missed} did not notice; {failed} did")
        if more := skipped.difference(may_skip, MAY_SKIP.get(mutant, ())):
            problems.append(f"{mutant}: {more} were skipped")
        if mutant in DEVICE:  # each function is wrong by itself, so it is named, and the right ones are not
            assert failed == killers
            assert found[f"{mutant} says"] == FAMILIES[mutant], mutant
        elif not passed and mutant != "crossed-stack":  # where every message goes astray
            problems.append(f"{mutant}: nothing passed")
    assert not problems, "\n".join(problems)
    # some mutant is there for every test of the kit: one that passes on all of them would be worth nothing
    killing = {**PLUGINS, **(COLLECTIVES if "collectives" in part else every)}
    noticed = {name.partition("[")[0] for killers, *_ in killing.values() for name in killers.split()}
    for right in rights:
        assert {name.partition("[")[0] for name in with_outcome(found[right], "passed")} <= noticed, right
