"""The self-tests: which ones there are on this machine, running them, and what their records say."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_core.cli.doctor.process import Ending, environment_without_world, read_records, run_module
from iris_core.cli.doctor.worker import RUN_FILE, rank_file
from iris_core.diagnosis import Finding, PairCheck, Verdict
from iris_core.errors import PluginError
from iris_core.types import DeviceTarget, DeviceType, PluginInfo, PluginKind, PluginState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from iris_core.registry import PluginRecord, Registry

WORKER = "iris_core.cli.doctor.worker"

BARRIER = "barrier"
"""What a backend tells `begin` before it waits for the other ranks on the host."""

DEVICE_TIMEOUT_S = 5.0
"""Bound of waits inside kernels.  Signals take microseconds; on an overloaded CPU a rank may be late."""

_CPU_RANKS = 4
_MOST_LINES = 12


@dataclass(frozen=True, slots=True)
class Job:
    """One self-test.

    Attributes:
        backend: name of the backend, whose test it is.
        allocator: name of the allocator under the heap.
        device: "cpu" or "cuda", as torch calls it.
        ranks: number of ranks; on GPUs one on each.
    """

    backend: str
    allocator: str
    device: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.backend} on {self.allocator}"


@dataclass
class Outcome:
    """What came of a self-test.

    Attributes:
        job: which one it was.
        checks: what the ranks found, by operation, rank and peer; what was never reported is not in it.
        problems: what went wrong with the run as a whole; empty if it came to its end.
        unsupported: the backend brings no self-test.
        devices: every rank's device.
        seconds: time that the slowest rank took for the test itself.
        total_seconds: the same with starting processes, opening and closing.
    """

    job: Job
    checks: list[PairCheck] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unsupported: bool = False
    devices: list[str] = field(default_factory=list)
    seconds: float = 0.0
    total_seconds: float = 0.0

    @property
    def failures(self) -> list[PairCheck]:
        """The checks that found something wrong."""
        return [check for check in self.checks if not check.ok]

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return not self.failures and not self.problems

    def finding(self) -> Finding:
        """Return the entry of the report."""
        job = self.job
        subject = f"self-test {job}"
        if self.unsupported and not self.problems:
            return Finding(subject, Verdict.NOTE, f"backend {job.backend!r} brings no self-test")
        ops = list(dict.fromkeys(check.op for check in self.checks))
        where = f"{job.ranks} rank{'s' if job.ranks > 1 else ''} on {job.device}"
        if self.ok:
            text = f"{where}: {', '.join(ops)} are right between all pairs; {self.seconds:.1f} s"
            return Finding(subject, Verdict.OK, text)
        lines = [*self.problems, *map(str, self.failures)]
        if len(lines) > _MOST_LINES:
            lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more; --json lists all"]
        return Finding(subject, Verdict.BROKEN, "\n".join([f"{where}:", *lines]))

    def to_json(self) -> dict[str, Any]:
        """Return it for `iris doctor --json`."""
        job = self.job
        return {
            "backend": job.backend,
            "allocator": job.allocator,
            "device": job.device,
            "ranks": job.ranks,
            "devices": self.devices,
            "state": "skipped" if self.unsupported and self.ok else "passed" if self.ok else "failed",
            "problems": self.problems,
            "seconds": self.seconds,
            "total_seconds": self.total_seconds,
            "checks": [
                {"op": each.op, "rank": each.rank, "peer": each.peer, "ok": each.ok, "problem": each.problem}
                for each in self.checks
            ],
        }


def plan_jobs(registry: Registry, gpus: int, hip: bool) -> list[Job]:
    """Return the self-tests for this machine: every usable allocator is in one, and every usable backend.

    With two GPUs or more they run on GPUs, a rank on each; with one, on that GPU alone and on CPU ranks; without any,
    on CPU ranks.

    Args:
        registry: the plugins.
        gpus: number of GPUs.
        hip: whether they are AMD's.
    """
    jobs = []
    if gpus:
        gpu = DeviceTarget(DeviceType.HIP if hip else DeviceType.CUDA)
        jobs += [Job(*names, "cuda", gpus) for names in _fitting(registry, gpu)]
    if gpus < 2:
        ranks = _CPU_RANKS if len(os.sched_getaffinity(0)) >= _CPU_RANKS else 2
        jobs += [Job(*names, "cpu", ranks) for names in _fitting(registry, DeviceTarget(DeviceType.CPU))]
    return jobs


def _fitting(registry: Registry, target: DeviceTarget) -> list[tuple[str, str]]:
    """Names of backends and allocators to be tested together on a device."""

    def usable(kind: PluginKind) -> list[PluginRecord]:
        found = [record for record in registry.records(kind) if _usable(registry, record, target)]
        return sorted(found, key=lambda record: -_info(record).priority)  # what Iris() would choose comes first

    backends, allocators = usable(PluginKind.BACKEND), usable(PluginKind.ALLOCATOR)
    pairs = []
    for backend in backends:
        fitting = [each for each in allocators if _info(backend).requires <= _info(each).provides]
        # The way to the peers is the allocator's, the language the backend's: not every pair of them has to be tried.
        pairs += [(backend, allocator) for allocator in (fitting if backend is backends[0] else fitting[:1])]
    return [(_name(registry, backend), _name(registry, allocator)) for backend, allocator in pairs]


def _info(record: PluginRecord) -> PluginInfo:
    assert record.info is not None, f"{record.label} is not loaded"
    return record.info


def _name(registry: Registry, record: PluginRecord) -> str:
    """The name by which a plugin can be chosen."""
    ambiguous = sum(each.name == record.name for each in registry.records(record.kind)) > 1
    return record.qualified_name if ambiguous else record.name


def _usable(registry: Registry, record: PluginRecord, target: DeviceTarget) -> bool:
    if record.state is PluginState.BLOCKED:
        return False
    try:
        registry.load(record)
        return bool(record.info and target.type in record.info.devices and registry.probe(record, target))
    except PluginError:
        return False  # the list of plugins says what is wrong with it


def run_job(job: Job, timeout_s: float, worker: str = WORKER) -> Outcome:
    """Run one self-test in processes of its own.

    Args:
        job: which one.
        timeout_s: seconds that it may take with everything, before it is ended.
        worker: module that starts the ranks.
    """
    # Whatever the caller's environment says of plugins and sizes is none of the test's business.
    environment = {name: each for name, each in environment_without_world().items() if not name.startswith("IRIS_")}
    environment["IRIS_DEVICE_TIMEOUT"] = str(DEVICE_TIMEOUT_S)
    environment["IRIS_BARRIER_TIMEOUT"] = str(
        max(1.0, timeout_s / 2)
    )  # so that the ranks themselves can say who is late
    argument = {"backend": job.backend, "allocator": job.allocator, "device": job.device, "ranks": job.ranks}
    with tempfile.TemporaryDirectory(prefix="iris-doctor-") as name:
        folder = Path(name)
        ending = run_module(worker, argument, folder, timeout_s, environment)
        ranks = [read_records(folder / rank_file(rank)) for rank in range(job.ranks)]
        run = read_records(folder / RUN_FILE)
    return judge(job, ranks, run, ending)


def judge(job: Job, ranks: list[list[dict[str, Any]]], run: list[dict[str, Any]], ending: Ending) -> Outcome:
    """Make an outcome of the records.

    Args:
        job: which self-test it was.
        ranks: every rank's records.
        run: the records of the process that started the ranks.
        ending: how that process ended.
    """
    outcome = Outcome(job, total_seconds=ending.seconds)
    for records in ranks:
        for record in records:
            if "check" in record:
                outcome.checks.append(PairCheck(**record["check"]))
            outcome.seconds = max(outcome.seconds, record.get("seconds", 0.0))
            outcome.unsupported |= record.get("unsupported", False)
    outcome.devices = [next((each["device"] for each in records if "device" in each), "") for records in ranks]
    if ending.problem:
        _explain(outcome, ranks, run, ending)
    elif not outcome.unsupported:
        outcome.checks += _never_reported(job, outcome.checks)
        if not outcome.checks:
            outcome.problems.append(f"the self-test of backend {job.backend!r} reported nothing")
    return outcome


def expected_pairs(ranks: int) -> list[tuple[int, int]]:
    """Return all ordered pairs of different ranks; in a world of one the rank is its own peer."""
    return [(one, other) for one in range(ranks) for other in range(ranks) if one != other or ranks == 1]


def _never_reported(job: Job, checks: Iterable[PairCheck]) -> list[PairCheck]:
    seen = {(check.op, check.rank, check.peer) for check in checks}
    return [
        PairCheck(op, rank, peer, "was not reported")
        for op in dict.fromkeys(check.op for check in checks)
        for rank, peer in expected_pairs(job.ranks)
        if (op, rank, peer) not in seen
    ]


def _explain(outcome: Outcome, ranks: list[list[dict[str, Any]]], run: list[dict[str, Any]], ending: Ending) -> None:
    """Say why a run did not come to its end, and hold it against the pair that was at work."""
    standing = [_standing(records) for records in ranks]
    if run:  # what started the ranks saw which of them failed first
        rank = run[0]["rank"]
        culprits = [] if rank is None else [rank]
        told = [each["error"] for each in (ranks[rank] if culprits else []) if "error" in each]
        where = f"rank {rank}{_where(standing[rank])}: " if culprits else ""
        outcome.problems.append(where + (told[0] if told else run[0]["error"]))
        what = "failed"
    else:
        outcome.problems.append("\n".join(filter(None, [f"the self-test {ending.problem}", ending.stderr])))
        late = [r for r, (op, _) in enumerate(standing) if op not in ("", BARRIER)]
        culprits = late or [r for r, (op, _) in enumerate(standing) if op]
        outcome.problems += [f"rank {r} did not come back{_where(standing[r], 'from')}" for r in culprits]
        what = "did not come back"
    for rank in culprits:
        op, peer = standing[rank]
        if peer is not None:
            outcome.checks.append(PairCheck(op, rank, peer, what))


def _standing(records: list[dict[str, Any]]) -> tuple[str, int | None]:
    """What a rank was doing when its records end; an empty name if it had come to its end, or not begun."""
    if any("done" in each for each in records):
        return "", None
    begun = [each for each in records if "begin" in each]
    return (begun[-1]["begin"], begun[-1]["peer"]) if begun else ("", None)


def _where(standing: tuple[str, int | None], word: str = "in") -> str:
    op, peer = standing
    if not op:
        return ""
    return f" {word} {op}" + ("" if peer is None else f" with rank {peer}")
