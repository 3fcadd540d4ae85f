"""`iris doctor`: examine the machine and the installation, and say what is wrong and what to do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from iris_core.errors import IrisError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from iris_core.settings import IrisSettings

SELF_TEST = "iris_triton.selftest"
"""Module that runs a kernel; in a process of its own, because a crash is among the things to be found."""

SELF_TEST_TIMEOUT_S = 120.0

OK, NOTE, BROKEN = "ok", "note", "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        subject: what was examined.
        verdict: "ok", "note" (worth knowing) or "broken".
        text: what was found, and what to do.
    """

    subject: str
    verdict: str
    text: str


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "doctor",
        help="examine this machine and the installation, and run a self-test",
        description="Examine this machine and the installation. Exit status 1 if anything is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if anything is broken."""
    from iris_core.cli._output import print_json, print_table

    findings = examine()
    broken = [finding for finding in findings if finding.verdict == BROKEN]
    if args.json:
        print_json({"ok": not broken, "findings": [asdict(finding) for finding in findings]})
    else:
        rows = [
            ((f.subject, f.verdict) if number == 0 else ("", "")) + (line,)
            for f in findings
            for number, line in enumerate(f.text.splitlines() or [""])
        ]
        print_table(("SUBJECT", "VERDICT", "FOUND"), rows)
        print(f"{len(broken)} broken" if broken else "nothing is broken")
    return int(bool(broken))


def examine() -> list[Finding]:
    """Examine everything; a step that fails is a finding, and the others still run."""
    settings, settings_findings = _settings()
    steps: list[Callable[[], list[Finding]]] = [
        _machine,
        _memory,
        _torch,
        _triton,
        lambda: settings_findings,
        _plugins,
        lambda: _choice(settings),
        lambda: [self_test()],
    ]
    findings = []
    for step in steps:
        findings += step()
    return findings


