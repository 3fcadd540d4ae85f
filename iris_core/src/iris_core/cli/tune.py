"""`iris tune`: measure the collectives of this machine, so that the fastest is chosen."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core.ccl.tables import Entry

EXAMPLES = """\
  iris tune                                   all operations on all GPUs, 1 KiB to 1 GiB, into the cache
  iris tune --ranks 4 --op all_reduce         one operation, for groups of four
  iris tune --device cpu --ranks 2 --max 64KiB --out table.json
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "tune",
        help="measure the collectives on this machine, so that ctx.ccl chooses the fastest",
        description="Measure every algorithm of every collective that this machine can run, with several launches "
        "each, and write a table from which ctx.ccl chooses (docs/collectives.md). Operations that are measured "
        "again replace what the table says of them. Exit status 1 if an algorithm delivered wrong data.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, default=None, help="ranks; the table is for groups of so many (default: all GPUs)"
    )
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help="this operation only; repeatable")
    parser.add_argument(
        "--dtype", action="append", default=[], metavar="NAME",
        help="element type (default bfloat16); repeatable: what the first one gives counts for all that are not named",
    )  # fmt: skip
    parser.add_argument("--min", default="1KiB", metavar="SIZE", help="smallest buffer (default 1KiB)")
    parser.add_argument("--max", default="1GiB", metavar="SIZE", help="largest buffer (default 1GiB)")
    parser.add_argument("--factor", type=int, default=2, help="from one size to the next (default 2)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the final measurement (default 5)")
    parser.add_argument("--limit", type=float, default=3600, metavar="S", help="bound of the whole (default 3600 s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: GPUs where there are two")
    parser.add_argument("--allocator", default="auto", help="allocator by name (default: auto)")
    parser.add_argument("--backend", default="auto", help="device backend by name (default: auto)")
    parser.add_argument("--out", default="", metavar="FILE", help="the table (default: in IRIS_CACHE_DIR)")


def run(args: argparse.Namespace) -> int:
    """Measure and write; 1 if an algorithm was wrong."""
    from iris_core.bench.options import RunOptions
    from iris_core.ccl.tables import read_table, write_table
    from iris_core.ccl.tuning import TuneOptions, file_name, merged, tune_on_this_rank
    from iris_core.launch import run as start_ranks
    from iris_core.settings import load_settings

    wanted = TuneOptions(
        ops=tuple(args.op) or TuneOptions.ops,
        dtypes=tuple(args.dtype) or TuneOptions.dtypes,
        min_nbytes=_nbytes("--min", args.min),
        max_nbytes=_nbytes("--max", args.max),
        factor=args.factor,
    )
    ranks, device = _ranks(args.ranks, args.device)
    heap = max(64 << 20, 2 * wanted.max_nbytes + (wanted.max_nbytes >> 1) + (1 << 20) * ranks)
    options = RunOptions(
        num_ranks=ranks,
        device=device,
        allocator=args.allocator,
        backend=args.backend,
        heap_size=heap,
        rounds=args.rounds,
        batch_ms=2.0,
        limit_s=args.limit,
    )
    environ = {} if "IRIS_DEVICE_TIMEOUT" in os.environ else {"IRIS_DEVICE_TIMEOUT": str(options.device_timeout_s)}
    found = start_ranks(tune_on_this_rank, ranks, wanted, options, environ=environ)[0]
    for line in (*found.passed_over, *(f"WRONG DATA, left out: {each}" for each in found.wrong)):
        print(line, file=sys.stderr)
    if not found.entries:
        print("iris tune: there is nothing to choose from, no table was written", file=sys.stderr)
        return int(bool(found.wrong))
    name = file_name(found.device, ranks)
    path = Path(args.out) if args.out else Path(load_settings().cache_dir) / "ccl" / name
    old = read_table(path).entries if path.exists() else ()
    write_table(path, found.device, ranks, _versions(), merged(old, found.entries))
    _print(found.entries)
    print(f"written to {path}")
    return int(bool(found.wrong))


def _nbytes(option: str, text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from iris_core.errors import ArgumentError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ArgumentError(f"{option} {text}: a size is a number of bytes or text such as 64MiB") from None


def _ranks(ranks: int | None, device: str | None) -> tuple[int, str]:
    import torch

    from iris_core.errors import ArgumentError

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if gpus > 1 else "cpu"
    if device == "cuda":
        ranks = ranks or gpus
        if not 2 <= ranks <= gpus:
            raise ArgumentError(f"{ranks} ranks need as many GPUs, and two at least; torch sees {gpus} here")
    ranks = ranks or 2
    if ranks < 2:
        raise ArgumentError("a rank alone has nothing to choose: --ranks 2 or more")
    return ranks, device


def _versions() -> dict[str, str]:
    from iris_core.bench import machine

    return {name: version for name, version in machine.versions().items() if version}


def _print(entries: tuple[Entry, ...]) -> None:
    from iris_core.cli._output import print_table

    seen = set()
    rows = []
    for entry in sorted(entries, key=lambda e: (e.op, e.dtype, e.max_nbytes, e.seconds)):
        if (entry.op, entry.dtype, entry.max_nbytes) not in seen:  # the fastest
            seen.add((entry.op, entry.dtype, entry.max_nbytes))
            bound = "any" if entry.max_nbytes == float("inf") else str(entry.max_nbytes)
            launch = json.dumps(dict(entry.config)) if entry.config else ""
            rows.append((entry.op, entry.dtype, bound, entry.algorithm, f"{entry.seconds * 1e6:.2f}", launch))
    print_table(("OPERATION", "DTYPE", "BYTES UP TO", "ALGORITHM", "US", "CONFIG"), rows)
