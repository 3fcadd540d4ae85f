"""A file of benchmarks as a program: on what it runs by default, its options, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from iris_core.bench.registry import RANKS, RunOptions, parse_axis, registered
from iris_core.bench.results import Report, Result
from iris_core.bench.runner import LATE, run
from iris_core.cli._arguments import choose_plugins, file_to_write
from iris_core.cli._output import print_table
from iris_core.device.targets import num_gpus
from iris_core.errors import BenchmarkError, IrisError
from iris_core.settings import load_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite(RunOptions):
    """A file of benchmarks: how it runs where the user does not say, and the file of its results.

    Device "cuda" is all GPUs, and only if there are enough.  The allocator is one on the suite's device only.
    """

    about: str | None  #: the program's description, `__doc__`
    source: str  #: the file, `__file__`
    min_ranks: int = 1  #: fewest ranks that make sense; on CPUs it is also how many there are
    max_ranks: int | None = None  #: most ranks where the user does not say how many
    #: options that are others on CPU ranks, such as the heap's size
    on_cpu: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    #: file of the JSON, from the source's folder; {ranks} and {allocator} stand for what was used; it is written after
    #: runs of everything on the suite's own device
    results: str = ""

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Parse the arguments (sys.argv's by default), run, print, write; return `finish`'s status, or 2 if not run."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        add_options(parser)
        args = parser.parse_args(argv)
        try:
            options, out = self.options(args), file_to_write(args.out)
            asked = {name: getattr(options, name) for name in ("heap_size", "allocator", "backend", "device")}
            choose_plugins(load_settings(**asked), options.device)
            chosen = registered(source=self.source, pattern=args.only)
            ranks = "-".join(map(str, options.axes.get(RANKS, [options.num_ranks])))
            file = self.results.format(ranks=ranks, allocator=options.allocator)
            with tempfile.TemporaryDirectory() as cache:  # what is chosen must not depend on earlier runs
                options = dataclasses.replace(options, environ={"IRIS_CACHE_DIR": cache, **options.environ})
                report = run(chosen, options, name=pathlib.PurePath(file or self.source).stem)
        except IrisError as error:
            print(f"{parser.prog}: {error}", file=sys.stderr)
            return 2
        is_part = args.only or options.axes.keys() - {RANKS} or args.quick
        if is_part or options.device != self.device or any(LATE in each.skipped for each in report.results):
            file = ""  # a part, or on something else than the file is kept for
        out = out or (file and str(pathlib.Path(self.source).parent / file))
        return finish(report, out=out, enforce=args.enforce, style=args.format)

    def options(self, args: argparse.Namespace) -> RunOptions:
        """Return how to run; a `BenchmarkError` if there are too few GPUs for the ranks, or fewer ranks than needed."""
        names = {each.name for each in dataclasses.fields(RunOptions)} & vars(args).keys()
        given = {name: value for name in names if (value := getattr(args, name)) is not None}
        given["axes"] = axes = dict(parse_axis(text) for text in args.axis)
        if (device := given.get("device", self.device)) != self.device:
            given.setdefault("allocator", "auto")
        gpus = num_gpus() if device == "cuda" else 0
        numbers = axes.get(RANKS, [max(self.min_ranks, min(gpus, self.max_ranks or gpus))])
        if device == "cuda" and (wrong := [each for each in numbers if each not in range(self.min_ranks, gpus + 1)]):
            text = f"{wrong[0]} ranks need as many GPUs, and {self.min_ranks} at least; torch sees {gpus} here"
            raise BenchmarkError(f"{text}. `--device cpu` takes CPU ranks, whose times say nothing about GPUs")
        usual = dict(self.on_cpu) if device == "cpu" else {}
        return dataclasses.replace(self, **usual | given, num_ranks=numbers[0])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks share; those that `RunOptions` has are its fields."""
    add = parser.add_argument
    numbers, as_axis = "numbers of ranks; each is a run of its own", lambda text: f"{RANKS}={text}"
    add("--ranks", dest="axis", action="append", default=[], type=as_axis, metavar="N[,N...]", help=numbers)
    add("--device", choices=("cpu", "cuda"), help="default: what the file says")
    add("--allocator", help="allocator by name")
    add("--backend", help="device backend by name")
    add("--heap-size", metavar="SIZE", help="heap of each rank, such as 1GiB")
    add("--only", default="", metavar="REGEX", help="benchmarks whose names match")
    values = "other values of an axis: 1,2,3 or pow2:1024:65536 or lin:0:100:20; repeatable"
    add("--axis", action="append", default=[], metavar="NAME=VALUES", help=values)
    add("--quick", action="store_true", help="fewer points")
    add("--rounds", type=int, help="rounds, where a benchmark does not say (default 7)")
    add("--limit", type=float, dest="limit_s", metavar="S", help="bound of each rank, in seconds (default 600)")
    add("--format", choices=("console", "json", "csv"), default="console", help="what is printed (default console)")
    add("--out", default="", metavar="FILE", help="file of the results: JSON, or CSV if it ends in .csv")
    add("--enforce", action="store_true", help="a missed target gives exit status 1 too")


