"""What a file of benchmarks needs to be a program: options, selection, output, exit status."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from iris_core.bench.options import RunOptions
from iris_core.bench.registry import matrices, registered
from iris_core.errors import IrisError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.bench.results import Report


def parser(about: str | None, *, ranks: int = 1, device: str | None = None, out: str = "") -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share.

    Args:
        about: the program's description.
        ranks: default number of ranks.
        device: default device; None leaves it to `Iris`.
        out: default file of the results; empty writes none.
    """
    where = device or "a GPU where one is usable"
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--ranks", type=int, default=ranks, help=f"number of ranks (default {ranks})")
    made.add_argument("--device", choices=("cpu", "cuda"), default=device, help=f"default: {where}")
    made.add_argument("--allocator", default="auto", help="allocator by name (default: auto)")
    made.add_argument("--backend", default="auto", help="device backend by name (default: auto)")
    made.add_argument("--heap-size", default="1GiB", help="heap of each rank (default 1GiB)")
    made.add_argument("--only", default="", metavar="REGEX", help="benchmarks whose names match")
    made.add_argument("--quick", action="store_true", help="fewer points")
    made.add_argument("--rounds", type=int, default=7, help="rounds, where a benchmark does not say (default 7)")
    made.add_argument("--limit", type=float, default=600, metavar="S", help="bound of each rank (default 600)")
    made.add_argument("--out", default=out, metavar="FILE", help=f"JSON of the results (default {out or 'none'})")
    made.add_argument("--enforce", action="store_true", help="a missed target gives exit status 1 too")
    return made


def options_from(args: argparse.Namespace) -> RunOptions:
    """Return the options that `parser` has parsed.

    Raises:
        BenchmarkError: a number is out of range.
    """
    return RunOptions(
        num_ranks=args.ranks,
        device=args.device,
        allocator=args.allocator,
        backend=args.backend,
        heap_size=args.heap_size,
        quick=args.quick,
        rounds=args.rounds,
        limit_s=args.limit,
    )


def finish(report: Report, *, out: str = "", enforce: bool = False) -> int:
    """Print a report, write its JSON, and return the exit status.

    Args:
        report: the results.
        out: file of the JSON; empty writes none.
        enforce: whether a missed target counts as failure.

    Returns:
        1 if a provider's data was wrong, or, with `enforce`, a target was missed or could not be measured; else 0.
    """
    from iris_core.bench.table import show

    show(report, matrices())
    if out:
        print(f"written to {report.write(out)}")
    unreached = enforce and any(each.reached is not True for result in report.results for each in result.targets)
    return int(bool(report.errors) or unreached)


def main(
    name: str,
    about: str | None,
    *,
    source: str,
    out: str = "",
    ranks: int = 1,
    device: str | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Be a program: parse the options, run the benchmarks of a file, print, write.

    Args:
        name: of the report.
        about: the program's description.
        source: the file, `__file__`.
        out: default file of the results.
        ranks: default number of ranks.
        device: default device; None leaves it to `Iris`.
        argv: the arguments; sys.argv's by default.

    Returns:
        The exit status: see `finish`; 2 where the run could not be made.
    """
    from iris_core.bench.session import run

    args = parser(about, ranks=ranks, device=device, out=out).parse_args(argv)
    try:
        report = run(registered(source=source, pattern=args.only), options_from(args), name=name)
    except IrisError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return finish(report, out=args.out, enforce=args.enforce)
