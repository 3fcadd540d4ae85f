"""A plugin of pytest for tests that need GPUs: skipped where there are too few, run and reported by tiers.

    pytest                                    all tests; those that lack GPUs are skipped
    pytest --gpu-tiers=all                    the GPU tests alone, every tier that these GPUs allow
    pytest --gpu-tiers="1 2"                  these tiers, and it is a failure if one does not run
    pytest --ranks-per-gpu=4 --gpu-tiers=8    tier 8 on two GPUs, four ranks on each

With `--ranks-per-gpu` the ranks of a GPU take turns on it: each waits in its kernels until the driver gives the others
their slice of time.  That shows whether kernels are right with that many ranks, and nothing about speed or links.

With pytest-xdist tests run side by side (`-n 12 --dist worksteal -m "not alone"`).  The marker `alone` is for those
that others would disturb, such as measurements of free memory; they run afterwards (`-m alone`), and `--gpu-report-add`
puts their results into the report of the others.  `lacks` says of a report whether it is whole, and of its commit.

A tier is a number of GPUs: 1, 2, 4 or 8.  The marker `gpu` puts a test into the first tier.  `multigpu(n)` puts it into
the smallest one that has n GPUs; without n, the test's parameter `num_ranks` counts, or 2.  The tests of
`StackConformance` need no marker.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TIERS = (1, 2, 4, 8)

_MARKERS = (
    "gpu: needs one GPU; runs in `make gpu-test`",
    "multigpu(n, shared=True): needs n GPUs, by default as many as the parameter `num_ranks` says, or 2; runs in "
    "`make gpu-test`; shared=False: its ranks cannot share a GPU (--ranks-per-gpu)",
    "alone: other tests on the same GPUs would disturb it",
)
_TIER = pytest.StashKey[int]()
_COLLECTED = pytest.StashKey[collections.Counter[int]]()
_NUM_SLOWEST = 5


# -- which tests belong to which tier ---------------------------------------------------------------------------------
@functools.cache
def visible_gpus() -> int:
    """Return how many GPUs torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@dataclass(frozen=True)
class Room:
    """How many ranks find a place.

    Attributes:
        gpus: number of GPUs that torch sees.
        ranks_per_gpu: how many ranks may share one.
    """

    gpus: int
    ranks_per_gpu: int = 1

    def lacks(self, item: pytest.Item) -> str:
        """Return why a test finds no place here; "" if it does."""
        tier = item.stash[_TIER]
        if tier <= (self.gpus if needs_own_gpus(item) else self.ranks):
            return ""
        return f"needs {_number(tier)}, torch sees {self.gpus}"

    @property
    def ranks(self) -> int:
        """Number of ranks that find a place."""
        return self.gpus * self.ranks_per_gpu

    def __str__(self) -> str:
        return _number(self.gpus) + (f", {self.ranks_per_gpu} ranks on each" if self.ranks_per_gpu > 1 else "")


def _number(gpus: int) -> str:
    return f"{gpus} GPU{'s' * (gpus != 1)}"


def needs_own_gpus(item: pytest.Item) -> bool:
    """Return whether the ranks of a test cannot share a GPU."""
    multi = item.get_closest_marker("multigpu")
    return multi is not None and not multi.kwargs.get("shared", True)