def finish(report: Report, *, out: str = "", enforce: bool = False, style: str = "console") -> int:
    """Print a report as "console", "json" or "csv", write it to the file `out` (as CSV if it ends in .csv).

    Return the exit status: 1 if data was wrong, or, with `enforce`, a target was missed or not measured; else 0.
    """
    if style == "console":
        show(report)
    else:
        print(report.to_json() if style == "json" else report.to_csv(), end="")
    if out:
        print(f"written to {report.write(out)}", file=sys.stdout if style == "console" else sys.stderr)
    unreached = enforce and any(each.reached is not True for result in report.results for each in result.targets)
    return int(bool(report.errors) or unreached)


def show(report: Report) -> None:
    """Print a table for each benchmark, without columns that have no content, and the machine."""
    for name, group in itertools.groupby(report.results, lambda each: each.benchmark):
        rows = [_row(each) for each in group]
        headings = [each for each in dict.fromkeys(itertools.chain(*rows)) if any(row.get(each) for row in rows)]
        headings.sort(key=lambda each: each in ("target", "data"))
        print_table(headings, [[row.get(heading) or "-" for heading in headings] for row in rows], title=name)
    machine, run = report.machine, report.run
    gpus = f"{machine['gpus']} x {machine['gpu']}, driver {machine['driver']}" if machine["gpus"] else "no GPU"
    print(
        f"{machine['cpu']}, {machine['usable_cores']} cores, load {machine['load_average_1min']:g}; {gpus}; "
        f"torch {machine['versions']['torch']}, triton {machine['versions']['triton']}; {machine['date']}\n"
        f"{len(report.results)} results in {run['seconds']:g} s; {len(report.errors)} wrong"
    )


def _row(r: Result) -> dict[str, str]:
    data = f"WRONG: {r.error}" if r.error else "right" if r.verified else "not checked"
    row = {
        "ranks": r.num_ranks or None, **r.params, "provider": r.provider, "timer": r.timer, "time us": r.time_us,
        "skew %": r.skew_pct, "GB/s": r.gb_per_s, "bus GB/s": r.bus_gb_per_s, "TFLOP/s": r.tflop_per_s,
        "speed": r.ratio and f"{r.ratio:.3g} x {r.baseline}",
        "of the best peer": r.ratio_to_best_peer and f"{r.ratio_to_best_peer:.3g} x {r.best_peer}",
        **r.counters, "target": "; ".join(map(str, r.targets)),
        "data": f"skipped: {r.skipped}" if r.skipped else data,
    }  # fmt: skip
    return {key: _text(value) for key, value in row.items()}


def _text(value: float | str | None) -> str:
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
