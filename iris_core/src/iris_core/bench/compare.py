"""Comparing two reports: what has become slower, faster, wrong, or is gone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core.bench.results import Report, Result

VERDICTS = ("slower", "wrong", "gone", "faster", "same", "new")
"""What can be said of a result; the first three are regressions."""


@dataclass(frozen=True)
class Change:
    """A provider at a point, in two reports.

    Attributes:
        benchmark, provider, params, num_ranks, timer: which.
        verdict: one of VERDICTS.
        old_us, new_us: times in microseconds; None where there is none.
        ratio: old by new time: above 1, it has become faster.
    """

    benchmark: str
    provider: str
    params: dict[str, Any]
    num_ranks: int
    timer: str
    verdict: str
    old_us: float | None
    new_us: float | None
    ratio: float | None

    @property
    def is_regression(self) -> bool:
        """Whether it should not have happened."""
        return self.verdict in VERDICTS[:3]


def compare(old: Report, new: Report, tolerance: float) -> list[Change]:
    """Compare what both reports have measured.

    A result counts as slower (faster) if its median is outside the tolerance and outside what its own rounds vary by:
    its fastest (slowest) round must be slower (faster) than the old median, too.

    Args:
        old: what one measures against.
        new: what one measured.
        tolerance: 0.05 for 5 %.

    Returns:
        One change for each provider and point of either, those of the new report first, in its order.
    """
    before = {_key(each): each for each in old.results if each.provider}
    changes = []
    for each in new.results:
        if each.provider:
            changes.append(_change(before.pop(_key(each), None), each, tolerance))
    changes += [_change(each, None, tolerance) for each in before.values() if each.time_us is not None]
    return changes


def differences(old: Report, new: Report) -> list[str]:
    """Return what differs between the machines and runs of two reports, so that their times may not be comparable."""
    found = []
    for name in ("cpu", "gpu", "gpus", "driver"):
        was, now = old.machine.get(name), new.machine.get(name)
        if was != now:
            found.append(f"{name}: {was} then, {now} now")
    was_versions, versions = old.machine.get("versions", {}), new.machine.get("versions", {})
    for name in sorted(was_versions.keys() | versions.keys()):
        if was_versions.get(name) != versions.get(name):
            found.append(f"{name}: {was_versions.get(name)} then, {versions.get(name)} now")
    for name in ("allocator", "backend"):
        if old.run.get(name) != new.run.get(name):
            found.append(f"{name}: {old.run.get(name)} then, {new.run.get(name)} now")
    return found


def _key(result: Result) -> tuple[Any, ...]:
    params = tuple(sorted((name, str(value)) for name, value in result.params.items()))
    return result.benchmark, result.provider, params, result.num_ranks


def _change(old: Result | None, new: Result | None, tolerance: float) -> Change:
    either = new or old
    assert either is not None
    was, now = (None if each is None else each.time_us for each in (old, new))
    ratio = was / now if was and now else None
    return Change(
        either.benchmark,
        either.provider,
        dict(either.params),
        either.num_ranks,
        either.timer,
        _verdict(old, new, ratio, tolerance),
        was,
        now,
        ratio,
    )


def _verdict(old: Result | None, new: Result | None, ratio: float | None, tolerance: float) -> str:
    if new is not None and new.error:
        return "wrong"
    if old is not None and old.time_us is not None and (new is None or new.time_us is None):
        return "gone"
    if ratio is None:
        return "new" if new is not None and new.time_us is not None else "same"
    assert old is not None
    assert new is not None
    assert old.time_us is not None
    rounds = new.rounds_us or (new.time_us or 0.0,)
    if ratio < 1 / (1 + tolerance) and min(rounds) > old.time_us:
        return "slower"
    if ratio > 1 + tolerance and max(rounds) < old.time_us:
        return "faster"
    return "same"
