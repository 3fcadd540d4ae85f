"""gpu_tiers: which tests need how many GPUs, what is skipped, and what is a failure."""

import json
import pathlib

import forked
import pytest
from gpu_tiers import digest_of_commit, lacks
from tables import table

ROOT = pathlib.Path(__file__).parents[2]

SUITE = """
import pytest

def test_plain(): pass

@pytest.mark.multigpu(4)
def test_four(): pass

@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_ranks(num_ranks): pass

@pytest.mark.multigpu
def test_two_by_default(): pass

@pytest.mark.gpu
def test_one(): pass

@pytest.mark.gpu
def test_for_another_reason(): pytest.skip("no such driver")

class TestStack:
    gpus_of_tier = {"host": 0, "gpu": 1, "gpus": 2}

    @pytest.mark.parametrize("world", ["host", "gpu", "gpus"])
    def test_world(self, world): pass
"""
PRETEND = """
from iris_core.bench import results
import gpu_tiers

gpu_tiers.visible_gpus = lambda: {gpus}
results.describe = lambda: {{"gpu": "NVIDIA Testing 100", "gpus": {gpus}}}
"""


@pytest.fixture
def tiers(tmp_path, monkeypatch):
    """Returns a function (GPUs that torch seems to see, arguments) that runs pytest: exit code, output, report."""
    monkeypatch.setenv("SOURCE_COMMIT", "abc")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = .\naddopts = --strict-markers -rs\n")

    def run(gpus, *arguments, suite=SUITE):
        (tmp_path / "conftest.py").write_text(PRETEND.format(gpus=gpus))
        (tmp_path / "test_suite.py").write_text(suite)
        options = ["-p", "gpu_tiers", "-v", *arguments]
        options += ["-p", "xdist"] * any(each.startswith("-n") for each in arguments)
        done = forked.run(forked.pytest_main, options, cwd=tmp_path)
        report = next((tmp_path / "out").glob("gpu-tests-*xtesting-100.json"), None)
        return done.returncode, done.stdout + done.stderr, report and json.loads(report.read_text())

    return run


REPORT = "--gpu-report=out"


def results(output):
    """Names of the tests in the order in which they ran, with their outcomes."""
    lines = [line.split() for line in output.splitlines() if line.startswith("test_suite.py::")]
    return [(words[0].partition("::")[2], words[1].lower()) for words in lines]


def test_what_lacks_gpus_is_skipped_and_says_so(tiers):
    code, output, _ = tiers(2)
    skipped = {name for name, outcome in results(output) if outcome == "skipped"}
    assert skipped == {"test_four", "test_ranks[3]", "test_ranks[8]", "test_for_another_reason"}
    assert (code, len(results(output))) == (0, 12)
    for needed in (4, 8):
        assert f"needs {needed} GPUs, torch sees 2" in output


def test_all_tiers_that_the_gpus_allow(tiers):
    code, output, report = tiers(2, "--gpu-tiers=all", REPORT)
    assert code == 0
    assert [name for name, _ in results(output)] == [
        "test_ranks[1]", "test_one", "test_for_another_reason", "TestStack::test_world[gpu]",
        "test_ranks[2]", "test_two_by_default", "TestStack::test_world[gpus]",
    ]  # fmt: skip
    assert "tier 1: 3 passed, 0 failed, 1 skipped" in output
    assert "tier 2: 3 passed, 0 failed, 0 skipped" in output
    assert "tier 8: did not run (torch sees 2)" in output
    assert (report["passed"], report["tiers_asked_for"], report["machine"]["gpus"]) == (True, "all", 2)
    first, second = report["tiers"]
    names = ("gpus", "passed", "failed", "skipped", "skip_reasons")
    assert [first[name] for name in names] == [1, 3, 0, 1, {"no such driver": 1}]
    assert [second[name] for name in names] == [2, 3, 0, 0, {}]
    assert second["failures"] == []


# Of two processes, one has tests 0, 1 and 2, the other one 3 and then those that are alone.
SIDE_BY_SIDE = """
import pathlib, time, pytest

named = lambda pattern: [*pathlib.Path.cwd().glob(pattern)]

@pytest.mark.gpu
@pytest.mark.parametrize("number", range(4))
def test_beside(number):
    mine = pathlib.Path(f"running {number}")
    for each in (mine, pathlib.Path(f"came {number}")):
        each.touch()
    while number in (0, 3) and len(named("came [03]")) < 2: time.sleep(0.01)  # they meet
    time.sleep(0.3)
    mine.unlink()
    assert number != 2

@pytest.mark.alone
@pytest.mark.gpu
@pytest.mark.parametrize("number", range(2))
def test_alone(number):
    for _ in range(3):
        assert not named("running *")
        time.sleep(0.1)
"""


def test_side_by_side_and_some_alone(tiers):
    code, _, report = tiers(1, "--gpu-tiers=1", REPORT, "-n2", "--dist=worksteal", suite=SIDE_BY_SIDE)
    (tier,) = report["tiers"]
    assert (code, report["passed"], tier["failures"]) == (1, False, ["test_suite.py::test_beside[2]"])
    assert (tier["passed"], tier["failed"], tier["collected"]) == (5, 1, 6)
    assert lacks(report) == []
    *_, part = tiers(1, "--gpu-tiers=1", REPORT, "-k", "alone", suite=SIDE_BY_SIDE)
    assert lacks(part) == ["tier 1 has 2 results of 6 tests"]


@table("path", sorted((ROOT / "benchmarks" / "results").glob("gpu-tests-*.json")))
def test_the_reports_that_are_kept_are_whole_and_of_their_commits(path):
    report = json.loads(path.read_text())
    assert lacks(report) == []
    known = digest_of_commit(ROOT, report["source"]["commit"])
    assert report["source"]["files"] in (known, None) or known is None  # a copy without history knows none


@table("gpus, arguments, suite, says", [
    (2, ("--gpu-tiers", "1 4"), SUITE, "FAILED: tier 4 did not run: its 2 tests were skipped"),
    (2, ("--gpu-tiers=all",), SUITE.replace("multigpu", "gpu").replace('"gpus"]', '"gpu"]'),
     "FAILED: tier 2 did not run: no test of it was selected"),
    (0, ("--gpu-tiers=all", "--gpu-report", "."), SUITE, "torch sees no GPU here"),
    (2, ["--gpu-tiers=3"], SUITE, "takes \"all\" or some of 1, 2, 4, 8, not '3'"),
    (2, [], SUITE.replace("multigpu(4)", "multigpu(9)"), "needs 9 GPUs; the largest tier has 8"),
])  # fmt: skip
def test_tiers_that_stay_empty_and_what_cannot_be_done_are_failures(tiers, gpus, arguments, suite, says):
    code, output, _ = tiers(gpus, *arguments, suite=suite)
    assert (code != 0, says in output) == (True, True), output
