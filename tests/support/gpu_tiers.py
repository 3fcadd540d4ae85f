"""A plugin of pytest for tests that need GPUs: skipped where there are too few, run and reported by tiers.

    pytest                                    all tests; those that lack GPUs are skipped
    pytest --gpu-tiers=all                    the GPU tests alone, every tier that these GPUs allow
    pytest --gpu-tiers="1 2"                  these tiers, and it is a failure if one does not run
    pytest --ranks-per-gpu=4 --gpu-tiers=8    tier 8 on two GPUs, four ranks on each

Of processes of pytest-xdist, those with tests marked `alone` wait for the others.  `lacks` says of a report whether it
is whole, and of its commit.  CONTRIBUTING.md says the rest.

A tier is a number of GPUs: 1, 2, 4 or 8.  The marker `gpu` puts a test into the first tier.  `multigpu(n)` puts it into
the smallest one that has n GPUs; without n, the test's parameter `num_ranks` counts, or 2.  The tests of
`StackConformance` need no marker.
"""

import collections
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
from dataclasses import dataclass

import pytest

TIERS = (1, 2, 4, 8)

_MARKERS = (
    "gpu: needs one GPU; runs in `make gpu-test`",
    "multigpu(n, shared=True): needs n GPUs, by default as many as the parameter `num_ranks` says, or 2; runs in "
    "`make gpu-test`; shared=False: its ranks cannot share a GPU (--ranks-per-gpu)",
    "alone: other tests on the same GPUs would disturb it",
)
_TIER = pytest.StashKey[int]()
_COLLECTED = pytest.StashKey[collections.Counter]()
_OUTCOMES = ("passed", "failed", "skipped")


@functools.cache
def visible_gpus():
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _number(gpus):
    return f"{gpus} GPU{'s' * (gpus != 1)}"


def ranks_here(config, item=None):
    """Return how many ranks find a place; those of some tests cannot share a GPU."""
    multi = item and item.get_closest_marker("multigpu")
    apart = multi and not multi.kwargs.get("shared", True) and "NCCL_MULTI_RANK_GPU_ENABLE" not in os.environ
    return visible_gpus() * (1 if apart else config.getoption("--ranks-per-gpu"))


def tier_of(item):
    """Return the number of GPUs of a test's tier; 0 if it needs none.

    Raises:
        pytest.UsageError: it needs more GPUs than the largest tier has.
    """
    params = getattr(getattr(item, "callspec", None), "params", {})
    multi = item.get_closest_marker("multigpu")
    if multi is not None:
        needed = multi.args[0] if multi.args else params.get("num_ranks", 2)
    elif item.get_closest_marker("gpu") is not None:
        needed = 1
    else:  # StackConformance
        needed = getattr(getattr(item, "cls", None), "gpus_of_tier", {}).get(params.get("world"), 0)
    if needed > TIERS[-1]:
        raise pytest.UsageError(f"{item.nodeid} needs {needed} GPUs; the largest tier has {TIERS[-1]}")
    return next(tier for tier in (0, *TIERS) if tier >= needed)


def pytest_addoption(parser):
    add = parser.getgroup("GPU tiers").addoption
    add("--gpu-tiers", metavar="TIERS",
        help='run the tests that need GPUs and no others: "all" that the visible GPUs allow, or tiers such as "1 2 4", '
        "which must not be skipped then")  # fmt: skip
    add("--ranks-per-gpu", metavar="NUMBER", type=int, default=1,
        help="let so many ranks share a GPU: larger tiers run on few GPUs, slowly, without what needs GPUs of its own",
    )  # fmt: skip
    add("--gpu-report", metavar="FOLDER", type=pathlib.Path, help="write FOLDER/gpu-tests-<number>x<gpu>.json")


def pytest_configure(config):
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    wanted, folder = config.getoption("--gpu-tiers"), config.getoption("--gpu-report")
    if config.getoption("--ranks-per-gpu") < 1:
        raise pytest.UsageError("--ranks-per-gpu takes a number from 1 on")
    if wanted is None:
        if folder is not None:
            raise pytest.UsageError("--gpu-report needs --gpu-tiers")
        return
    asked = None if wanted.strip() == "all" else _parse(wanted)
    if (gpus := visible_gpus()) == 0:
        raise pytest.UsageError("GPU tests were asked for, but torch sees no GPU here: nothing can run")
    if (worker := getattr(config, "workerinput", None)) is not None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        by = int(worker["workerid"].removeprefix("gw"))  # another one first: tests of one GPU use them all
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((by + index) % gpus) for index in range(gpus))
    config.pluginmanager.register(_Run(config, asked, folder), "iris-gpu-tiers-run")


def _parse(text):
    words = text.replace(",", " ").split()
    if not words or any(word not in map(str, TIERS) for word in words):
        raise pytest.UsageError(f'--gpu-tiers takes "all" or some of {", ".join(map(str, TIERS))}, not {text!r}')
    return sorted({int(word) for word in words})


