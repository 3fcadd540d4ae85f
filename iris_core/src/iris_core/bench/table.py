"""Results on the console: a table for each benchmark, and the machine."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from iris_core.cli._output import print_table

if TYPE_CHECKING:
    from iris_core.bench.results import Report, Result

_NUMBERS = {
    "time us": "time_us", "skew %": "skew_pct", "GB/s": "gb_per_s", "bus GB/s": "bus_gb_per_s",
    "TFLOP/s": "tflop_per_s",
}  # fmt: skip


def show(report: Report) -> None:
    """Print a report; columns without content are left out."""
    for name, group in itertools.groupby(report.results, lambda each: each.benchmark):
        rows = [_row(each) for each in group]
        headings = sorted(dict.fromkeys(itertools.chain(*rows)), key=lambda each: each in ("target", "data"))
        headings = [each for each in headings if any(row.get(each) for row in rows)]
        print_table(headings, [[row.get(heading) or "-" for heading in headings] for row in rows], title=name)
    machine, run = report.machine, report.run
    gpus = f"{machine['gpus']} x {machine['gpu']}, driver {machine['driver']}" if machine["gpus"] else "no GPU"
    print(
        f"{machine['cpu']}, {machine['usable_cores']} cores, load {machine['load_average_1min']:g}; {gpus}; "
        f"torch {machine['versions']['torch']}, triton {machine['versions']['triton']}; {machine['date']}\n"
        f"{len(report.results)} results in {run['seconds']:g} s; {len(report.errors)} wrong, "
        f"{len(report.missed)} with a missed target"
    )
    if not machine["gpus"] and machine["load_average_1min"] > machine["usable_cores"]:
        print("the machine was busy: times on the CPU are too long")


def _row(r: Result) -> dict[str, str]:
    row = {"ranks": str(r.num_ranks or "")} | {key: str(value) for key, value in r.params.items()}
    row |= {"provider": r.provider, "timer": r.timer}
    row |= {heading: _text(getattr(r, field)) for heading, field in _NUMBERS.items()}
    row["speed"] = "" if r.ratio is None else f"{r.ratio:.3g} x {r.baseline}"
    row["of the best peer"] = "" if r.ratio_to_best_peer is None else f"{r.ratio_to_best_peer:.3g} x {r.best_peer}"
    row |= {key: _text(value) for key, value in r.counters.items()}
    row["target"] = "; ".join(map(str, r.targets))
    row["data"] = "right" if r.verified else "not checked"
    if r.error or r.skipped:
        row["data"] = f"WRONG: {r.error}" if r.error else f"skipped: {r.skipped}"
    return row


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
