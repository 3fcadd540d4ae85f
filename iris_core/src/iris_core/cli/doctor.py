"""`iris doctor`: examine the machine and the installation, and say what is wrong and what to do.

Whatever may crash or hang, because it touches a GPU or calls a plugin's own code, runs in processes of its own.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import glob
import itertools
import os
import platform
import re
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from iris_core.cli._arguments import block_in_ranks, registry_as_set, seconds
from iris_core.cli._output import counted, print_json, print_table
from iris_core.cli.config import survey
from iris_core.device.targets import device_targets, num_gpus
from iris_core.diagnosis import Finding, PairCheck, Verdict
from iris_core.errors import IrisError, PeerLostError, error_text
from iris_core.registry import Registry, default_registry
from iris_core.registry.discovery import folder_of, identity, installed
from iris_core.registry.select import select
from iris_core.settings import IrisSettings, load_settings, unknown_variables
from iris_core.types import DeviceTarget, DeviceType, PluginKind, PluginState
from iris_core.world.launch import RankError
from iris_core.world.launch import run as start_ranks

TIMEOUT_S = 120.0
"""Seconds that the survey and each self-test may take."""

DEVICE_TIMEOUT_S = 5.0
"""Bound of a self-test's waits inside kernels.  Signals take microseconds; on an overloaded CPU a rank may be late."""

DAMAGED = "(METADATA is damaged: reinstall it)"

