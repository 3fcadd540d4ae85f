"""`iris bench`: run files of benchmarks, compare and draw their results."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core.bench import Report

EXAMPLES = """\
  iris bench list benchmarks/*.py
  iris bench run benchmarks/ccl.py --ranks 2,4,8 --only ccl.all_reduce --out new.json
  iris bench compare benchmarks/results/ccl-8.json new.json --tolerance 5
  iris bench plot new.json --out pictures --format svg
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "bench", help="run benchmarks, compare and draw results", epilog=f"examples:\n{EXAMPLES}", formatter_class=raw
    )
    kinds = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = kinds.add_parser("list", help="list the benchmarks of files, with their axes")
    listing.add_argument("files", nargs="+", metavar="FILE")
    running = kinds.add_parser("run", help="run the benchmarks of files", epilog="See docs/benchmarks.md.")
    running.add_argument("files", nargs="+", metavar="FILE")
    from iris_core.bench.suites import add_options

    add_options(running)
    comparing = kinds.add_parser(
        "compare",
        help="compare two results; exit status 1 if anything became slower or wrong, 2 if a file cannot be read",
    )
    comparing.add_argument("old", help="JSON of the results to measure against")
    comparing.add_argument("new", help="JSON of the new results")
    comparing.add_argument("--tolerance", type=float, default=5.0, metavar="PERCENT", help="default: 5")
    comparing.add_argument("--only", default="", metavar="REGEX", help="benchmarks whose names match")
    comparing.add_argument("--provider", default="", metavar="REGEX", help="providers whose names match")
    comparing.add_argument("--all", action="store_true", help="also list what has not changed")
    plotting = kinds.add_parser("plot", help="draw results; needs matplotlib (iris-core[plot])")
    plotting.add_argument("files", nargs="+", metavar="FILE", help="JSON of results")
    plotting.add_argument("--out", default=".", metavar="FOLDER", help="where the pictures go (default: here)")
    plotting.add_argument(
        "--axis", default="", help="axis to draw against (default: the first one with several numbers)"
    )
    plotting.add_argument("--only", default="", metavar="REGEX", help="benchmarks whose names match")
    plotting.add_argument("--provider", default="", metavar="REGEX", help="providers whose names match")
    plotting.add_argument("--format", choices=("png", "svg"), default="png", help="default: png")


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; see `iris bench ACTION --help`."""
    return {"list": _list, "run": _run, "compare": _compare, "plot": _plot}[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from iris_core.bench import load, registered
    from iris_core.bench.suites import suite_of
    from iris_core.cli._output import print_table

    rows = []
    for file in args.files:
        load(file)
        device = suite_of(file).device or "any"
        for each in registered(source=file, pattern="."):
            axes = " ".join(axis.name for axis in each.axes)
            when = "" if each.by_default else "by name only"
            rows.append((each.name, "ranks" if each.ranks else "one process", device, axes, when, each.about))
    print_table(("NAME", "RUNS ON", "DEVICE", "AXES", "WHEN", "ABOUT"), rows)
    return 0


def _run(args: argparse.Namespace) -> int:
    from iris_core.bench import load
    from iris_core.bench.suites import suite_of
    from iris_core.errors import BenchmarkError

    if args.out and len(args.files) > 1:
        raise BenchmarkError("--out takes the results of one file of benchmarks; run the files one by one")
    for file in args.files:
        load(file)
    return max(suite_of(file).run(args) for file in args.files)


def _compare(args: argparse.Namespace) -> int:
    from iris_core.bench import Report
    from iris_core.bench.compare import VERDICTS, compare, differences
    from iris_core.cli._output import print_table
    from iris_core.errors import BenchmarkError

    try:
        old, new = (_selected(Report.read(path), args.only, args.provider) for path in (args.old, args.new))
    except BenchmarkError as error:  # not 1, which says that something became slower
        print(f"iris: {error}", file=sys.stderr)
        return 2
    for line in differences(old, new):
        print(f"not the same: {line}", file=sys.stderr)
    changes = compare(old, new, args.tolerance / 100)
    shown = [each for each in changes if args.all or each.verdict != "same"]
    rows = [
        (
            each.verdict,
            each.benchmark,
            each.provider,
            " ".join(f"{name}={value}" for name, value in each.params.items()),
            str(each.num_ranks),
            "-" if each.old_us is None else f"{each.old_us:.4g}",
            "-" if each.new_us is None else f"{each.new_us:.4g}",
            "-" if each.ratio is None else f"{each.ratio:.3f}",
        )
        for each in sorted(shown, key=lambda each: VERDICTS.index(each.verdict))
    ]
    if rows:
        print_table(("VERDICT", "BENCHMARK", "PROVIDER", "POINT", "RANKS", "OLD US", "NEW US", "OLD / NEW"), rows)
    counts = {verdict: sum(each.verdict == verdict for each in changes) for verdict in VERDICTS}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count) or "nothing to compare")
    return int(any(each.is_regression for each in changes) or not changes)


def _plot(args: argparse.Namespace) -> int:
    from iris_core.bench import Report
    from iris_core.bench.plots import plot

    for path in args.files:
        for file in plot(
            _selected(Report.read(path), args.only, args.provider), args.out, axis=args.axis, style=args.format
        ):
            print(file)
    return 0


def _selected(report: Report, benchmarks: str, providers: str) -> Report:
    """The part of a report that is about some benchmarks and providers."""
    import dataclasses
    import re

    from iris_core.errors import BenchmarkError

    try:
        wanted = re.compile(benchmarks), re.compile(providers)
    except re.error as error:
        raise BenchmarkError(f"not a regular expression: {error}") from error
    rows = (each for each in report.results if wanted[0].search(each.benchmark) and wanted[1].search(each.provider))
    return dataclasses.replace(report, results=tuple(rows))
