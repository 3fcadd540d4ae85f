"""`iris bench`: compare the results of benchmarks, which are programs (docs/benchmarks.md)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("bench", help="compare results of benchmarks")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = "exit status 1 if anything became slower or wrong, 2 if a file cannot be read"
    comparing = actions.add_parser("compare", help=f"compare two results; {status}")
    comparing.add_argument("old", help="JSON of the results to measure against")
    comparing.add_argument("new", help="JSON of the new results")
    comparing.add_argument("--tolerance", type=float, default=5.0, metavar="PERCENT", help="default: 5")
    comparing.add_argument("--all", action="store_true", help="also list what has not changed")


def run(args: argparse.Namespace) -> int:
    """Compare; see `iris bench compare --help` for the exit status."""
    from iris_core.bench import Report
    from iris_core.bench.compare import REGRESSIONS, VERDICTS, compare, differences
    from iris_core.cli._output import print_table
    from iris_core.errors import BenchmarkError

    try:
        old, new = Report.read(args.old), Report.read(args.new)
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