_FEW_FILES = 1024  # the allocator `vmem` exchanges up to 256 descriptors at a time
_CPU_RANKS = 4
_MOST_LINES = 12
_OF_INTEREST = re.compile(r"iris[-_.]|(pytorch[-_])?triton|torch|cuda[-_]|hip[-_]python|pluggy|pydantic")
_GIB = 1 << 30


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="examine this machine and the installation, and test remote access between all ranks",
        description="Examine this machine and the installation, and test remote memory access between every two GPUs "
        "(CPU ranks where there are fewer than two). Exit status 1 if anything is broken.",
    )
    add, bound = parser.add_argument, "bound of the survey and of each self-test (default %(default)g)"
    add("--json", action="store_true", help="print JSON")
    add("--no-self-test", action="store_true", help="leave the self-test out")
    add("--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS", help=bound)


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if anything is broken."""
    report = examine(self_test=not args.no_self_test, timeout_s=args.timeout)
    broken = [finding["subject"] for finding in report["findings"] if finding["verdict"] is Verdict.BROKEN]
    if args.json:
        print_json(report)
    else:
        rows = []
        for finding in report["findings"]:
            first, *more = finding["text"].splitlines() or [""]
            rows += [(finding["subject"], str(finding["verdict"]), first), *(("", "", line) for line in more)]
        print_table(("SUBJECT", "VERDICT", "FOUND"), rows, most=120)
        print(f"\n{len(broken)} broken: {', '.join(broken)}" if broken else "\nnothing is broken")
    return int(bool(broken))


def examine(*, self_test: bool = True, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
    """Examine everything, with or without the self-tests, and return the report; docs/doctor.md lists the keys."""
    packages = examine_packages()
    findings = [*examine_host(), packages, *examine_settings(), *examine_plugins()]
    facts: dict[str, Any] = {"versions": {}, "gpus": [], "pairs": []}
    for subject, job in {"GPUs": survey_gpus, "plugins": survey_plugins}.items():
        answers, problem = apart(job, 1, timeout_s, facts)
        broken = [Finding(subject, Verdict.BROKEN, f"examining them: {problem}")]
        facts, found = answers[0] if answers else (facts, broken)
        findings += found
    hip = facts["versions"].get("hip_of_torch") is not None
    tests = plan(default_registry(), len(facts["gpus"]), hip) if self_test and facts["versions"] else []
    for test in tests:
        test.run(timeout_s)
        findings.append(test.finding())
    if not tests:
        why = ": no backend and allocator can be used together here" if self_test else " as asked"
        findings.append(Finding("self-test", Verdict.NOTE, f"left out{why}"))
    return {
        "ok": all(finding.verdict is not Verdict.BROKEN for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "versions": {"distributions": packages.data, **facts["versions"]},
        "gpus": facts["gpus"],
        "pairs": facts["pairs"],
        "self_tests": [test.to_json() for test in tests] if self_test else None,
    }


def apart(job: Callable[..., Any], ranks: int, timeout_s: float, *args: Any) -> tuple[list[Any], str]:
    """Call a job on new processes; return what they return, or nothing and how they failed."""
    start = time.monotonic()
    try:
        return start_ranks(_bounded, ranks, timeout_s, job, args), ""
    except RankError as error:  # without the lines of the traceback
        return [], f"rank {error.rank}: {re.split(r'(?m)^  .*$', str(error))[-1].strip()}"
    except PeerLostError as error:
        return [], f"did not end within {timeout_s:g} s" if time.monotonic() - start >= timeout_s else str(error)


def _bounded(timeout_s: float, job: Callable[..., Any], args: Sequence[Any]) -> Any:
    """Call a job in this process; print where it is and end, if it takes too long."""
    os.dup2(2, 1)  # what libraries print is no part of the report
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    try:
        return job(*args)
    finally:
        faulthandler.cancel_dump_traceback_later()


# -- the machine and the installation ---------------------------------------------------------------------------------
def examine_host() -> list[Finding]:
    """Say what Iris runs on, and try what processes need in order to share memory."""
    python = Finding("python", Verdict.OK, f"{platform.python_version()} at {sys.executable}")
    if platform.system() != "Linux":
        return [python, Finding("platform", Verdict.BROKEN, f"{platform.platform()}: Iris needs Linux")]
    nbytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    findings = [
        python,
        Finding("platform", Verdict.OK, platform.platform()),
        Finding("CPUs", Verdict.OK, f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        Finding("memory", Verdict.OK, f"{nbytes / _GIB:.1f} GiB", {"nbytes": nbytes}),
        _sharing(),
    ]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FEW_FILES:
        more = min(65536, hard) if hard >= 0 else 65536
        text = f"only {soft}: allocator 'vmem' may run out of descriptors; ulimit -n {more}"
        findings.append(Finding("open files", Verdict.NOTE, text))
    return findings


def _sharing() -> Finding:
    """Send a memory file over a socket, as ranks do."""
    subject, problem = "memfd", "CPU ranks cannot share memory"
    one, other = socket.socketpair(socket.AF_UNIX)
    with one, other:
        try:
            with os.fdopen(os.memfd_create("iris-doctor")) as memory:
                subject, problem = "descriptors", "cannot be sent between processes, as 'host' and 'vmem' do"
                socket.send_fds(one, [b"x"], [memory.fileno()])
            received = socket.recv_fds(other, 1, 1)[1]
            if not received:  # some policies take it out of the message
                raise OSError(0, "it did not arrive")
            os.close(received[0])
        except OSError as error:
            why = f"{error.strerror}; a seccomp profile or a security policy may forbid it"
            return Finding(subject, Verdict.BROKEN, f"{problem}: {why}")
    return Finding("memfd", Verdict.OK, "memory files can be made and sent between processes")


def examine_packages() -> Finding:
    """Say which distributions there are; broken, if one of them is damaged."""
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
    """Say which settings are wrong or misspelt, and block plugins as they say."""
    with contextlib.suppress(IrisError):  # it is among the problems
        registry_as_set()
        block_in_ranks()
    findings = [Finding("settings", Verdict.BROKEN, text) for text in survey(default_registry())[1]]
    findings += [Finding("settings", Verdict.NOTE, text) for text in unknown_variables(default_registry().names())]
    return findings or [Finding("settings", Verdict.OK, "all valid; `iris config` lists them")]


def examine_plugins() -> list[Finding]:
    """Say what became of each installed plugin."""
    verdicts = dict.fromkeys((PluginState.LOADED, PluginState.CREATED), Verdict.OK)
    verdicts |= dict.fromkeys((PluginState.BROKEN, PluginState.INCOMPATIBLE), Verdict.BROKEN)
    findings = []
    for record in default_registry().load_all():
        text = f"{record.distribution} {record.version}: {record.state}" + (record.reason and f": {record.reason}")
        findings.append(Finding(f"{record.kind} {record.name}", verdicts.get(record.state, Verdict.NOTE), text))
    return findings or [Finding("plugins", Verdict.BROKEN, "none: pip install ./iris_allocators ./iris_triton")]


# -- the survey -------------------------------------------------------------------------------------------------------
def survey_gpus(facts: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return torch's versions and the GPUs that it sees, and findings on them."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything
        text = f"cannot be imported: {error}. pip install 'torch>=2.11'"
        return facts, [Finding("torch", Verdict.BROKEN, text)]
    cuda, hip = torch.version.cuda, getattr(torch.version, "hip", None)
    built = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPUs only"
    findings = [Finding("torch", Verdict.OK, f"{torch.__version__}, built for {built}")]
    gpus: list[dict[str, Any]] = []
    for index in range(num_gpus()):
        found: Any = torch.cuda.get_device_properties(index)
        nbytes, arch = found.total_memory, device_targets(f"cuda:{index}", 0)[0].arch
        about = {"name": found.name, "memory_bytes": nbytes, "arch": arch}
        gpus.append({"index": index, **about, "compute_units": found.multi_processor_count})
        findings.append(Finding(f"GPU {index}", Verdict.OK, f"{found.name}, {nbytes / _GIB:.1f} GiB, {arch}"))
    if not gpus:
        findings.append(_no_gpu(torch, built))
    pairs = [
        {"from": one, "to": other, "access": torch.cuda.can_device_access_peer(one, other)}
        for one, other in itertools.permutations(range(len(gpus)), 2)
    ]
    if missing := [f"{pair['from']}->{pair['to']}" for pair in pairs if not pair["access"]]:
        tool, vendor = ("rocm-smi --showtopoaccess", "HIP") if hip else ("nvidia-smi topo -p2p r", "CUDA")
        text = f"GPUs cannot reach each other's memory: {', '.join(missing)}. No heap can span them.\n"
        text += f"`{tool}` shows the driver's view; IOMMU, ACS and VMs without peer-to-peer are common reasons.\n"
        text += f"Until then choose GPUs that reach each other with {vendor}_VISIBLE_DEVICES"
        findings.append(Finding("peer access", Verdict.BROKEN, text))
    elif pairs:
        findings.append(Finding("peer access", Verdict.OK, f"between all {len(pairs)} ordered pairs"))
    versions = {"torch": torch.__version__, "cuda_of_torch": cuda, "hip_of_torch": hip}
    return {"versions": versions, "gpus": gpus, "pairs": pairs}, findings


def _no_gpu(torch: Any, built: str) -> Finding:
    text = f"none: torch, built for {built}, sees no GPU; kernels run on the CPU"
    hiding = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    if hidden := [f"{name}={os.environ[name]!r}" for name in hiding if os.environ.get(name, "0") in ("", "-1")]:
        return Finding("GPUs", Verdict.NOTE, f"{text}; {', '.join(hidden)} hides them")
    present = sorted(glob.glob("/dev/nvidia[0-9]*")) or sorted(glob.glob("/dev/kfd"))
    if not present:
        return Finding("GPUs", Verdict.OK if built == "CPUs only" else Verdict.NOTE, text)
    text += f", but there are {', '.join(present)}: "
    if built == "CPUs only":
        return Finding("GPUs", Verdict.NOTE, f"{text}install a torch for them")
    try:
        torch.cuda.init()
    except Exception as error:  # noqa: BLE001 - whatever the driver raises is the reason
        text += " ".join(str(error).split())
        hint = "\nGPUs behind NVSwitch need a running nvidia-fabricmanager of the driver's version"
        return Finding("GPUs", Verdict.BROKEN, text + hint * ("802" in text))
    return Finding("GPUs", Verdict.BROKEN, f"{text}it gives no reason")


def survey_plugins(facts: dict[str, Any]) -> tuple[dict[str, Any], list[Finding]]:
    """Return the findings of every plugin that can be loaded, and what `Iris()` would choose."""
    targets = [DeviceTarget(DeviceType.CPU), *(device_targets(f"cuda:{each['index']}", 0)[0] for each in facts["gpus"])]
    findings, settings, registry = list[Finding](), None, default_registry()
    with contextlib.suppress(IrisError):  # examine_settings reports it
        settings, registry = load_settings(), registry_as_set()
    for record in registry.load_all():
        if record.kind is not PluginKind.OBSERVER and record.state is PluginState.LOADED:
            try:
                findings += registry.diagnose(record, targets)
            except IrisError as error:
                findings.append(Finding(f"diagnosis of {record.name}", Verdict.BROKEN, str(error)))
    if settings is not None and facts["versions"]:
        try:
            chosen = select(registry, settings, targets=device_targets(settings.device, 0))
            findings.append(Finding("choice", Verdict.OK, chosen.explain()))
        except IrisError as error:
            findings.append(Finding("choice", Verdict.BROKEN, str(error)))
    return facts, findings


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
        return asdict(self) | {"checks": [asdict(check) | {"ok": check.ok} for check in self.checks]}

    def finding(self) -> Finding:
        subject = f"self-test {self.backend} on {self.allocator}"
        where = f"{counted(self.ranks, 'rank')} on {self.device}"
        if self.state == "skipped":
            return Finding(subject, Verdict.NOTE, f"backend {self.backend!r} brings no self-test")
        if self.state == "passed":
            ops = ", ".join(dict.fromkeys(check.op for check in self.checks))
            return Finding(subject, Verdict.OK, f"{where}: {ops} are right between all pairs")
        lines = [f"{where}:", *self.problems, *(str(check) for check in self.checks if not check.ok)]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more; --json lists all"]
        return Finding(subject, Verdict.BROKEN, "\n".join(lines))

    def run(self, timeout_s: float) -> None:
        """Run it on processes of its own, for at most `timeout_s` seconds, and judge it."""
        with tempfile.TemporaryDirectory(prefix="iris-doctor-") as folder:
            choice = {"backend": self.backend, "allocator": self.allocator, "device": self.device}
            bounds = {"IRIS_DEVICE_TIMEOUT": DEVICE_TIMEOUT_S, "IRIS_BARRIER_TIMEOUT": max(1.0, timeout_s / 2)}
            answers, problem = apart(self_test_on_rank, self.ranks, timeout_s, choice, bounds, folder)
            at = [f"rank {file.name} was in {file.read_text()}" for file in sorted(Path(folder).iterdir())]
        if problem:
            self.problems = [problem, *at]
        self.checks = [check for checks in answers for check in checks or ()]
        if None in answers:
            self.state = "skipped"
        elif not all(answers):
            self.problems.append(f"the self-test of backend {self.backend!r} reported nothing")
        if self.problems or not all(check.ok for check in self.checks):
            self.state = "failed"


def self_test_on_rank(choice: Mapping[str, Any], bounds: Mapping[str, float], folder: str) -> list[PairCheck] | None:
    """Run a backend's self-test on one rank; None if it brings none.  A file says where the rank is."""
    from iris_core import Iris

    for name in [name for name in os.environ if name.startswith("IRIS_")]:
        del os.environ[name]  # the caller's plugins and sizes play no part
    os.environ |= {name: str(seconds) for name, seconds in bounds.items()}
    file = Path(folder, os.environ["RANK"])

    def begin(op: str, peer: int | None) -> None:
        file.write_text(op if peer is None else f"{op} with rank {peer}")

    begin("open", None)
    with Iris("64MiB", **choice) as ctx:
        self_test = getattr(ctx.backend, "self_test", None)
        checks = None if self_test is None else list(self_test(ctx, begin))
        begin("close", None)
    for check in checks or ():
        if not isinstance(check, PairCheck):
            raise TypeError(f"the backend's self-test gave {check!r}, not a PairCheck")
    return checks


