"""Reports as pictures: time, bandwidth and ratio to the best peer against a numeric axis; needs matplotlib."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from iris_core.bench.results import timed_again
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from iris_core.bench.results import Report, Result

FORMATS = ("png", "svg")
_PANELS: tuple[tuple[str, Callable[[Result], float | None], bool], ...] = (
    ("time (us)", lambda result: result.time_us, True),
    ("bus bandwidth (GB/s)", lambda result: result.bus_gb_per_s, False),
    ("bandwidth (GB/s)", lambda result: result.gb_per_s if result.bus_gb_per_s is None else None, False),
    ("TFLOP/s", lambda result: result.tflop_per_s, False),
    ("speed, of the best peer's", lambda result: result.ratio_to_best_peer, False),
)
"""Title, value, and whether the scale is logarithmic."""


class _Picture(NamedTuple):
    benchmark: str
    num_ranks: int
    others: tuple[tuple[str, Any], ...]  # the values of the axes that are not drawn
    results: list[Result]


def plot(report: Report, folder: str | pathlib.Path, *, axis: str = "", style: str = "png") -> list[pathlib.Path]:
    """Draw a report: a file for each benchmark, number of ranks, and point of the other axes.

    Args:
        report: the results.
        folder: for the files; it is made.
        axis: what to draw against; by default the first axis that has several numbers.
        style: one of FORMATS.

    Returns:
        The files.

    Raises:
        BenchmarkError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchmarkError("plots need matplotlib: pip install 'iris-core[plot]'") from None
    if style not in FORMATS:
        raise BenchmarkError(f"{style!r} is no format of plots; there are {', '.join(FORMATS)}")
    out = pathlib.Path(folder)
    files = []
    for picture in _pictures(report, axis):
        against = axis or _numeric_axis(picture.results)
        panels = [panel for panel in _PANELS if any(panel[1](each) is not None for each in picture.results)]
        looks = _looks(picture.results)
        figure = Figure(figsize=(7, 3.2 * len(panels) + 0.08 * len(looks)), layout="constrained")
        FigureCanvasAgg(figure)
        for number, (title, value, logarithmic) in enumerate(panels):
            axes = figure.add_subplot(len(panels), 1, number + 1)
            _draw(axes, picture.results, against, value, looks)
            axes.set_xscale("log", base=2)
            if logarithmic:
                axes.set_yscale("log")
            if "peer" in title:
                axes.axhline(1.0, color="grey", linewidth=0.8)
            axes.set_xlabel(against)
            axes.set_ylabel(title)
            axes.grid(visible=True, which="major", linewidth=0.3)
        lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
        shown = [name for name in looks if name in lines]
        figure.legend([lines[name] for name in shown], shown, fontsize="small", ncols=3, loc="outside lower center")
        figure.suptitle(_title(picture, report))
        out.mkdir(parents=True, exist_ok=True)
        words = [picture.benchmark, *([f"{picture.num_ranks}-ranks"] * bool(picture.num_ranks))]
        words += [f"{name}-{each}" for name, each in picture.others]
        file = out / (re.sub(r"[^\w.-]+", "_", "-".join(words)) + f".{style}")
        # text stays text, and the same results give the same file
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "iris"}):
            figure.savefig(file, format=style, dpi=120, metadata={"Date": None} if style == "svg" else None)
        files.append(file)
    if not files:
        raise BenchmarkError(
            f"there is nothing to draw against {axis!r}" if axis else "no benchmark has an axis with several numbers"
        )
    return files


def _pictures(report: Report, axis: str) -> Iterator[_Picture]:
    """The results that belong into one picture."""
    by_benchmark: dict[tuple[str, int], list[Result]] = {}
    for each in report.results:
        if each.time_us is not None:
            by_benchmark.setdefault((each.benchmark, each.num_ranks), []).append(each)
    for (benchmark, num_ranks), results in by_benchmark.items():
        against = axis or _numeric_axis(results)
        if not against or not all(_is_number(each.params.get(against)) for each in results):
            continue
        by_others: dict[tuple[tuple[str, Any], ...], list[Result]] = {}
        for each in results:
            others = tuple((name, value) for name, value in each.params.items() if name != against)
            by_others.setdefault(others, []).append(each)
        for others, group in by_others.items():
            yield _Picture(benchmark, num_ranks, others, group)


def _numeric_axis(results: Sequence[Result]) -> str:
    """The first axis with several values, all of them numbers; empty if there is none."""
    for name in results[0].params:
        values = {each.params.get(name) for each in results}
        if len(values) > 1 and all(_is_number(value) for value in values):
            return name
    return ""


def _looks(results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """How each provider's line looks: one that was timed in two ways has one colour, and is dashed the second time."""
    firsts = timed_again(results)
    colours: dict[str, str] = {}
    looks = {}
    for name in dict.fromkeys(each.provider for each in results):
        first = firsts.get(name, name)
        colour = colours.setdefault(first, f"C{len(colours)}")
        looks[name] = {"color": colour, "linestyle": "-" if first == name else "--"}
    return looks


def _draw(
    axes: Any,
    results: Sequence[Result],
    against: str,
    value: Callable[[Result], float | None],
    looks: dict[str, dict[str, Any]],
) -> None:
    for provider, look in looks.items():
        points = sorted(
            (each.params[against], found)
            for each in results
            if each.provider == provider and (found := value(each)) is not None
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker=".", linewidth=1, label=provider, **look)


def _title(picture: _Picture, report: Report) -> str:
    where = report.machine.get("gpu") if report.run.get("device") == "cuda" else report.machine.get("cpu")
    on = f"{picture.num_ranks} x {where}" if picture.num_ranks else str(where)
    others = "".join(f", {name} {value}" for name, value in picture.others)
    return f"{picture.benchmark}{others}\n{on}, {report.machine.get('date', '')[:10]}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