@pytest.hookimpl(tryfirst=True)  # before -k and -m: what they leave out was there all the same
def pytest_collection_modifyitems(config, items):
    """Skip tests that need more GPUs than there are; count those of each tier."""
    collected = config.stash.setdefault(_COLLECTED, collections.Counter())
    for item in items:
        tier = item.stash[_TIER] = tier_of(item)
        collected[tier] += 1
        item.user_properties.append(("gpu_tier", tier))  # sent with reports: pytest-xdist counts in another process
        if tier and tier > ranks_here(config, item):
            item.add_marker(pytest.mark.skip(reason=f"needs {_number(tier)}, torch sees {visible_gpus()}"))


@dataclass
class _Test:
    outcome: str = "passed"
    reason: str = ""
    seconds: float = 0.0


def _as_json(gpus, tests, collected):
    """Return a tier of a report; `tests` are those of this run, by name."""
    counts = collections.Counter(test.outcome for test in tests.values())
    return {
        "gpus": gpus,
        "collected": collected,
        **{outcome: counts[outcome] for outcome in _OUTCOMES},
        "seconds": round(sum(test.seconds for test in tests.values()), 1),
        "failures": [name for name, test in tests.items() if test.outcome == "failed"],
        "skip_reasons": dict(collections.Counter(t.reason for t in tests.values() if t.outcome == "skipped")),
    }


class _Run:
    """Counts what runs in each tier, judges whether that is what was asked for, and writes it down."""

    def __init__(self, config, asked, folder):
        self._config, self._asked, self._folder = config, asked, folder
        self._ranks, self._ranks_per_gpu = ranks_here(config), config.getoption("--ranks-per-gpu")
        self._tiers = {gpus: {} for gpus in asked or TIERS if asked or gpus <= self._ranks}  # tests by name
        self._crashed, self._problems, self._report = [], [], None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config, items):
        """Keep the tests of the tiers, the small ones first: the larger ones find kernels compiled already.

        Of the processes of pytest-xdist, each begins with some that take long: its first ones are a part of the list.
        Those that are `alone` come last: no process but the last one waits for the others.
        """
        kept = [item for item in items if item.stash[_TIER] in self._tiers]
        config.hook.pytest_deselected(items=[item for item in items if item.stash[_TIER] not in self._tiers])
        is_alone = {item: item.get_closest_marker("alone") is not None for item in kept}
        kept.sort(key=lambda item: (is_alone[item], item.stash[_TIER]))
        slow = [item for item in reversed(kept) if item.get_closest_marker("slow") and not is_alone[item]]
        others = [item for item in kept if item not in slow]
        count = getattr(config, "workerinput", {"workercount": 1})["workercount"]
        items[:] = []
        for each in range(count):
            items += slow[each::count]
            taken = len(kept) * (each + 1) // count - len(items)
            items += others[:taken]
            del others[:taken]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item):
        """Let tests that are marked `alone` have the machine for themselves."""
        lock = os.open(self._config.rootpath, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        yield
        fcntl.flock(lock, fcntl.LOCK_UN)  # processes that the test has forked may have it open
        os.close(lock)

    def pytest_runtest_logreport(self, report):
        tier = dict(map(tuple, report.user_properties)).get("gpu_tier")
        if tier is None:  # of pytest-xdist, whose process with this test has ended
            self._crashed.append(report.nodeid)
            for tests in self._tiers.values():  # its setup may have been reported
                tests.pop(report.nodeid, None)
            return
        test = self._tiers[tier].setdefault(report.nodeid, _Test())
        test.seconds += report.duration
        if report.failed:
            test.outcome = "failed"
        elif report.skipped and test.outcome == "passed":
            test.outcome = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected failure"
            test.reason = reason.removeprefix("Skipped: ")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        """Fail where a tier did not run; write the report."""
        if (output := getattr(self._config, "workeroutput", None)) is not None:  # xdist's own processes collect
            output["gpu_tests"] = dict(self._config.stash.get(_COLLECTED, {}))
            return
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            return  # collecting failed or somebody interrupted: that says enough, and is no result
        if self._config.option.collectonly:
            return
        ran = {gpus for gpus, tests in self._tiers.items() if any(test.outcome != "skipped" for test in tests.values())}
        self._judge(ran)
        if self._problems:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._folder is not None and ran:
            self._write()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """Learn from a process of pytest-xdist how many tests of each tier there are: all collect the same ones."""
        collected = self._config.stash.setdefault(_COLLECTED, collections.Counter())
        collected |= collections.Counter(getattr(node, "workeroutput", {}).get("gpu_tests", {}))

    def pytest_terminal_summary(self, terminalreporter):
        """Print which tiers ran, which could not, and what is wrong with that."""
        sharing = f", {self._ranks_per_gpu} ranks on each" if self._ranks_per_gpu > 1 else ""
        terminalreporter.section(f"GPU tiers ({_number(visible_gpus())}{sharing})")
        for gpus, tests in self._tiers.items():
            tier = _as_json(gpus, tests, 0)
            counts = ", ".join(f"{tier[outcome]} {outcome}" for outcome in _OUTCOMES)
            terminalreporter.line(f"tier {gpus}: {counts}, {tier['seconds']:.0f} s")
        for gpus in sorted({*TIERS} - {*self._tiers}):
            why = f"torch sees {visible_gpus()}" if gpus > self._ranks else "not asked for"
            terminalreporter.line(f"tier {gpus}: did not run ({why})")
        for problem in self._problems:
            terminalreporter.line(f"FAILED: {problem}", red=True)
        if self._report is not None:
            terminalreporter.line(f"report: {self._path}")
            for reason in lacks(self._report):
                terminalreporter.line(f"not to be kept: {reason}", red=True)

    @property
    def _arguments(self):
        """Files and folders that the command line names."""
        return self._config.args if self._config.args_source is pytest.Config.ArgsSource.ARGS else []

    def _judge(self, ran):
        """Find what is wrong with the tiers that ran, but for failures; parts of the tests may leave tiers empty."""
        option = self._config.option
        self._problems = [f"the process of {nodeid} ended" for nodeid in self._crashed]
        if ran and self._asked is None and (option.keyword or option.markexpr or option.deselect or self._arguments):
            return
        for gpus in sorted(self._tiers.keys() - ran):
            number = len(self._tiers[gpus])
            why = f"its {number} tests were skipped" if number else "no test of it was selected"
            self._problems.append(f"tier {gpus} did not run: {why}")

    def _write(self):
        from iris_core.bench.results import describe

        machine, option = describe(), self._config.option
        model = re.sub(r"[^a-z0-9]+", "-", str(machine["gpu"]).lower().removeprefix("nvidia ")).strip("-")
        of = f"{self._ranks}-ranks-on-" if self._ranks_per_gpu > 1 else ""
        self._path = self._folder / f"gpu-tests-{of}{visible_gpus()}x{model}.json"
        ignored = (*(option.ignore or []), *(option.ignore_glob or []))
        paths = [*self._arguments, *(f"not {each}" for each in ignored)]
        paths += ["those that failed last"] if getattr(option, "lf", False) else []
        arguments = [arg for arg in self._config.invocation_params.args if not str(arg).startswith("--gpu-")]
        collected = self._config.stash.get(_COLLECTED, collections.Counter())
        tiers = [_as_json(gpus, tests, collected[gpus]) for gpus, tests in self._tiers.items()]
        self._report = {
            "machine": machine,
            "source": _source(self._config.rootpath),
            "ranks_per_gpu": self._ranks_per_gpu,
            "tiers_asked_for": self._asked or "all",
            "arguments": arguments,
            "paths": paths,
            "passed": not self._problems and not any(tier["failed"] for tier in tiers),
            "problems": self._problems,
            "tiers": tiers,
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._report, indent=2) + "\n")