def plan(registry: Registry, gpus: int, hip: bool) -> list[SelfTest]:
    """Return the self-tests for this machine: every usable allocator is in one, and every usable backend.

    With two GPUs or more (AMD's if `hip`) they run there, a rank on each; with fewer on CPU ranks, and on the one GPU.
    """
    gpu, cpu = DeviceTarget(DeviceType.HIP if hip else DeviceType.CUDA), DeviceTarget(DeviceType.CPU)
    cpu_ranks = _CPU_RANKS if len(os.sched_getaffinity(0)) >= _CPU_RANKS else 2
    count = collections.Counter((each.kind, each.name) for each in registry.records())
    blocked = tuple(each.qualified_name for each in registry.records() if each.state is PluginState.BLOCKED)
    tests = {}
    for target, ranks in ((gpu, gpus), (cpu, cpu_ranks if gpus < 2 else 0)):
        device = target.torch_device.partition(":")[0]
        # The way to the peers is the allocator's, the language the backend's: not every pair of them has to be tried.
        for record in registry.records(PluginKind.ALLOCATOR) + registry.records(PluginKind.BACKEND) if ranks else ():
            wanted: Any = {record.kind.value: record.qualified_name}
            with contextlib.suppress(IrisError):  # the list of plugins says what is wrong with it
                settings = IrisSettings.model_construct(block=blocked, **wanted)  # no others of the caller's
                found = select(registry, settings, targets=[target])
                plugins = found.backend, found.allocator
                backend, allocator = (r.name if count[r.kind, r.name] == 1 else r.qualified_name for r in plugins)
                tests[device, backend, allocator] = SelfTest(backend, allocator, device, ranks)
    return list(tests.values())
