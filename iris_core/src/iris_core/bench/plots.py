"""Reports as pictures: time, bandwidth and ratio to the best peer against a numeric axis; needs matplotlib."""

from __future__ import annotations

import pathlib
import re
from typing import TYPE_CHECKING, Any

from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.bench.results import Report, Result

_PANELS = {
    "time_us": "time (us)",
    "bus_gb_per_s": "bus bandwidth (GB/s)",
    "gb_per_s": "bandwidth (GB/s)",
    "tflop_per_s": "TFLOP/s",
    "ratio_to_best_peer": "speed, of the best peer's",
}


def plot(report: Report, folder: str | pathlib.Path, *, axis: str = "", style: str = "png") -> list[pathlib.Path]:
    """Draw a report: a file for each benchmark, number of ranks, and point of the other axes.

    Results are drawn against `axis`, by default the first one that has several numbers; `style` is a format that
    matplotlib writes.  Without matplotlib, or with nothing to draw, it is a `BenchmarkError`.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise BenchmarkError("plots need matplotlib: pip install 'iris-core[plot]'") from None
    where = report.machine.get("gpu") if report.run.get("device") == "cuda" else report.machine.get("cpu")
    files = []
    for (benchmark, num_ranks, against, *others), results in _pictures(report, axis).items():
        ranks = f"{num_ranks}-ranks" if num_ranks else ""
        name = "-".join(filter(None, (benchmark, ranks, *(f"{key}-{value}" for key, value in others))))
        file = pathlib.Path(folder) / (re.sub(r"[^\w.-]+", "_", name) + f".{style}")
        figure = Figure(layout="constrained")
        on = f"{f'{num_ranks} x ' * bool(num_ranks)}{where}, {report.machine.get('date', '')[:10]}"
        figure.suptitle(f"{benchmark}{''.join(f', {key} {value}' for key, value in others)}\n{on}")
        _draw(figure, results, against)
        file.parent.mkdir(parents=True, exist_ok=True)
        # text stays text, and the same results give the same file
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "iris"}):
            figure.savefig(file, dpi=120, metadata={"Date": None} if style == "svg" else None)
        files.append(file)
    if not files:
        raise BenchmarkError(
            f"there is nothing to draw against {axis!r}" if axis else "no benchmark has an axis with several numbers"
        )
    return files


def _pictures(report: Report, axis: str) -> dict[tuple[Any, ...], list[Result]]:
    """The results of each picture, by benchmark, number of ranks, axis that is drawn against, and the other axes."""
    measured: dict[tuple[str, int], list[Result]] = {}
    for each in report.results:
        if each.time_us is not None:
            measured.setdefault((each.benchmark, each.num_ranks), []).append(each)
    pictures: dict[tuple[Any, ...], list[Result]] = {}
    for key, results in measured.items():
        values = {name: [each.params.get(name) for each in results] for name in results[0].params}
        numeric = [name for name, numbers in values.items() if all(map(_is_number, numbers))]
        wanted = [name for name in numeric if name == axis or (not axis and len(set(values[name])) > 1)]
        for against in wanted[:1]:
            for each in results:
                others = [item for item in each.params.items() if item[0] != against]
                pictures.setdefault((*key, against, *others), []).append(each)
    return pictures


def _draw(figure: Any, results: Sequence[Result], against: str) -> None:
    """Draw a panel for each field; the second timing of a provider, "x eager" beside "x", is dashed in its colour."""
    fields = [field for field in _PANELS if any(getattr(each, field) is not None for each in results)]
    if "bus_gb_per_s" in fields:
        fields.remove("gb_per_s")
    providers = list(dict.fromkeys(each.provider for each in results))
    colours = {name: f"C{n}" for n, name in enumerate(dict.fromkeys(p.removesuffix(" eager") for p in providers))}
    figure.set_size_inches(7, 3.2 * len(fields) + 0.08 * len(providers))
    for field, axes in zip(fields, figure.subplots(len(fields), squeeze=False)[:, 0], strict=True):
        for name in providers:
            own = [(each.params[against], getattr(each, field)) for each in results if each.provider == name]
            points = sorted(point for point in own if point[1] is not None)
            look = {"color": colours[name.removesuffix(" eager")], "linestyle": "--" if " eager" in name else "-"}
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", linewidth=1, label=name, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log" if field == "time_us" else "linear")
        axes.set(xlabel=against, ylabel=_PANELS[field])
        axes.grid(visible=True, linewidth=0.3)
    figure.legend(*axes.get_legend_handles_labels(), fontsize="small", ncols=3, loc="outside lower center")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
