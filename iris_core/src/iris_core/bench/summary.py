"""From the times of every rank, provider and round to results."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from iris_core.bench.results import Result
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from iris_core.bench.state import Provider, State

Times = list[float]
"""Seconds of one operation on one rank, one number for each round; empty for a rank that takes no part."""


@dataclass
class Measured:
    """What all ranks have found out about one provider.

    Attributes:
        times: every rank's times.
        calls: calls that were timed together.
        verified: whether a check passed.
        error: what was wrong with the data; then the times do not count.
    """

    times: list[Times] = field(default_factory=list)
    calls: int = 0
    verified: bool = False
    error: str = ""


def slowest(times: Sequence[Times]) -> Times:
    """Return the slowest rank's time of every round.

    Raises:
        BenchmarkError: no rank took part.
    """
    active = [each for each in times if each]
    if not active:
        raise BenchmarkError("no rank took part: the provider's call is None on all of them")
    return [max(row) for row in zip(*active, strict=True)]


def skew_pct(times: Sequence[Times]) -> float | None:
    """Return how much less the fastest rank's median is than the slowest rank's, in percent; None for one rank."""
    medians = [statistics.median(each) for each in times if each]
    if len(medians) < 2:
        return None
    return (1 - min(medians) / max(medians)) * 100


def summarize(
    state: State,
    measured: Mapping[str, Measured],
    num_ranks: int,
    counters: Mapping[str, float],
) -> list[Result]:
    """Make the results of one point.

    Args:
        state: what was declared.
        measured: by provider; those that were skipped are absent.
        num_ranks: number of ranks, 0 without ranks.
        counters: further numbers.
    """
    rounds = {name: slowest(each.times) for name, each in measured.items() if not each.error}
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    results = []
    for provider in state.providers.values():
        base = _result(state, provider, num_ranks)
        found = measured.get(provider.name)
        if found is None:
            result = base
        elif found.error:
            result = replace(base, error=found.error, calls=found.calls)
        else:
            result = replace(base, **_numbers(state, provider, found, rounds, medians), counters=dict(counters))
        targets = tuple(each.judged(result) for each in state.targets.get(provider.name, ()))
        results.append(replace(result, targets=targets))
    return results


def skipped_point(state: State, num_ranks: int, reason: str) -> Result:
    """Make the one result of a point that the benchmark left out."""
    return Result(state.benchmark, "", plain(state.params), num_ranks, skipped=reason)


def plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of axes as JSON knows them; others, like dtypes, as text."""
    return {k: v if isinstance(v, bool | int | float | str | None) else str(v) for k, v in params.items()}


def _result(state: State, provider: Provider, num_ranks: int) -> Result:
    return Result(
        benchmark=state.benchmark,
        provider=provider.name,
        params=plain(state.params),
        num_ranks=num_ranks,
        timer=provider.timer,
        nbytes=state.nbytes,
        flops=state.flops,
        baseline=provider.baseline,
        skipped=provider.skipped,
    )


def _numbers(
    state: State, provider: Provider, found: Measured, rounds: Mapping[str, Times], medians: Mapping[str, float]
) -> dict[str, Any]:
    own, seconds = rounds[provider.name], medians[provider.name]
    local = [statistics.median(each) if each else None for each in found.times]
    skew = skew_pct(found.times)
    numbers: dict[str, Any] = {
        "time_us": _rounded(seconds * 1e6),
        "min_us": _rounded(min(each for each in local if each is not None) * 1e6),
        "skew_pct": None if skew is None else _rounded(skew),
        "local_us": tuple(None if each is None else _rounded(each * 1e6) for each in local),
        "rounds_us": tuple(_rounded(each * 1e6) for each in own),
        "calls": found.calls,
        "verified": found.verified,
    }
    if state.nbytes is not None:
        numbers["gb_per_s"] = _rounded(state.nbytes / seconds / 1e9)
        if state.bus_factor is not None:
            numbers["bus_gb_per_s"] = _rounded(state.nbytes * state.bus_factor / seconds / 1e9)
    if state.flops is not None:
        numbers["tflop_per_s"] = _rounded(state.flops / seconds / 1e12)
    if provider.baseline in rounds:
        numbers["ratio"] = _ratio(rounds[provider.baseline], own)
    others = [p.name for p in state.providers.values() if p.peer and p.name != provider.name and p.name in rounds]
    if others:
        best = min(others, key=lambda name: medians[name])
        numbers["best_peer"], numbers["ratio_to_best_peer"] = best, _ratio(rounds[best], own)
    return numbers


def _ratio(theirs: Times, ours: Times) -> float:
    """Speed in relation to another provider; round by round, for what changes slowly hits both."""
    return _rounded(statistics.median(a / b for a, b in zip(theirs, ours, strict=True)))


def _rounded(number: float) -> float:
    """Six digits are more than any clock here has."""
    return float(f"{number:.6g}")
