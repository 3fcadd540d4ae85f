"""Two reports compared: which results are slower, faster, wrong, or gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core.bench.results import Report, Result

REGRESSIONS = ("slower", "wrong", "gone")
VERDICTS = (*REGRESSIONS, "faster", "same", "new")


@dataclass(frozen=True)
class Change:
    """A provider at a point, in two reports: its new result (the old one where it is gone), and both times."""

    result: Result
    verdict: str
    old_us: float | None
    new_us: float | None


def compare(old: Report, new: Report, tolerance: float) -> list[Change]:
    """Compare what both reports have measured.

    A result counts as slower (faster) if its median is outside the tolerance and outside what its own rounds vary by:
    its fastest (slowest) round must be slower (faster) than the old median, too.  A tolerance of 0.05 is 5 %.
    """

    def by_key(report: Report) -> dict[Any, Result]:
        measured = [each for each in report.results if each.provider]
        return {(r.benchmark, r.provider, str(sorted(r.params.items())), r.num_ranks): r for r in measured}

    was, now = by_key(old), by_key(new)
    changes = []
    for key, each in now.items():
        old_us = was[key].time_us if key in was else None
        changes.append(Change(each, _verdict(old_us, each, tolerance), old_us, each.time_us))
    gone = [each for key, each in was.items() if key not in now and each.time_us is not None]
    return changes + [Change(each, "gone", each.time_us, None) for each in gone]


def differences(old: Report, new: Report) -> list[str]:
    """Return what differs between the machines and runs of two reports, so that their times may not be comparable."""

    def facts(report: Report) -> dict[str, Any]:
        about = {**report.machine, **report.machine.get("versions", {}), **report.run}
        names = ("cpu", "gpu", "gpus", "driver", *sorted(report.machine.get("versions", {})), "allocator", "backend")
        return {name: about.get(name) for name in names}

    was, now = facts(old), facts(new)
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"{name}: {was.get(name)} then, {now.get(name)} now" for name in names]


def _verdict(old_us: float | None, new: Result, tolerance: float) -> str:
    if new.error:
        return "wrong"
    if new.time_us is None:
        return "same" if old_us is None else "gone"
    if not old_us or not new.time_us:
        return "new"
    rounds = new.rounds_us or (new.time_us,)
    if new.time_us > old_us * (1 + tolerance) and min(rounds) > old_us:
        return "slower"
    if old_us > new.time_us * (1 + tolerance) and max(rounds) < old_us:
        return "faster"
    return "same"
