"""Results on the console: a list for each benchmark, or a matrix of bandwidths."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from iris_core.cli._output import print_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from iris_core.bench.results import Report, Result

_NUMBERS = {
    "time us": "time_us", "skew %": "skew_pct", "GB/s": "gb_per_s", "bus GB/s": "bus_gb_per_s",
    "TFLOP/s": "tflop_per_s",
}  # fmt: skip


def show(report: Report, matrices: Mapping[str, tuple[str, ...]]) -> None:
    """Print a report; benchmarks with two axes in `matrices` as matrices of GB/s (us where no bytes were set)."""
    for name, group in itertools.groupby(report.results, lambda each: each.benchmark):
        results = list(group)
        if axes := matrices.get(name, ()):
            _show_matrices(name, results, axes)
            results = [r for r in results if r.error or r.targets]
        if results:
            _show_list(name, results)
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


def _show_list(name: str, results: Sequence[Result]) -> None:
    several = len({r.num_ranks for r in results}) > 1
    rows = [_row(r, several) for r in results]
    headings = sorted(dict.fromkeys(itertools.chain(*rows)), key=lambda each: each in ("target", "data"))
    headings = [each for each in headings if any(row.get(each) for row in rows)]
    print_table(headings, [[row.get(heading) or "-" for heading in headings] for row in rows], title=name)


def _row(r: Result, several: bool) -> dict[str, str]:
    """The cells of a result by heading; with its number of ranks if there are several."""
    row = {"ranks": str(r.num_ranks)} if several else {}
    row |= {key: str(value) for key, value in r.params.items()} | {"provider": r.provider, "timer": r.timer}
    row |= {heading: _text(getattr(r, field)) for heading, field in _NUMBERS.items()}
    row["speed"] = "" if r.ratio is None else f"{r.ratio:.3g} x {r.baseline}"
    row["of the best peer"] = "" if r.ratio_to_best_peer is None else f"{r.ratio_to_best_peer:.3g} x {r.best_peer}"
    row |= {key: _text(value) for key, value in r.counters.items()}
    row["target"] = "; ".join(map(str, r.targets))
    row["data"] = "right" if r.verified else "not checked"
    if r.error or r.skipped:
        row["data"] = f"WRONG: {r.error}" if r.error else f"skipped: {r.skipped}"
    return row


def _show_matrices(name: str, results: Sequence[Result], axes: Sequence[str]) -> None:
    """Print one for each provider, point of the other axes, and number of ranks."""
    down, across = ({str(r.params[axis]): None for r in results} for axis in axes)
    tables: dict[str, dict[tuple[str, ...], str]] = {}
    for r in results:
        if not r.skipped:
            others = [f"{key} {value}" for key, value in r.params.items() if key not in axes]
            field, unit = ("time_us", "us") if r.nbytes is None else ("gb_per_s", "GB/s")
            title = ", ".join([name, *others, f"{r.num_ranks} ranks", r.provider, unit])
            cells = tables.setdefault(title, {})
            cells[tuple(str(r.params[axis]) for axis in axes)] = "WRONG" if r.error else _text(getattr(r, field))
    for title, cells in tables.items():
        rows = [[row, *(cells.get((row, column), "-") for column in across)] for row in down]
        print_table([" \\ ".join(axes), *across], rows, title=title)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