def tier_of(item: pytest.Item) -> int:
    """Return the number of GPUs of a test's tier; 0 if it needs none.

    Raises:
        pytest.UsageError: it needs more GPUs than the largest tier has.
    """
    params: Mapping[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    suite = getattr(item, "cls", None)
    of_suite: int = getattr(suite, "gpus_of_tier", {}).get(params.get("world"), 0)  # StackConformance
    multi = item.get_closest_marker("multigpu")
    if multi is not None:
        needed: int = multi.args[0] if multi.args else params.get("num_ranks", 2)
    else:
        needed = 1 if item.get_closest_marker("gpu") is not None else of_suite
    if needed > TIERS[-1]:
        raise pytest.UsageError(f"{item.nodeid} needs {needed} GPUs; the largest tier has {TIERS[-1]}")
    return next(tier for tier in (0, *TIERS) if tier >= needed)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("GPU tiers")
    group.addoption(
        "--gpu-tiers",
        metavar="TIERS",
        help='run the tests that need GPUs and no others: "all" that the visible GPUs allow, or tiers such as "1 2 4", '
        "which must not be skipped then",
    )
    group.addoption(
        "--ranks-per-gpu", metavar="NUMBER", type=int, default=1,
        help="let so many ranks share a GPU: larger tiers run on few GPUs, slowly, without what needs GPUs of its own",
    )  # fmt: skip
    group.addoption(
        "--gpu-report", metavar="FOLDER", type=pathlib.Path, help="write FOLDER/gpu-tests-<number>x<gpu>.json"
    )
    group.addoption(
        "--gpu-report-add",
        action="store_true",
        help="add to the report that is there, of another part of the tests of the same source on the same GPUs",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and, where tiers are asked for, what counts and reports them."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    wanted, folder = config.getoption("--gpu-tiers"), config.getoption("--gpu-report")
    if config.getoption("--ranks-per-gpu") < 1:
        raise pytest.UsageError("--ranks-per-gpu takes a number from 1 on")
    if config.getoption("--gpu-report-add") and folder is None:
        raise pytest.UsageError("--gpu-report-add needs --gpu-report")
    if wanted is None:
        if folder is not None:
            raise pytest.UsageError("--gpu-report needs --gpu-tiers")
        return
    asked = None if wanted.strip() == "all" else _parse(wanted)
    if visible_gpus() == 0:
        raise pytest.UsageError("GPU tests were asked for, but torch sees no GPU here: nothing can run")
    if (worker := getattr(config, "workerinput", None)) is not None and "CUDA_VISIBLE_DEVICES" not in os.environ:
        _turn(int(worker["workerid"].removeprefix("gw")))
    config.pluginmanager.register(_Run(config, _room(config), asked, folder), "iris-gpu-tiers-run")


def _turn(by: int) -> None:
    """Let each process of pytest-xdist count the GPUs from another one, so that tests of one GPU use them all."""
    gpus = visible_gpus()
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(str((by + index) % gpus) for index in range(gpus))


def _room(config: pytest.Config) -> Room:
    return Room(visible_gpus(), config.getoption("--ranks-per-gpu"))


@pytest.hookimpl(tryfirst=True)  # before -k and -m: what they leave out was there all the same
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are; count those of each tier."""
    room, collected = None, config.stash.setdefault(_COLLECTED, collections.Counter())
    for item in items:
        item.stash[_TIER] = tier_of(item)
        collected[item.stash[_TIER]] += 1
        if not item.stash[_TIER]:
            continue
        room = room or _room(config)
        if lacking := room.lacks(item):
            item.add_marker(pytest.mark.skip(reason=lacking))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Tell the tier with every report: with pytest-xdist, they are counted in another process."""
    outcome: Any = yield
    outcome.get_result().gpu_tier = item.stash[_TIER]


def _parse(text: str) -> tuple[int, ...]:
    words = [word for word in re.split(r"[\s,]+", text) if word]
    if not words or any(word not in map(str, TIERS) for word in words):
        raise pytest.UsageError(f'--gpu-tiers takes "all" or some of {", ".join(map(str, TIERS))}, not {text!r}')
    return tuple(sorted({int(word) for word in words}))


# -- running tiers ----------------------------------------------------------------------------------------------------
@dataclass
class _Test:
    """What became of one test."""

    outcome: str = "passed"
    reason: str = ""
    seconds: float = 0.0


@dataclass
class _Tier:
    """The tests of one tier."""

    gpus: int
    tests: dict[str, _Test] = field(default_factory=dict)

    def count(self, outcome: str) -> int:
        return sum(test.outcome == outcome for test in self.tests.values())

    @property
    def ran(self) -> int:
        """Number of tests that were not skipped."""
        return len(self.tests) - self.count("skipped")

    @property
    def seconds(self) -> float:
        return sum(test.seconds for test in self.tests.values())

    def as_json(self, collected: int) -> dict[str, Any]:
        skips = collections.Counter(test.reason for test in self.tests.values() if test.outcome == "skipped")
        slowest = sorted(self.tests.items(), key=lambda each: -each[1].seconds)[:_NUM_SLOWEST]
        return {
            "gpus": self.gpus,
            "collected": collected,
            **{outcome: self.count(outcome) for outcome in ("passed", "failed", "skipped")},
            "seconds": round(self.seconds, 1),
            "failures": [name for name, test in self.tests.items() if test.outcome == "failed"],
            "skip_reasons": dict(skips),
            "slowest": {name: round(test.seconds, 1) for name, test in slowest},
        }


def _added(part: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """Return a tier of a report made of those of two parts of the tests."""
    slowest = sorted({**whole["slowest"], **part["slowest"]}.items(), key=lambda each: -each[1])[:_NUM_SLOWEST]
    skips = collections.Counter(whole["skip_reasons"]) + collections.Counter(part["skip_reasons"])
    return {
        "gpus": part["gpus"], "collected": max(whole["collected"], part["collected"]),
        **{key: whole[key] + part[key] for key in ("passed", "failed", "skipped")},
        "seconds": round(whole["seconds"] + part["seconds"], 1), "failures": whole["failures"] + part["failures"],
        "skip_reasons": dict(skips), "slowest": dict(slowest),
    }  # fmt: skip


class _Run:
    """Counts what runs in each tier, judges whether that is what was asked for, and writes it down."""

    def __init__(
        self, config: pytest.Config, room: Room, asked: tuple[int, ...] | None, folder: pathlib.Path | None
    ) -> None:
        self._config = config
        self._room = room
        self._asked = asked
        self._folder = folder
        self._tiers = {gpus: _Tier(gpus) for gpus in (asked or [n for n in TIERS if n <= room.ranks])}
        self._crashed: list[str] = []
        self._problems: list[str] = []
        self._report: pathlib.Path | None = None
        self._machine: dict[str, Any] = {}
        self._path: pathlib.Path | None = None
        self._before: dict[str, Any] | None = None  # the report that this run adds to
        if folder is not None and not hasattr(config, "workerinput"):  # xdist's own processes report to this one
            self._look(folder)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the tests of the tiers, the small ones first: the larger ones find kernels compiled already.

        Of the processes of pytest-xdist, each begins with some that take long: its first ones are a part of the list.
        """
        kept = [item for item in items if item.stash[_TIER] in self._tiers]
        config.hook.pytest_deselected(items=[item for item in items if item.stash[_TIER] not in self._tiers])
        kept.sort(key=lambda item: item.stash[_TIER])
        slow = [item for item in reversed(kept) if item.get_closest_marker("slow")]
        others = [item for item in kept if not item.get_closest_marker("slow")]
        count = getattr(config, "workerinput", {"workercount": 1})["workercount"]
        ends = [len(kept) * (each + 1) // count for each in range(count)]
        items[:] = []
        for each, end in enumerate(ends):
            items += slow[each::count]
            taken = end - len(items)
            items += others[:taken]
            del others[:taken]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note the outcome of a phase of a test."""
        tier: int | None = getattr(report, "gpu_tier", None)
        if tier is None:  # of pytest-xdist, whose process with this test has ended
            self._crashed.append(report.nodeid)
            for each in self._tiers.values():  # its setup may have been reported
                each.tests.pop(report.nodeid, None)
            return
        test = self._tiers[tier].tests.setdefault(report.nodeid, _Test())
        test.seconds += report.duration
        if report.failed:
            test.outcome = "failed"
        elif report.skipped and test.outcome == "passed":
            test.outcome = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected failure"
            test.reason = reason.removeprefix("Skipped: ")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Fail where a tier did not run; write the report."""
        if (output := getattr(self._config, "workeroutput", None)) is not None:  # xdist's own processes collect
            output["gpu_tests"] = dict(self._config.stash.get(_COLLECTED, {}))
            return
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            return  # collecting failed or somebody interrupted: that says enough, and is no result
        if self._config.option.collectonly:
            return
        self._problems = self._judge()
        if self._problems and exitstatus != pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self._path is not None and any(tier.ran for tier in self._tiers.values()):
            self._write(self._path)
            self._report = self._path

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Learn from a process of pytest-xdist how many tests of each tier there are: all collect the same ones."""
        collected = self._config.stash.setdefault(_COLLECTED, collections.Counter())
        collected |= collections.Counter(getattr(node, "workeroutput", {}).get("gpu_tests", {}))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print which tiers ran, which could not, and what is wrong with that."""
        terminalreporter.section(f"GPU tiers ({self._room})")
        for tier in self._tiers.values():
            counts = ", ".join(f"{tier.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
            terminalreporter.line(f"tier {tier.gpus}: {counts}, {tier.seconds:.0f} s")
        for gpus in TIERS:
            if gpus not in self._tiers:
                why = f"torch sees {self._room.gpus}" if gpus > self._room.ranks else "not asked for"
                terminalreporter.line(f"tier {gpus}: did not run ({why})")
        for problem in self._problems:
            terminalreporter.line(f"FAILED: {problem}", red=True)
        if self._report is not None:
            terminalreporter.line(f"report: {self._report}")
            for reason in lacks(json.loads(self._report.read_text())):
                terminalreporter.line(f"not to be kept: {reason}", red=True)

    def _look(self, folder: pathlib.Path) -> None:
        """Find out where the report goes, and what is there already."""
        from iris_core.bench.results import describe

        self._machine = describe()
        model = re.sub(r"[^a-z0-9]+", "-", str(self._machine["gpu"]).lower().removeprefix("nvidia ")).strip("-")
        of = f"{self._room.ranks}-ranks-on-" if self._room.ranks_per_gpu > 1 else ""
        self._path = folder / f"gpu-tests-{of}{self._room.gpus}x{model}.json"
        if not self._config.getoption("--gpu-report-add"):
            return
        if not self._path.exists():
            raise pytest.UsageError(f"--gpu-report-add: there is no {self._path}")
        before: dict[str, Any] = json.loads(self._path.read_text())
        if before["source"] != _source(self._config.rootpath):
            raise pytest.UsageError(f"--gpu-report-add: {self._path} is of another source, {before['source']}")
        self._before = before

    def _judge(self) -> list[str]:
        crashed = [f"the process of {nodeid} ended" for nodeid in self._crashed]
        if self._asked is None and self._narrowed and any(tier.ran for tier in self._tiers.values()):
            return crashed
        ran_before = {
            tier["gpus"] for tier in (self._before or {"tiers": []})["tiers"] if tier["passed"] + tier["failed"]
        }
        return crashed + [
            f"tier {tier.gpus} did not run: "
            + (f"its {len(tier.tests)} tests were skipped" if tier.tests else "no test of it was selected")
            for tier in self._tiers.values()
            if not tier.ran and tier.gpus not in ran_before
        ]

    @property
    def _narrowed(self) -> bool:
        """Whether the command line leaves out tests, so that a tier may well be empty."""
        option = self._config.option
        chosen = self._config.args_source is pytest.Config.ArgsSource.ARGS
        return bool(option.keyword or option.markexpr or option.deselect or chosen)

    @property
    def _paths(self) -> list[str]:
        """What the command line collects or does not collect, if not all tests."""
        option, config = self._config.option, self._config
        return [
            *(config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []),
            *(f"not {each}" for each in (*(option.ignore or []), *(option.ignore_glob or []))),
            *(["those that failed last"] if getattr(option, "lf", False) else []),
        ]

    def _write(self, path: pathlib.Path) -> None:
        before = self._before
        collected = self._config.stash.get(_COLLECTED, collections.Counter())
        tiers = [tier.as_json(collected[tier.gpus]) for tier in self._tiers.values()]
        arguments = [arg for arg in self._config.invocation_params.args if not str(arg).startswith("--gpu-")]
        if before is not None:
            old = {tier["gpus"]: tier for tier in before["tiers"]}
            tiers = [_added(tier, old.pop(tier["gpus"])) if tier["gpus"] in old else tier for tier in tiers]
            tiers = sorted([*tiers, *old.values()], key=lambda tier: tier["gpus"])
        result = {
            "machine": self._machine,
            "source": _source(self._config.rootpath),
            "ranks_per_gpu": self._room.ranks_per_gpu,
            "tiers_asked_for": "all" if self._asked is None else list(self._asked),
            "arguments": [*(before["arguments"] if before else []), arguments],
            "paths": [*(before["paths"] if before else []), *self._paths],
            "passed": not self._problems
            and not any(tier["failed"] for tier in tiers)
            and (before is None or not before["problems"]),
            "problems": [*(before["problems"] if before else []), *self._problems],
            "tiers": tiers,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")


def lacks(report: Mapping[str, Any]) -> list[str]:
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


def _source(root: pathlib.Path) -> dict[str, Any]:
    """Commit of the tested tree, a digest of its files, and whether the commit has others; None where nothing says so.

    A copy of the tree without a history, or within another tree, takes the commit from the variable SOURCE_COMMIT.
    """
    commit = os.environ.get("SOURCE_COMMIT") or _git(root, "rev-parse", "HEAD")
    digest = digest_of_files(root)
    of_commit = digest_of_commit(root, commit) if commit else None
    return {"commit": commit, "files": digest, "changed": None if of_commit is None else of_commit != digest}


_TESTED = re.compile(r"(?:[^/]+/)?src/.*\.(?:py|json)|tests/.*\.py")
"""Files that decide what tests find: packages with their tables, and the tests."""


def digest_of_files(root: pathlib.Path) -> str:
    """Return a digest of the packages and tests that lie in a folder."""
    paths = [path for pattern in ("src", "*/src", "tests") for path in root.glob(f"{pattern}/**/*") if path.is_file()]
    data = {path.relative_to(root).as_posix(): path for path in paths}
    return _digest({name: _blob(path.read_bytes()) for name, path in data.items() if _TESTED.fullmatch(name)})


def digest_of_commit(root: pathlib.Path, commit: str) -> str | None:
    """Return the same of a commit; None where it is not known, as in a copy without history."""
    listed = _git(root, "ls-tree", "-rz", commit)
    if listed is None:
        return None
    lines = (line.partition("\t") for line in listed.split("\0") if line)
    return _digest({name: about.split()[2] for about, _, name in lines if _TESTED.fullmatch(name)})


def _blob(data: bytes) -> str:
    """What git calls a file with these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _digest(blobs: Mapping[str, str]) -> str:
    return hashlib.sha256("".join(f"{blobs[name]} {name}\n" for name in sorted(blobs)).encode()).hexdigest()


def _git(root: pathlib.Path, *command: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
