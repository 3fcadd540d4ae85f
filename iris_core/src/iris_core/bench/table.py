"""Results on the console: a list for each benchmark, or a matrix of bandwidths."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from iris_core.bench.results import timed_again

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console
    from rich.table import Table

    from iris_core.bench.results import Report, Result

NO_NUMBER = "-"
_TIMES = {"graph": "graph us", "events": "eager us", "cpu": "cpu us", "reported": "reported us", "": "time us"}
"""Headings of times, by timer."""


def show(report: Report, matrices: Mapping[str, tuple[str, ...]] | None = None, console: Console | None = None) -> None:
    """Print a report.

    Args:
        report: the results.
        matrices: two axes by benchmark; these are shown as matrices of GB/s (us where no bytes were set).
        console: where to print; standard output by default, without a limit of width where that is no terminal.
    """
    from rich.console import Console

    if console is None:
        console = Console() if sys.stdout.isatty() else Console(width=200)
    by_benchmark: dict[str, list[Result]] = {}
    for result in report.results:
        by_benchmark.setdefault(result.benchmark, []).append(result)
    for name, results in by_benchmark.items():
        axes = (matrices or {}).get(name, ())
        if len(axes) == 2:
            for others, part in _by_other_axes(results, axes):
                for provider in _in_order(r.provider for r in part if not r.skipped and not r.error):
                    console.print(_matrix(", ".join([name, *others]), provider, part, axes))
            results = [r for r in results if r.error or r.targets]
        if results:
            console.print(_list(name, results))
    console.print(_footer(report), highlight=False, markup=False)


def _by_other_axes(results: Sequence[Result], axes: Sequence[str]) -> list[tuple[Sequence[str], list[Result]]]:
    """The results of each matrix, with the values of other axes and the number of ranks, where there are several."""
    runs = len({each.num_ranks for each in results}) > 1
    parts: dict[tuple[str, ...], list[Result]] = {}
    for each in results:
        others = [f"{name} {value}" for name, value in each.params.items() if name not in axes]
        parts.setdefault((*others, *([f"{each.num_ranks} ranks"] if runs else ())), []).append(each)
    return list(parts.items()) if len(parts) > 1 else [((), list(results))]


def _list(name: str, results: Sequence[Result]) -> Table:
    """A row for each result; one that is another timing of the same provider stands in a column of that row."""
    results, again = _beside(results)
    columns: dict[str, list[str]] = {}
    for param in _in_order(p for r in results for p in r.params):
        columns[param] = [str(r.params.get(param, NO_NUMBER)) for r in results]
    columns["provider"] = [r.provider or NO_NUMBER for r in results]
    times = [{each.timer: each for each in (r, again.get(id(r))) if each is not None} for r in results]
    for timer in _in_order(timer for row in times for timer in row) if again else ("",):
        shown = [row.get(timer) for row in times] if again else results
        columns[_TIMES[timer]] = [NO_NUMBER if each is None else _time(each) for each in shown]
    for heading, attribute in (
        ("skew %", "skew_pct"), ("GB/s", "gb_per_s"), ("bus GB/s", "bus_gb_per_s"), ("TFLOP/s", "tflop_per_s"),
    ):  # fmt: skip
        columns[heading] = [_number(getattr(r, attribute)) for r in results]
    columns["speed"] = [_relative(r.ratio, r.baseline) for r in results]
    columns["of the best peer"] = [_relative(r.ratio_to_best_peer, r.best_peer) for r in results]
    for counter in _in_order(c for r in results for c in r.counters):
        columns[counter] = [_number(r.counters.get(counter)) for r in results]
    columns["target"] = ["; ".join([*_verdicts(r), *_verdicts(again.get(id(r)), "of the other: ")]) for r in results]
    columns["data"] = [_data_of_both(r, again.get(id(r))) for r in results]
    return _table(name, columns)


def _beside(results: Sequence[Result]) -> tuple[list[Result], dict[int, Result]]:
    """Return (results with a row of their own, the other timing of such a result by its id)."""

    def place(result: Result, provider: str) -> tuple[Any, ...]:
        return provider, result.num_ranks, *result.params.items()

    firsts = timed_again(results)
    rows = {place(r, r.provider): r for r in results}
    again = {}
    for each in results:
        row = rows.get(place(each, firsts[each.provider])) if each.provider in firsts else None
        if row is not None:
            again[id(row)] = each
    beside = {id(each) for each in again.values()}
    return [each for each in results if id(each) not in beside], again


def _matrix(name: str, provider: str, results: Sequence[Result], axes: Sequence[str]) -> Table:
    rows, across = (_in_order(r.params[axis] for r in results) for axis in axes)
    results = [r for r in results if r.provider == provider]
    with_bytes = all(r.gb_per_s is not None or r.error or r.skipped for r in results)
    cells = {
        (r.params[axes[0]], r.params[axes[1]]): "WRONG" if r.error else _number(r.gb_per_s if with_bytes else r.time_us)
        for r in results
    }
    columns = {f"{axes[0]} \\ {axes[1]}": [str(each) for each in rows]}
    for each in across:
        columns[str(each)] = [cells.get((row, each), NO_NUMBER) for row in rows]
    return _table(f"{name}: {provider}, {'GB/s' if with_bytes else 'us'}", columns)


def _table(title: str, columns: Mapping[str, Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    shown = {k: v for k, v in columns.items() if any(text not in ("", NO_NUMBER) for text in v)}
    table = Table(
        title=Text(title, no_wrap=True, overflow="ignore"),
        title_justify="left",
        box=None,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for heading in shown:
        left = heading in ("provider", "target", "data")
        table.add_column(Text(heading), justify="left" if left else "right", overflow="fold")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*(_coloured(text) for text in row))
    return table


def _coloured(text: str) -> Any:
    from rich.text import Text

    style = "bold red" if "WRONG" in text or "MISSED" in text else "dim" if text.startswith("skipped") else ""
    return Text(text, style=style)


def _number(value: float | None) -> str:
    return NO_NUMBER if value is None else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _relative(value: float | None, other: str) -> str:
    return NO_NUMBER if value is None else f"{value:.3g} x {other}"


def _verdicts(result: Result | None, prefix: str = "") -> list[str]:
    return [prefix + _verdict(each.reached, str(each)) for each in (result.targets if result else ())]


def _time(result: Result) -> str:
    return "WRONG" if result.error else _number(result.time_us)


def _verdict(reached: bool | None, text: str) -> str:
    return f"{text}: {'not measured' if reached is None else 'reached' if reached else 'MISSED'}"


def _data(result: Result) -> str:
    if result.skipped:
        return f"skipped: {result.skipped}"
    if result.error:
        return f"WRONG: {result.error}"
    return "right" if result.verified else "not checked"


def _data_of_both(result: Result, other: Result | None) -> str:
    """What is to be said of the data of a row: of the other timing, too, where that is something else."""
    own, its = _data(result), _data(other) if other else ""
    return own if its in ("", own) else f"{own}; {_TIMES[other.timer].removesuffix(' us')}: {its}" if other else own


def _footer(report: Report) -> str:
    machine, run = report.machine, report.run
    gpus = f"{machine['gpus']} x {machine['gpu']}, driver {machine['driver']}" if machine["gpus"] else "no GPU"
    lines = [
        f"{machine['cpu']}, {machine['usable_cores']} cores, load {machine['load_average_1min']:g}; {gpus}; "
        f"torch {machine['versions']['torch']}, triton {machine['versions']['triton']}; {machine['date']}",
        f"{len(report.results)} results in {run['seconds']:g} s; {len(report.errors)} wrong, "
        f"{len(report.missed)} with a missed target",
    ]
    if not machine["gpus"] and machine["load_average_1min"] > machine["usable_cores"]:
        lines.append("the machine was busy: times on the CPU are too long")
    return "\n".join(lines)


def _in_order(values: Any) -> list[Any]:
    return list(dict.fromkeys(values))
