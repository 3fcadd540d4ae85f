"""`iris doctor`: examine the machine and the installation, and say what is wrong and what to do.

What may crash or hang, that is everything that touches a GPU or a plugin's own code, runs in processes of its own:
`survey` asks, `selftest` tests remote access between all ranks.  This process only reads what they have found.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from iris_core.diagnosis import Finding, Verdict

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from iris_core.cli.doctor.selftest import Outcome
    from iris_core.cli.doctor.survey import Survey

TIMEOUT_S = 120.0
"""Seconds that the survey and each self-test may take."""


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found.

    Attributes:
        findings: entries of the report.
        versions: installed distributions by name.
        survey: what torch, drivers and plugins said.
        self_tests: what came of each self-test; None if they were left out.
    """

    findings: list[Finding]
    versions: Mapping[str, str]
    survey: Survey
    self_tests: list[Outcome] | None

    @property
    def broken(self) -> list[Finding]:
        """What does not work."""
        return [finding for finding in self.findings if finding.verdict is Verdict.BROKEN]

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs; docs/doctor.md says what the keys mean."""
        return {
            "ok": not self.broken,
            "findings": [asdict(finding) for finding in self.findings],
            "versions": {"distributions": dict(self.versions), **self.survey.versions},
            "gpus": self.survey.gpus,
            "pairs": self.survey.pairs,
            "self_tests": None if self.self_tests is None else [outcome.to_json() for outcome in self.self_tests],
        }


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


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 if anything is broken."""
    from iris_core.cli._output import print_json

    report = examine(self_test=not args.no_self_test, timeout_s=args.timeout)
    if args.json:
        print_json(report.to_json())
    else:
        _print(report)
    return int(bool(report.broken))


def examine(*, self_test: bool = True, timeout_s: float = TIMEOUT_S) -> Report:
    """Examine everything; a step that fails is a finding, and the others still run.

    Args:
        self_test: whether to test remote access between ranks.
        timeout_s: seconds that the survey and each self-test may take.
    """
    from iris_core.cli.doctor import host, installation, survey

    packages = installation.examine_packages()
    taken = survey.take_survey(timeout_s)
    findings = [
        *host.examine_host(),
        packages,
        *installation.examine_settings(),
        *installation.examine_plugins(),
        *taken.findings,
    ]
    outcomes = _self_tests(taken, timeout_s) if self_test else None
    if outcomes is None:
        findings.append(Finding("self-test", Verdict.NOTE, "left out as asked"))
    elif not outcomes:
        text = "left out: no backend and allocator can be used together here"
        findings.append(Finding("self-test", Verdict.NOTE, text))
    findings += [outcome.finding() for outcome in outcomes or ()]
    return Report(findings, packages.data, taken, outcomes)


def _self_tests(taken: Survey, timeout_s: float) -> list[Outcome]:
    from iris_core.cli.doctor import selftest
    from iris_core.registry import default_registry

    if not taken.torch:
        return []
    jobs = selftest.plan_jobs(default_registry(), len(taken.gpus), taken.hip)
    return [selftest.run_job(job, timeout_s) for job in jobs]


def _print(report: Report) -> None:
    from iris_core.cli._output import print_table
    from iris_core.cli.doctor import tables

    print_table(("SUBJECT", "VERDICT", "FOUND"), tables.rows(report.findings))
    matrices = [tables.link_matrix(report.survey.pairs), *map(tables.self_test_matrix, report.self_tests or ())]
    for matrix in filter(None, matrices):
        print(f"\n{matrix}")
    broken = report.broken
    print(f"\n{len(broken)} broken: {', '.join(each.subject for each in broken)}" if broken else "\nnothing is broken")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise ValueError("a bound in seconds, more than 0 and at most a day")
    return value