def lacks(report):
    """Return why a report is not that of all tests of its tiers at the commit that it names; empty if it is."""
    source, found = report["source"], list(report["problems"])
    if not source["commit"]:
        found.append("it names no commit (SOURCE_COMMIT, in a copy without history)")
    elif source["changed"]:
        found.append(f"what was tested is not commit {source['commit']}")
    if report["paths"]:
        found.append(f"not all tests were collected: {', '.join(report['paths'])}")
    for tier in report["tiers"]:
        there = tier["passed"] + tier["failed"] + tier["skipped"]
        if there != tier["collected"]:
            found.append(f"tier {tier['gpus']} has {there} results of {tier['collected']} tests")
    return found


def _source(root):
    """Commit of the tested tree, a digest of its files, and whether the commit has others; None where nothing says so.

    A copy of the tree without a history, or within another tree, takes the commit from the variable SOURCE_COMMIT.
    """
    commit = os.environ.get("SOURCE_COMMIT") or _git(root, "rev-parse", "HEAD")
    digest = digest_of_files(root)
    of_commit = digest_of_commit(root, commit) if commit else None
    return {"commit": commit, "files": digest, "changed": None if of_commit is None else of_commit != digest}


_TESTED = re.compile(r"(?:[^/]+/)?src/.*\.(?:py|json)|tests/.*\.(?:py|toml)")
"""Files that decide what tests find: packages with their tables, and the tests."""


def digest_of_files(root):
    """Return a digest of the packages and tests that lie in a folder, each file under its name and git's hash of it."""
    paths = [path for pattern in ("src", "*/src", "tests") for path in root.glob(f"{pattern}/**/*") if path.is_file()]
    data = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
    data = {name: b"blob %d\0%b" % (len(each), each) for name, each in data.items() if _TESTED.fullmatch(name)}
    return _digest({name: hashlib.sha1(each, usedforsecurity=False).hexdigest() for name, each in data.items()})


def digest_of_commit(root, commit):
    """Return the same of a commit; None where it is not known, as in a copy without history."""
    listed = _git(root, "ls-tree", "-rz", commit)
    if listed is None:
        return None
    lines = (line.partition("\t") for line in listed.split("\0") if line)
    return _digest({name: about.split()[2] for about, _, name in lines if _TESTED.fullmatch(name)})


def _digest(blobs):
    return hashlib.sha256("".join(f"{blobs[name]} {name}\n" for name in sorted(blobs)).encode()).hexdigest()


def _git(root, *command):
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
