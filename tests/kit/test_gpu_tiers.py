"""gpu_tiers: which tests need how many GPUs, what is skipped, and what is a failure."""

import json
import os
import pathlib
import subprocess
from dataclasses import dataclass

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


@dataclass
class Tiers:
    """Runs pytest in a folder on the suite above (or another one) where torch seems to see so many GPUs."""

    folder: pathlib.Path

    def __call__(self, gpus, *arguments, suite=SUITE):
        """Returns the exit code, and what was said."""
        (self.folder / "conftest.py").write_text(PRETEND.format(gpus=gpus))
        (self.folder / "test_suite.py").write_text(suite)
        (self.folder / "pytest.ini").write_text("[pytest]\ntestpaths = .\naddopts = --strict-markers -rs\n")
        options = ["-p", "gpu_tiers", "-p", "no:cacheprovider", "-v", *arguments]
        options += ["-p", "xdist"] * any(each.startswith("-n") for each in arguments)
        # no other plugin: to import hypothesis takes longer than all else here
        environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = forked.run(forked.pytest_main, options, cwd=self.folder, environ=environ)
        return done.returncode, done.stdout + done.stderr

    def reported(self, gpus, *arguments, suite=SUITE):
        """Also returns the report, which is written into a folder of its own."""
        code, output = self(gpus, *arguments, "--gpu-report", str(self.folder / "out"), suite=suite)
        (report,) = (self.folder / "out").glob("gpu-tests-*xtesting-100.json")
        return code, output, json.loads(report.read_text())