def _machine() -> list[Finding]:
    system = platform.system()
    on = Finding("platform", OK, platform.platform())
    if system != "Linux":
        on = Finding("platform", BROKEN, f"{platform.platform()}: Iris needs Linux")
    version = platform.python_version()
    return [
        Finding("python", OK, f"{version} at {sys.executable}"),
        on,
        Finding("CPUs", OK, f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
        if hasattr(os, "sched_getaffinity")
        else Finding("CPUs", OK, str(os.cpu_count())),
    ]


def _memory() -> list[Finding]:
    findings = []
    try:
        pages, page_nbytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        findings.append(Finding("memory", OK, _gib(pages * page_nbytes)))
    except (OSError, ValueError) as error:
        findings.append(Finding("memory", NOTE, f"unknown: {error}"))
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        findings.append(Finding("/dev/shm", NOTE, f"{error.strerror}; torch.distributed and NCCL may want it"))
    else:
        size = f"{_gib(shm.f_blocks * shm.f_frsize)}, {_gib(shm.f_bavail * shm.f_frsize)} free"
        findings.append(Finding("/dev/shm", OK, f"{size}; the host allocator uses memory files instead and ignores it"))
    if not hasattr(os, "memfd_create"):
        findings.append(Finding("memfd", BROKEN, "this Python has no os.memfd_create: CPU ranks cannot share memory"))
        return findings
    try:
        os.close(os.memfd_create("iris-doctor"))
    except OSError as error:
        findings.append(Finding("memfd", BROKEN, f"memfd_create: {error.strerror}: CPU ranks cannot share memory"))
    else:
        findings.append(Finding("memfd", OK, "works"))
    return findings


def _torch() -> list[Finding]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything
        return [Finding("torch", BROKEN, f"cannot be imported: {error}. pip install 'torch>=2.11'")]
    findings = [Finding("torch", OK, torch.__version__)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        findings.append(Finding(f"GPU {index}", OK, f"{gpu.name}, {_gib(gpu.total_memory)}"))
    if not count:
        built = torch.version.cuda or getattr(torch.version, "hip", None)
        why = f"torch is built for {built}, but sees none" if built else "this torch is built for CPUs only"
        findings.append(Finding("GPUs", NOTE if built else OK, f"none: {why}; kernels run on the CPU"))
    return findings


def _triton() -> list[Finding]:
    if importlib.util.find_spec("iris_triton") is None:
        return [Finding("triton", NOTE, "the backend is not installed: pip install ./iris_triton")]
    try:
        compat = importlib.import_module("iris_triton._compat")
    except Exception as error:  # noqa: BLE001 - a damaged installation may raise anything
        return [Finding("triton", BROKEN, f"cannot be imported: {type(error).__name__}: {error}")]
    problem = compat.version_problem()
    return [Finding("triton", NOTE if problem else OK, problem or f"{compat.triton.__version__}, tested with Iris")]


def _settings() -> tuple[IrisSettings | None, list[Finding]]:
    """Return the core's settings, or None where a value is wrong, and what there is to say about all settings."""
    from iris_core.cli.config import settings_classes
    from iris_core.registry import default_registry
    from iris_core.settings import IrisSettingsWarning, load_plugin_settings, load_settings, warn_unknown_variables

    findings = []
    settings = None
    registry = default_registry()
    try:
        settings = load_settings()
        registry.block(settings.block)
    except IrisError as error:
        findings.append(Finding("settings", BROKEN, str(error)))
    for name, cls in settings_classes(registry).items():
        try:
            load_plugin_settings(name, cls)
        except IrisError as error:
            findings.append(Finding("settings", BROKEN, str(error)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IrisSettingsWarning)
        findings += [Finding("settings", NOTE, text) for text in warn_unknown_variables(registry.names())]
    return settings, findings or [Finding("settings", OK, "all valid; `iris config` lists them")]


def _plugins() -> list[Finding]:
    from iris_core.registry import default_registry
    from iris_core.types import PluginState

    bad = {PluginState.BROKEN: BROKEN, PluginState.INCOMPATIBLE: BROKEN, PluginState.CONFLICTING: NOTE}
    findings = []
    for record in default_registry().load_all():
        quiet = NOTE if record.state in (PluginState.UNAVAILABLE, PluginState.BLOCKED) else OK
        text = f"{record.state}: {record.reason}" if record.reason else str(record.state)
        origin = f"{record.distribution} {record.version}"
        findings.append(Finding(f"{record.kind} {record.name}", bad.get(record.state, quiet), f"{origin}: {text}"))
    return findings or [Finding("plugins", BROKEN, "none: pip install ./iris_allocators ./iris_triton")]


def _choice(settings: IrisSettings | None) -> list[Finding]:
    """What Iris() would choose here."""
    if settings is None:
        return []
    from iris_core.registry import default_registry
    from iris_core.selection import select

    try:
        from iris_core.api import device_targets

        plan = select(default_registry(), settings, targets=device_targets(settings.device, 0))
    except IrisError as error:
        return [Finding("choice", BROKEN, str(error))]
    except ImportError as error:  # torch, which has its own line
        return [Finding("choice", BROKEN, f"cannot be examined: {error}")]
    return [Finding("choice", OK, plan.explain())]


def self_test(module: str = SELF_TEST, timeout_s: float = SELF_TEST_TIMEOUT_S) -> Finding:
    """Run a self-test module in a process of its own.

    Args:
        module: module to run with `python -m`.
        timeout_s: seconds it may take.
    """
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return Finding("self-test", NOTE, f"left out: {module.partition('.')[0]} is not installed")
    # One rank on the CPU, whatever the caller's environment says of worlds, plugins and sizes.
    ours = ("IRIS_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.upper().startswith(ours)}
    command = [sys.executable, "-m", module]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return Finding("self-test", BROKEN, f"`{' '.join(command)}` did not end within {timeout_s:g} s")
    if done.returncode == 0:
        return Finding("self-test", OK, done.stdout.strip())
    how = f"was killed by signal {-done.returncode}" if done.returncode < 0 else f"ended with {done.returncode}"
    last = "\n".join(done.stderr.strip().splitlines()[-3:])
    return Finding("self-test", BROKEN, f"`{' '.join(command)}` {how}\n{last}".rstrip())


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
