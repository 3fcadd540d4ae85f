"""`iris tune`: measure collectives, or fused operations, on this machine, so that the fastest algorithm is chosen."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from iris_core.cli._arguments import check, choose_plugins, file_to_write, seconds, size
from iris_core.device.targets import num_gpus
from iris_core.dispatch import COLLECTIVES, PRODUCTS
from iris_core.errors import ArgumentError, SettingsError
from iris_core.tuning import DTYPES, FUSED_DTYPES, check_names

if TYPE_CHECKING:
    from iris_core.dispatch.tables import Entry


DESCRIPTION = """\
Measure every algorithm of every collective (with --ops: of every fused operation) that this machine can run, with the
launches that it offers, on data that is checked, and write a table from which ctx.ccl (ctx.ops) chooses:
docs/collectives.md, docs/ops.md. What is measured again replaces what the table says of it. Exit status 1 if an
algorithm delivered wrong data.
"""

EXAMPLES = """\
examples:
  iris tune                                   all collectives on all GPUs, 1 KiB to 1 GiB, into the cache
  iris tune --ranks 4 --op all_reduce         one collective, for groups of four
  iris tune --device cpu --ranks 2 --max 64KiB --out table.json
  iris tune --ops --limit 1500                fused operations: weights of large models, for 25 minutes at most
  iris tune --ops --backend gluon             the same, with the algorithms for Hopper
  iris tune --ops --op matmul_reduce_scatter --shape 4096x28672x8192
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    about = "measure collectives or fused operations on this machine, so that the fastest algorithm is chosen"
    parser = subparsers.add_parser("tune", help=about, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    add = parser.add_argument
    add("--ops", action="store_true", help="fused operations (ctx.ops) instead of collectives")
    add("--ranks", type=int, help="ranks; the table is for groups of as many (default: all GPUs)")
    add("--op", action="append", metavar="NAME", help="this operation only; repeatable")
    dtype = "element type (default bfloat16; of fused operations also tf32); the first counts for those not named"
    add("--dtype", action="append", metavar="NAME", help=f"{dtype}; repeatable")
    add("--min", type=size, metavar="SIZE", help="smallest buffer of collectives (default 1KiB)")
    add("--max", type=size, metavar="SIZE", help="largest buffer of collectives (default 1GiB)")
    shape = "of fused operations: M rows times a weight of N x K that the ranks divide (default: those of large models)"
    add("--shape", action="append", default=[], metavar="MxNxK", help=f"{shape}; repeatable")
    limit = "no point is begun after these seconds; the table has what was measured until then (default 3600)"
    add("--limit", type=seconds, default=3600, metavar="S", help=limit)
    add("--device", choices=("cpu", "cuda"), help="default: cuda; cpu measures ranks on the CPU")
    add("--allocator", default="auto", help="allocator by name (default: auto)")
    add("--backend", default="auto", help="device backend by name (default: auto)")
    add("--out", default="", metavar="FILE", help="the table (default: in IRIS_CACHE_DIR)")


def run(args: argparse.Namespace) -> int:
    """Measure and write; 1 if an algorithm was wrong."""
    settings, ranks = check(args, least_ranks=2)
    given = (_layers if args.ops else _sizes)(args)
    ops, dtypes = (PRODUCTS, FUSED_DTYPES) if args.ops else (COLLECTIVES, DTYPES)
    given |= {"ops": check_names("--op", args.op or ops, ops)}
    given |= {"dtypes": check_names("--dtype", args.dtype or ["bfloat16"], dtypes)}
    folder = Path(settings.cache_dir) / ("ops" if args.ops else "ccl")
    file_to_write(args.out or str(folder / "table"))
    ranks, device = _ranks(ranks, settings.device)
    if args.ops and device == "cpu" and not args.shape:
        raise ArgumentError("on CPU ranks, the layers of large models take hours: give small ones by --shape")
    choose_plugins(settings, device)
    import torch

    from iris_core.bench import RunOptions
    from iris_core.bench.runner import on_ranks
    from iris_core.dispatch.choice import file_name
    from iris_core.dispatch.tables import write_table
    from iris_core.tuning.samples import FusedTuneOptions, TuneOptions
    from iris_core.tuning.tuner import tune_on_this_rank

    wanted = FusedTuneOptions(**given) if args.ops else TuneOptions(**given)
    heap = max(point.sample.heap_nbytes for point in wanted.points(0, ranks))
    name = "cpu" if device == "cpu" else torch.cuda.get_device_name(0)
    path = Path(args.out) if args.out else folder / file_name(name, ranks)
    _entries_there(path, name, ranks, must_fit=bool(args.out))
    plugins = {"allocator": args.allocator, "backend": args.backend}
    options = RunOptions(num_ranks=ranks, device=device, heap_size=heap, limit_s=args.limit, **plugins)
    with tempfile.TemporaryDirectory() as cache:  # what was not checked yet is for no other program
        found = on_ranks(tune_on_this_rank, options, wanted, IRIS_TUNE="exhaustive", IRIS_CACHE_DIR=cache)[0]
    for line in (*found.passed_over, *(f"WRONG DATA, left out: {each}" for each in found.wrong)):
        print(line, file=sys.stderr)
    if found.entries:  # another program may have measured meanwhile
        there = _entries_there(path, name, ranks, must_fit=bool(args.out), is_known=True)
        write_table(path, found.device, ranks, there, found.entries)
        print(f"written to {path}")
    else:
        print("iris tune: there is nothing to choose from, no table was written", file=sys.stderr)
    return int(bool(found.wrong))


def _sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Return the smallest and largest buffer of collectives in bytes."""
    if args.shape:
        raise ArgumentError("--shape is one of fused operations: give --ops, too, or --min and --max")
    low, high = (1 << 10 if args.min is None else args.min), (1 << 30 if args.max is None else args.max)
    if not 0 < low <= high:
        raise ArgumentError(f"sizes from {low} to {high} bytes are none: see --min and --max")
    return {"min_nbytes": low, "max_nbytes": high}


def _layers(args: argparse.Namespace) -> dict[str, Any]:
    """Return the shapes of fused operations that are given."""
    if strange := [f"--{name}" for name in ("min", "max") if getattr(args, name) is not None]:
        raise ArgumentError(f"{', '.join(strange)}: fused operations have shapes (--shape), not sizes of buffers")
    for text in args.shape:
        if not re.fullmatch(r"([1-9]\d*)(x[1-9]\d*){2}", text):
            raise ArgumentError(f"--shape {text}: a shape is three numbers such as 2048x28672x8192: rows, and N x K")
    return {"layers": tuple(tuple(map(int, text.split("x"))) for text in args.shape)} if args.shape else {}


def _entries_there(path: Path, device: str, ranks: int, *, must_fit: bool, is_known: bool = False) -> Sequence[Entry]:
    """Return the entries of the table there, if they fit; else it is replaced, or refused where it `must_fit`."""
    from iris_core.dispatch.tables import read_table

    if not path.exists():
        return ()
    try:
        table = read_table(path)
        fits = (table.device, table.group_size) == (device, ranks)
        if fits and table.measured:
            return table.entries
        if must_fit and not fits:
            raise ArgumentError(f"--out {path} is a table of {table.group_size} ranks on {table.device}: name another")
        problem = f"{path} is a model's, or of {table.group_size} ranks on {table.device}"
    except SettingsError as error:
        if must_fit:
            raise
        problem = str(error)
    if not is_known:
        print(f"iris tune: {problem}; it is replaced", file=sys.stderr)
    return ()


def _ranks(ranks: int | None, device: str | None) -> tuple[int, str]:
    if device is not None and device.startswith("cpu"):
        return ranks or 2, "cpu"
    gpus = num_gpus()
    ranks = ranks or max(2, gpus)
    if ranks > gpus or ":" in (device or ""):
        needed = f"{ranks} ranks on {device or 'cuda'} need a GPU each; torch sees {gpus or 'no GPU'} here"
        raise ArgumentError(f"{needed}: --device cpu measures ranks on the CPU")
    return ranks, "cuda"