@pytest.fixture
def tiers(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_COMMIT", "abc")
    return Tiers(tmp_path)


def results(output):
    """Names of the tests in the order in which they ran, with their outcomes."""
    lines = [line.split() for line in output.splitlines() if line.startswith("test_suite.py::")]
    return [(words[0].partition("::")[2], words[1].lower()) for words in lines]


def test_what_lacks_gpus_is_skipped_and_says_so(tiers):
    code, output = tiers(2)
    skipped = {name for name, outcome in results(output) if outcome == "skipped"}
    assert skipped == {"test_four", "test_ranks[3]", "test_ranks[8]", "test_for_another_reason"}
    assert (code, len(results(output))) == (0, 12)
    for needed in (4, 8):
        assert f"needs {needed} GPUs, torch sees 2" in output


def test_all_tiers_that_the_gpus_allow(tiers):
    code, output, report = tiers.reported(2, "--gpu-tiers=all")
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


def test_ranks_that_share_gpus(tiers):
    suite = SUITE.replace("multigpu(4)", "multigpu(4, shared=False)")
    code, output, report = tiers.reported(2, "--gpu-tiers", "2 8", "--ranks-per-gpu=4", suite=suite)
    assert code == 0
    assert "GPU tiers (2 GPUs, 4 ranks on each)" in output
    assert "tier 4: did not run (not asked for)" in output
    assert ("test_ranks[8]", "passed") in results(output)
    assert (tiers.folder / "out" / "gpu-tests-8-ranks-on-2xtesting-100.json").exists()
    assert (report["passed"], report["tiers_asked_for"], report["ranks_per_gpu"]) == (True, [2, 8], 4)
    assert [tier["passed"] for tier in report["tiers"]] == [3, 1]
    code, output = tiers(2, "--ranks-per-gpu=4", suite=suite)
    assert {("test_four", "skipped"), ("test_ranks[3]", "passed")} <= set(results(output))


def test_side_by_side_and_the_rest_afterwards(tiers):
    suite = SUITE.replace("@pytest.mark.gpu\ndef test_one", "@pytest.mark.alone\n@pytest.mark.gpu\ndef test_one")
    suite = suite.replace("def test_one(): pass", "def test_one(): assert False")
    code, output, _ = tiers.reported(2, "--gpu-tiers", "1 2", "-n2", "-m", "not alone", suite=suite)
    assert code == 0
    assert "not to be kept: tier 1 has 3 results of 4 tests" in output
    assert "tier 1: 2 passed, 0 failed, 1 skipped" in output
    assert "tier 2: 3 passed" in output
    code, output, whole = tiers.reported(2, "--gpu-tiers", "1 2", "-m", "alone", "--gpu-report-add", suite=suite)
    assert code == 1
    assert "did not run" not in output.replace("did not run (torch", "")  # tier 2 had run before
    assert whole["passed"] is False
    assert [(tier["gpus"], tier["passed"], tier["failed"]) for tier in whole["tiers"]] == [(1, 2, 1), (2, 3, 0)]
    assert [tier["failures"] for tier in whole["tiers"]] == [["test_suite.py::test_one"], []]
    assert len(whole["arguments"]) == 2
    assert lacks(whole) == []


def test_a_process_that_ends_is_a_failure(tiers):
    suite = SUITE.replace("def test_two_by_default(): pass", "def test_two_by_default(): __import__('os')._exit(3)")
    code, _, report = tiers.reported(2, "--gpu-tiers=2", "-n2", suite=suite)
    assert code == 1
    assert report["problems"] == ["the process of test_suite.py::test_two_by_default ended"]
    assert lacks(report) == [*report["problems"], "tier 2 has 2 results of 3 tests"]  # it has not passed


@table("arguments", [("-k", "not test_one"), ("-x",), ("test_suite.py",), ("--ignore", "test_other.py")])
@pytest.mark.usefixtures("tiers")
def test_a_report_of_some_tests_is_not_to_be_kept(tmp_path, arguments):
    suite = SUITE.replace("def test_ranks(num_ranks): pass", "def test_ranks(num_ranks): assert False")
    _, output, report = Tiers(tmp_path).reported(1, "--gpu-tiers=all", *arguments, suite=suite)
    assert "not to be kept: " in output
    assert lacks(report)


def test_a_report_is_of_the_commit_that_it_names(tiers, tmp_path, monkeypatch):
    """Also in a copy without history, whose files are compared where there is one."""
    source = tmp_path / "tests" / "test_it.py"
    source.parent.mkdir()
    source.write_text("def test_it(): pass\n")

    def git(*words):
        name = ("-c", "user.name=me", "-c", "user.email=me@here")
        return subprocess.check_output(["git", *name, *words], cwd=tmp_path, text=True).strip()

    def report():
        _, output, found = tiers.reported(1, "--gpu-tiers=1")
        assert bool(lacks(found)) == ("not to be kept" in output)
        return found

    monkeypatch.delenv("SOURCE_COMMIT")
    git("init", "-q")
    git("add", "tests")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    kept = report()  # what it writes is no change of what is tested
    assert (kept["source"]["commit"], kept["source"]["changed"]) == (commit, False)
    assert kept["source"]["files"] == digest_of_commit(tmp_path, commit)
    source.write_text("def test_it(): assert False\n")
    assert lacks(report()) == [f"what was tested is not commit {commit}"]
    git("checkout", "-q", "tests")
    (tmp_path / ".git").rename(tmp_path / "history")
    assert lacks(report()) == ["it names no commit (SOURCE_COMMIT, in a copy without history)"]
    monkeypatch.setenv("SOURCE_COMMIT", commit)
    assert report()["source"] == kept["source"] | {"changed": None}


@table("path", sorted((ROOT / "benchmarks" / "results").glob("gpu-tests-*.json")))
def test_the_reports_that_are_kept_are_whole_and_of_their_commits(path):
    report = json.loads(path.read_text())
    assert lacks(report) == []
    known = digest_of_commit(ROOT, report["source"]["commit"])
    assert report["source"]["files"] in (known, None) or known is None  # a copy without history knows none


ALL = ("--gpu-tiers=all", "--gpu-report", ".")
LACKING = SUITE.replace("multigpu", "gpu").replace('"gpus"]', '"gpu"]')
ERROR = {*range(2, 6)}
NOT_THERE = "there is no no/gpu-tests-2xtesting-100.json"


@table("gpus, arguments, suite, codes, says", [
    # tiers that stay empty
    (2, ("--gpu-tiers", "1 4"), SUITE, [1], "FAILED: tier 4 did not run: its 2 tests were skipped"),
    (2, ("--gpu-tiers=all", "-k", "test_one"), SUITE, [0], "tier 1: 1 passed"),
    (2, ("--gpu-tiers=all", "-k", "another_reason"), SUITE, [1],
     "FAILED: tier 1 did not run: its 1 tests were skipped"),
    (2, ("--gpu-tiers=all",), LACKING, [1], "FAILED: tier 2 did not run: no test of it was selected"),
    # what cannot be done
    (0, ALL, SUITE, ERROR, "torch sees no GPU here"),
    (2, ["--gpu-tiers=3"], SUITE, ERROR, "takes \"all\" or some of 1, 2, 4, 8, not '3'"),
    (2, ["--gpu-report=here"], SUITE, ERROR, "--gpu-report needs --gpu-tiers"),
    (2, ALL, SUITE + "import no_such_module", ERROR, "no_such_module"),
    (2, [], SUITE.replace("multigpu(4)", "multigpu(9)"), ERROR, "needs 9 GPUs; the largest tier has 8"),
    (2, ["--gpu-tiers=1", "--gpu-report-add"], SUITE, ERROR, "--gpu-report-add needs --gpu-report"),
    (2, ["--gpu-tiers=1", "--gpu-report=no", "--gpu-report-add"], SUITE, ERROR, NOT_THERE),
    (2, ["--ranks-per-gpu=0"], SUITE, ERROR, "--ranks-per-gpu takes a number from 1 on"),
])  # fmt: skip
def test_what_is_selected_and_asked_for(tmp_path, gpus, arguments, suite, codes, says):
    code, output = Tiers(tmp_path)(gpus, *arguments, suite=suite)
    assert (code in codes, says in output, [*tmp_path.glob("*.json")]) == (True, True, []), output
