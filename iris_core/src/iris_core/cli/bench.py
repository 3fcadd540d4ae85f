"""`iris bench`: run files of benchmarks, compare and draw their results."""

from __future__ import annotations

import argparse
import dataclasses
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
    from iris_core.bench.suites import add_options

    raw = argparse.RawDescriptionHelpFormatter
    parser = subparsers.add_parser(
        "bench", help="run benchmarks, compare and draw results", epilog=f"examples:\n{EXAMPLES}", formatter_class=raw
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list the benchmarks of files, with their axes")
    listing.add_argument("files", nargs="+", metavar="FILE")
    running = actions.add_parser("run", help="run the benchmarks of files", epilog="See docs/benchmarks.md.")
    running.add_argument("files", nargs="+", metavar="FILE")
    add_options(running)
    status = "exit status 1 if anything became slower or wrong, 2 if a file cannot be read"
    comparing = actions.add_parser("compare", help=f"compare two results; {status}")
    comparing.add_argument("old", help="JSON of the results to measure against")
    comparing.add_argument("new", help="JSON of the new results")
    comparing.add_argument("--tolerance", type=float, default=5.0, metavar="PERCENT", help="default: 5")
    comparing.add_argument("--all", action="store_true", help="also list what has not changed")
    plotting = actions.add_parser("plot", help="draw results; needs matplotlib (iris-core[plot])")
    plotting.add_argument("files", nargs="+", metavar="FILE", help="JSON of results")
    plotting.add_argument("--out", default=".", metavar="FOLDER", help="where the pictures go (default: here)")
    plotting.add_argument("--axis", default="", help="to draw against (default: the first one with several numbers)")
    plotting.add_argument("--format", choices=("png", "svg"), default="png", help="default: png")
    for each in (comparing, plotting):
        each.add_argument("--only", default="", metavar="REGEX", help="benchmarks whose names match")
        each.add_argument("--provider", default="", metavar="REGEX", help="providers whose names match")
    for action, do in ((listing, _list), (running, _run), (comparing, _compare), (plotting, _plot)):
        action.set_defaults(do=do)


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; see `iris bench ACTION --help`."""
    return int(args.do(args))


def _list(args: argparse.Namespace) -> int:
    from iris_core.bench import load, registered
    from iris_core.bench.suites import suite_of
    from iris_core.cli._output import print_table

    for file in args.files:
        load(file)
    rows = []
    for each in registered(pattern="."):
        device = suite_of(each.source).device or "any"
        when = "" if each.by_default else "by name only"
        where = "ranks" if each.ranks else "one process"
        rows.append((each.name, where, device, " ".join(each.axes), when, each.about))
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
    from iris_core.bench.compare import REGRESSIONS, VERDICTS, compare, differences
    from iris_core.cli._output import print_table
    from iris_core.errors import BenchmarkError

    try:
        old, new = _read(args.old, args), _read(args.new, args)
    except BenchmarkError as error:  # not 1, which says that something became slower
        print(f"iris: {error}", file=sys.stderr)
        return 2
    for line in differences(old, new):
        print(f"not the same: {line}", file=sys.stderr)
    changes = sorted(compare(old, new, args.tolerance / 100), key=lambda each: VERDICTS.index(each.verdict))
    rows = []
    for each in changes:
        if args.all or each.verdict != "same":
            point = " ".join(f"{name}={value}" for name, value in each.result.params.items())
            about = each.verdict, each.result.benchmark, each.result.provider, point, str(each.result.num_ranks)
            times = ("-" if us is None else f"{us:.4g}" for us in (each.old_us, each.new_us))
            rows.append((*about, *times, f"{each.old_us / each.new_us:.3f}" if each.old_us and each.new_us else "-"))
    if rows:
        print_table(("VERDICT", "BENCHMARK", "PROVIDER", "POINT", "RANKS", "OLD US", "NEW US", "OLD / NEW"), rows)
    verdicts = [each.verdict for each in changes]
    print(", ".join(f"{verdicts.count(each)} {each}" for each in VERDICTS if each in verdicts) or "nothing to compare")
    return int(any(each in REGRESSIONS for each in verdicts) or not verdicts)


def _plot(args: argparse.Namespace) -> int:
    from iris_core.bench.plots import plot

    for path in args.files:
        for file in plot(_read(path, args), args.out, axis=args.axis, style=args.format):
            print(file)
    return 0


def _read(path: str, args: argparse.Namespace) -> Report:
    """The part of a report that is about the wanted benchmarks and providers."""
    from iris_core.bench import Report
    from iris_core.bench.registry import is_found

    report = Report.read(path)
    chosen = [each for each in report.results if is_found(args.only, each.benchmark)]
    return dataclasses.replace(report, results=tuple(each for each in chosen if is_found(args.provider, each.provider)))
