"""`iris doctor`: examine the machine and the installation, and say what is wrong and what to do.

What may crash or hang, that is whatever touches a GPU or calls a plugin's own code, `_examine` does elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import resource
import socket
import sys
import textwrap
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_core.diagnosis import Finding, PairCheck, Verdict
from iris_core.errors import IrisError, error_text

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

    from iris_core.registry import PluginRecord, Registry

TIMEOUT_S = 120.0
"""Seconds that the survey and each self-test may take."""

DEVICE_TIMEOUT_S = 5.0
"""Bound of a self-test's waits inside kernels.  Signals take microseconds; on an overloaded CPU a rank may be late."""

DAMAGED = "(METADATA is damaged: reinstall it)"

OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")

_FEW_FILES = 1024  # the allocator `vmem` exchanges up to 256 descriptors at a time
_CPU_RANKS = 4
_MOST_LINES = 12
_WIDTH = 120
_OF_INTEREST = re.compile(r"iris[-_.]|(pytorch[-_])?triton|torch|cuda[-_]|hip[-_]python|pluggy|pydantic")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="examine this machine and the installation, and test remote access between all ranks",
        description="Examine this machine and the installation, and test remote memory access between every two GPUs "
        "(CPU ranks where there are fewer than two). Exit status 1 if anything is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-self-test", action="store_true", help="leave the self-test out")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help="what the survey and each self-test may take before it is ended (default %(default)g)",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise ValueError("a bound in seconds, more than 0 and at most a day")
    return value


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if anything is broken."""
    from iris_core.cli._output import print_json, print_table

    report = examine(self_test=not args.no_self_test, timeout_s=args.timeout)
    broken = [finding["subject"] for finding in report["findings"] if finding["verdict"] is Verdict.BROKEN]
    if args.json:
        print_json(report)
    else:
        print_table(("SUBJECT", "VERDICT", "FOUND"), rows(report["findings"]))
        print(f"\n{len(broken)} broken: {', '.join(broken)}" if broken else "\nnothing is broken")
    return int(bool(broken))


def rows(findings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """Return the table of findings: subject, verdict and text, the text wrapped so that lines have 120 columns."""
    room = _WIDTH - max(len(finding["subject"]) for finding in findings) - len("VERDICT") - 4  # two spaces each
    table = []
    for finding in findings:
        lines = [piece for line in finding["text"].splitlines() for piece in textwrap.wrap(line, room)] or [""]
        table += [(finding["subject"], str(finding["verdict"]), lines[0]), *(("", "", line) for line in lines[1:])]
    return table


def examine(*, self_test: bool = True, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Examine everything and return the report; docs/doctor.md says what the keys mean.

    Args:
        self_test: whether to test remote access between ranks.
        timeout_s: seconds that the survey and each self-test may take.
    """
    from iris_core.cli._examine import examine_apart
    from iris_core.registry import default_registry

    packages = examine_packages()
    findings = [*examine_host(), packages, *examine_settings(), *examine_plugins()]
    facts, found = read_survey(*examine_apart({}, timeout_s))
    findings += found
    tests: list[SelfTest] | None = None
    if self_test:
        hip = facts["versions"].get("hip_of_torch") is not None
        planned = plan(default_registry(), len(facts["gpus"]), hip) if facts["versions"] else []
        tests = [test.run(timeout_s) for test in planned]
        findings += [test.finding() for test in tests]
    if not tests:
        why = "left out as asked" if tests is None else "left out: no backend and allocator can be used together here"
        findings.append(Finding("self-test", Verdict.NOTE, why))
    return {
        "ok": all(finding.verdict is not Verdict.BROKEN for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "versions": {"distributions": packages.data, **facts["versions"]},
        "gpus": facts["gpus"],
        "pairs": facts["pairs"],
        "self_tests": None if tests is None else [test.to_json() for test in tests],
    }


def read_survey(records: Iterable[dict[str, Any]], problem: str) -> tuple[dict[str, Any], list[Finding]]:
    """Return the facts and the findings of a survey, and in the last finding how it failed."""
    facts: dict[str, Any] = {"versions": {}, "gpus": [], "pairs": []}
    findings, step = [], "survey"
    for record in records:
        step = record.get("begin", step)
        facts.update(record.get("facts", {}))
        if "finding" in record:
            findings.append(Finding(**record["finding"] | {"verdict": Verdict(record["finding"]["verdict"])}))
    if problem:
        findings.append(Finding(step, Verdict.BROKEN, f"examining {step} {problem}"))
    return facts, findings


# -- the machine and the installation ---------------------------------------------------------------------------------
def examine_host() -> list[Finding]:
    """Say what Iris runs on, and try what processes need in order to share memory."""
    python = Finding("python", Verdict.OK, f"{platform.python_version()} at {sys.executable}")
    if platform.system() != "Linux":
        return [python, Finding("platform", Verdict.BROKEN, f"{platform.platform()}: Iris needs Linux")]
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return [
        python,
        Finding("platform", Verdict.OK, platform.platform()),
        Finding("CPUs", Verdict.OK, f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        Finding("memory", Verdict.OK, f"{nbytes / (1 << 30):.1f} GiB", {"nbytes": nbytes}),
        _sharing(),
        *_limits(),
    ]


def _sharing() -> Finding:
    """Send a memory file over a socket, as ranks do."""
    forbidden = "; a seccomp profile or a security policy may forbid it"
    try:
        memory = os.memfd_create("iris-doctor")
    except OSError as error:
        return Finding("memfd", Verdict.BROKEN, f"CPU ranks cannot share memory: {error.strerror}{forbidden}")
    one, other = socket.socketpair(socket.AF_UNIX)
    with os.fdopen(memory), one, other:
        try:
            socket.send_fds(one, [b"x"], [memory])
            received = socket.recv_fds(other, 1, 1)[1]
            if not received:  # some policies take it out of the message
                raise OSError(0, "it did not arrive")
            os.close(received[0])
        except OSError as error:
            text = f"cannot be sent between processes, as 'host' and 'vmem' do: {error.strerror}{forbidden}"
            return Finding("descriptors", Verdict.BROKEN, text)
    return Finding("memfd", Verdict.OK, "memory files can be made and sent between processes")


def _limits() -> list[Finding]:
    """Limits that a heap can run into."""
    findings = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FEW_FILES:
        more = min(65536, hard) if hard >= 0 else 65536
        text = f"only {soft}: allocator 'vmem' may run out of descriptors; ulimit -n {more}"
        findings.append(Finding("open files", Verdict.NOTE, text))
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        text = f"limited to {addresses / (1 << 30):.1f} GiB: a rank maps the heaps of all ranks; ulimit -v unlimited"
        findings.append(Finding("addresses", Verdict.NOTE, text))
    if OVERCOMMIT.exists() and OVERCOMMIT.read_text().strip() == "2":
        text = "vm.overcommit_memory=2: a sparse heap may be refused; choose a smaller heap_size, or set it to 0"
        findings.append(Finding("overcommit", Verdict.NOTE, text))
    return findings


def examine_packages() -> Finding:
    """Say which distributions there are; broken, if one of them is damaged."""
    from iris_core.registry.discovery import folder_of, identity, installed

    found = {}
    for distribution in installed():
        try:
            name, version = identity(distribution)
        except Exception as error:  # noqa: BLE001 - a file may be damaged in any way
            name, version = folder_of(distribution).name, f"{DAMAGED}: {error_text(error)}"
        if _OF_INTEREST.match(name):
            found[name] = version
    found = dict(sorted(found.items()))
    verdict = Verdict.BROKEN if any(DAMAGED in version for version in found.values()) else Verdict.OK
    return Finding("packages", verdict, ", ".join(map(" ".join, found.items())), found)


def examine_settings() -> list[Finding]:
    """Say which settings are wrong or misspelt."""
    from iris_core.cli.config import settings_classes
    from iris_core.registry import default_registry
    from iris_core.settings import IrisSettingsWarning, load_plugin_settings, load_settings, warn_unknown_variables

    findings = []
    registry = default_registry()
    try:
        registry.block(load_settings().block)
    except IrisError as error:
        findings.append(Finding("settings", Verdict.BROKEN, str(error)))
    for name, cls in settings_classes(registry).items():
        try:
            load_plugin_settings(name, cls)
        except IrisError as error:
            findings.append(Finding("settings", Verdict.BROKEN, str(error)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IrisSettingsWarning)
        findings += [Finding("settings", Verdict.NOTE, text) for text in warn_unknown_variables(registry.names())]
    return findings or [Finding("settings", Verdict.OK, "all valid; `iris config` lists them")]


def examine_plugins() -> list[Finding]:
    """Say what became of each installed plugin."""
    from iris_core.registry import default_registry
    from iris_core.types import PluginState

    verdicts = {PluginState.LOADED: Verdict.OK, PluginState.CREATED: Verdict.OK}
    verdicts |= {PluginState.BROKEN: Verdict.BROKEN, PluginState.INCOMPATIBLE: Verdict.BROKEN}
    findings = []
    for record in default_registry().load_all():
        reason = f": {record.reason}" if record.reason else ""
        text = f"{record.distribution} {record.version}: {record.state}{reason}"
        findings.append(Finding(f"{record.kind} {record.name}", verdicts.get(record.state, Verdict.NOTE), text))
    return findings or [Finding("plugins", Verdict.BROKEN, "none: pip install ./iris_allocators ./iris_triton")]


# -- the self-tests ---------------------------------------------------------------------------------------------------
@dataclass
class SelfTest:
    """A backend's self-test on an allocator, with a rank on each GPU, or on the CPU; and what came of it."""

    backend: str
    allocator: str
    device: str
    ranks: int
    state: str = "passed"  # or "failed"; "skipped" where the backend brings none
    problems: list[str] = field(default_factory=list)  # of the run as a whole
    checks: list[PairCheck] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return it for `iris doctor --json`."""
        return asdict(self) | {"checks": [asdict(check) | {"ok": check.ok} for check in self.checks]}

    def finding(self) -> Finding:
        """Return the entry of the report."""
        subject = f"self-test {self.backend} on {self.allocator}"
        where = f"{self.ranks} rank{'s' if self.ranks > 1 else ''} on {self.device}"
        if self.state == "skipped":
            return Finding(subject, Verdict.NOTE, f"backend {self.backend!r} brings no self-test")
        if self.state == "passed":
            ops = ", ".join(dict.fromkeys(check.op for check in self.checks))
            return Finding(subject, Verdict.OK, f"{where}: {ops} are right between all pairs")
        lines = [f"{where}:", *self.problems, *(str(check) for check in self.checks if not check.ok)]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more; --json lists all"]
        return Finding(subject, Verdict.BROKEN, "\n".join(lines))

    def run(self, timeout_s: float) -> SelfTest:
        """Run it on processes of its own, for at most `timeout_s` seconds, and return it."""
        from iris_core.cli._examine import examine_apart

        # Whatever the caller's environment says of plugins and sizes is none of the test's business.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("IRIS_")}
        environment["IRIS_DEVICE_TIMEOUT"] = str(DEVICE_TIMEOUT_S)
        environment["IRIS_BARRIER_TIMEOUT"] = str(max(1.0, timeout_s / 2))  # the ranks themselves say who is late
        job = {"backend": self.backend, "allocator": self.allocator, "device": self.device, "ranks": self.ranks}
        self.judge(*examine_apart(job, timeout_s, environment))
        return self

    def judge(self, records: Sequence[dict[str, Any]], problem: str) -> None:
        """Take over what the ranks have recorded.

        Args:
            records: of all ranks, and of the process that started them.
            problem: how that process failed; empty if it did not.
        """
        self.checks = [PairCheck(**record["check"]) for record in records if "check" in record]
        if problem:
            self._explain(records, problem)
        elif any("unsupported" in record for record in records):
            self.state = "skipped"
            return
        else:
            seen = {(check.op, check.rank, check.peer) for check in self.checks}
            ops = dict.fromkeys(check.op for check in self.checks)
            expected = [(op, *pair) for op in ops for pair in _pairs(self.ranks)]
            self.checks += [PairCheck(*each, "was not reported") for each in expected if each not in seen]
            if not ops:
                self.problems.append(f"the self-test of backend {self.backend!r} reported nothing")
        if self.problems or not all(check.ok for check in self.checks):
            self.state = "failed"

    def _explain(self, records: Sequence[dict[str, Any]], problem: str) -> None:
        """Say why the run did not come to its end, and hold it against the pair that was at work."""
        at = {record["rank"]: (record["begin"], record["peer"]) for record in records if "begin" in record}
        failed = next((record for record in records if "failed" in record), None)
        if failed:  # the process that started the ranks saw which one failed first
            culprits = [failed["failed"]]
            own = (each["error"] for each in records if each.get("rank") == failed["failed"] and "error" in each)
            phrase, in_short = next(own, failed["error"]), "failed"
        else:
            self.problems.append(f"the self-test {problem}")
            at_work = [rank for rank, (op, _) in sorted(at.items()) if op]
            culprits = [rank for rank in at_work if at[rank][0] != "barrier"] or at_work
            phrase = in_short = "did not come back"
        for rank in culprits:
            op, peer = at.get(rank, ("", None))
            where = f"rank {rank}" + (f" in {op}" if op else "") + ("" if peer is None else f" with rank {peer}")
            self.problems.append(phrase if rank is None else f"{where}: {phrase}")
            if peer is not None:
                self.checks.append(PairCheck(op, rank, peer, in_short))


def _pairs(ranks: int) -> list[tuple[int, int]]:
    """All ordered pairs of different ranks; in a world of one the rank is its own peer."""
    return [(one, other) for one in range(ranks) for other in range(ranks) if one != other or ranks == 1]


def plan(registry: Registry, gpus: int, hip: bool) -> list[SelfTest]:
    """Return the self-tests for this machine: every usable allocator is in one, and every usable backend.

    With two GPUs or more (AMD's if `hip`) they run there, a rank on each; with fewer on CPU ranks, and on the one GPU.
    """
    from iris_core.registry.select import select
    from iris_core.settings import IrisSettings
    from iris_core.types import DeviceTarget, DeviceType, PluginKind, PluginState

    gpu, cpu = DeviceTarget(DeviceType.HIP if hip else DeviceType.CUDA), DeviceTarget(DeviceType.CPU)
    cpu_ranks = _CPU_RANKS if len(os.sched_getaffinity(0)) >= _CPU_RANKS else 2
    blocked = tuple(each.qualified_name for each in registry.records() if each.state is PluginState.BLOCKED)
    settings = IrisSettings.model_construct(block=blocked)  # no others of the caller's
    tests = {}
    for target, ranks in ((gpu, gpus), (cpu, cpu_ranks if gpus < 2 else 0)):
        device = target.torch_device.partition(":")[0]
        # The way to the peers is the allocator's, the language the backend's: not every pair of them has to be tried.
        for record in registry.records(PluginKind.ALLOCATOR) + registry.records(PluginKind.BACKEND) if ranks else ():
            wanted = {record.kind.value: record.qualified_name}
            with contextlib.suppress(IrisError):  # the list of plugins says what is wrong with it
                found = select(registry, settings, targets=[target], **wanted)
                names = _name(registry, found.backend), _name(registry, found.allocator)
                tests[device, *names] = SelfTest(*names, device, ranks)
    return list(tests.values())


def _name(registry: Registry, record: PluginRecord) -> str:
    """The name by which a plugin can be chosen."""
    ambiguous = sum(each.name == record.name for each in registry.records(record.kind)) > 1
    return record.qualified_name if ambiguous else record.name
