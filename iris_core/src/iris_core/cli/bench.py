"""`iris bench`: compare results of benchmarks, which are programs (docs/benchmarks.md), and model several nodes."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

from iris_core.cli._output import print_table
from iris_core.errors import BenchmarkError
from iris_core.world.scaling import OPS, SIZES, Level, Machine


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("bench", help="compare results of benchmarks, or model several nodes")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    status = "exit status 1 if anything became slower or wrong, 2 if a file cannot be read"
    comparing = actions.add_parser("compare", help=f"compare two results; {status}")
    comparing.add_argument("old", help="JSON of the results to measure against")
    comparing.add_argument("new", help="JSON of the new results")
    comparing.add_argument("--tolerance", type=float, default=5.0, metavar="PERCENT", help="default: 5")
    comparing.add_argument("--all", action="store_true", help="also list what has not changed")
    modelling = actions.add_parser("model", help="predict collectives and a training step on several nodes")
    default = Machine(1)
    for option, value, what in (
        ("--gpus", default.gpus, "GPUs of a node"),
        ("--node-us", default.node.latency_s * 1e6, "microseconds of an exchange within a node"),
        ("--node-gbs", default.node.bytes_per_s / 1e9, "GB/s that each GPU sends within a node"),
        ("--rail-us", default.rail.latency_s * 1e6, "microseconds of a step between nodes"),
        ("--rail-gbs", default.rail.bytes_per_s / 1e9, "GB/s that each GPU sends between nodes"),
        ("--params", 8e9, "parameters of the model that is trained"),
        ("--layers", 32, "its layers"),
        ("--step-s", 2.46, "seconds that a step computes, the same on any number of nodes"),
    ):
        modelling.add_argument(option, type=type(value), default=value, help=f"{what}; default: {value:.4g}")


def run(args: argparse.Namespace) -> int:
    """Compare results, or model; see `iris bench compare --help` for the exit status."""
    if args.action == "model":
        return _model(args)
    from iris_core.bench import Report
    from iris_core.bench.results import REGRESSIONS, VERDICTS, compare, differences

    if not 0 <= args.tolerance < math.inf:
        raise BenchmarkError(f"--tolerance {args.tolerance:g} must be a number of percent, 0 or above")
    old, new = Report.read(args.old), Report.read(args.new)
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


def _model(args: argparse.Namespace) -> int:
    """Print what the model says of 1 to 128 nodes; a `BenchmarkError` if a constant makes no sense."""
    wrong = [name for name, value in vars(args).items() if isinstance(value, int | float) and not 0 < value < math.inf]
    if wrong:
        raise BenchmarkError(f"--{wrong[0].replace('_', '-')} must be a number above 0")
    levels = Level(args.node_us / 1e6, args.node_gbs * 1e9), Level(args.rail_us / 1e6, args.rail_gbs * 1e9)
    machines = [Machine(1 << power, args.gpus, *levels) for power in range(8)]
    for op in OPS:
        rows = []
        for each in machines:
            times = [f"{each.seconds(op, nbytes) * 1e6:,.0f}" for nbytes in SIZES]
            rates = [f"{each.bus_bytes_per_s(op, SIZES[-1], flat=flat) / 1e9:.0f}" for flat in (False, True)]
            rows.append([str(each.num_nodes), *times, *rates])
        sizes = [f"{nbytes >> 20} MiB, us" for nbytes in SIZES]
        print_table(["nodes", *sizes, "bus GB/s, by levels", "flat"], rows, title=op)
    steps = [each.step_seconds(args.step_s, args.params, args.layers) for each in machines]
    rows = [[str(1 << power), f"{step:.4g}", f"{args.step_s / step:.1%}"] for power, step in enumerate(steps)]
    print_table(["nodes", "seconds", "share that computes"], rows, title="a step of FSDP2")
    return 0
