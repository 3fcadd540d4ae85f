"""`iris tune`: measure collectives, or fused operations, on this machine, so that the fastest algorithm is chosen."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.dispatch.tables import Entry
    from iris_core.tuning.tuner import Tuned

EXAMPLES = """\
  iris tune                                   all collectives on all GPUs, 1 KiB to 1 GiB, into the cache
  iris tune --ranks 4 --op all_reduce         one collective, for groups of four
  iris tune --device cpu --ranks 2 --max 64KiB --out table.json
  iris tune --ops --limit 1500                fused operations: weights of large models, for 25 minutes at most
  iris tune --ops --backend gluon             the same, with the algorithms for Hopper
  iris tune --ops --op matmul_reduce_scatter --shape 4096x28672x8192
"""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser(
        "tune",
        help="measure collectives or fused operations on this machine, so that the fastest algorithm is chosen",
        description="Measure every algorithm of every collective (with --ops: of every fused operation) that this "
        "machine can run, with the launches that it offers, on data that is checked, and write a table from which "
        "ctx.ccl (ctx.ops) chooses: docs/collectives.md, docs/ops.md. What is measured again replaces what the table "
        "says of it. Exit status 1 if an algorithm delivered wrong data.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ops", action="store_true", help="fused operations (ctx.ops) instead of collectives")
    parser.add_argument(
        "--ranks", type=int, default=None, help="ranks; the table is for groups of so many (default: all GPUs)"
    )
    parser.add_argument("--op", action="append", default=[], metavar="NAME", help="this operation only; repeatable")
    parser.add_argument(
        "--dtype", action="append", default=[], metavar="NAME",
        help="element type (default bfloat16); repeatable: of collectives, what the first one gives counts for all "
        "that are not named; of fused operations, tf32 is float32 where TF32 is allowed",
    )  # fmt: skip
    parser.add_argument("--min", default=None, metavar="SIZE", help="smallest buffer of collectives (default 1KiB)")
    parser.add_argument("--max", default=None, metavar="SIZE", help="largest buffer of collectives (default 1GiB)")
    parser.add_argument("--factor", type=int, default=None, help="from one of their sizes to the next (default 2)")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="MxNxK",
        help="of fused operations: M rows times a weight of N x K that the ranks divide; repeatable "
        "(default: 512, 2048 and 8192 rows, weights of 11008x4096, 14336x4096 and 28672x8192)",
    )  # fmt: skip
    parser.add_argument(
        "--limit", type=float, default=3600, metavar="S",
        help="no point is begun after so many seconds; the table has what was measured until then (default 3600)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None, help="default: GPUs where there are two")
    parser.add_argument("--allocator", default="auto", help="allocator by name (default: auto)")
    parser.add_argument("--backend", default="auto", help="device backend by name (default: auto)")
    parser.add_argument("--out", default="", metavar="FILE", help="the table (default: in IRIS_CACHE_DIR)")


def run(args: argparse.Namespace) -> int:
    """Measure and write; 1 if an algorithm was wrong."""
    from iris_core.bench import RunOptions
    from iris_core.dispatch.tables import file_name, merged, versions, write_table
    from iris_core.settings import load_settings
    from iris_core.world.launch import run as start_ranks

    ranks, device = _ranks(args.ranks, args.device)
    job, wanted, heap = (_operations if args.ops else _collectives)(args, ranks, device)
    _check_out(args.out, device, ranks)
    plugins = {"allocator": args.allocator, "backend": args.backend}
    options = RunOptions(num_ranks=ranks, device=device, heap_size=heap, limit_s=args.limit, **plugins)
    environ = {} if "IRIS_DEVICE_TIMEOUT" in os.environ else {"IRIS_DEVICE_TIMEOUT": str(options.device_timeout_s)}
    with tempfile.TemporaryDirectory() as cache:  # what was not checked yet is for no other program
        environ |= {"IRIS_TUNE": "exhaustive", "IRIS_CACHE_DIR": cache}
        found = start_ranks(job, ranks, wanted, options, environ=environ, torch_distributed=True)[0]
    for line in (*found.passed_over, *(f"WRONG DATA, left out: {each}" for each in found.wrong)):
        print(line, file=sys.stderr)
    if found.entries:
        folder = Path(load_settings().cache_dir) / ("ops" if args.ops else "ccl")
        path = Path(args.out) if args.out else folder / file_name(found.device, ranks)
        entries = merged(_entries_there(path, found.device, ranks), found.entries)
        write_table(path, found.device, ranks, versions(), entries)
        _print_fastest(found.entries)
        print(f"written to {path}")
    else:
        print("iris tune: there is nothing to choose from, no table was written", file=sys.stderr)
    return int(bool(found.wrong))


def _collectives(args: argparse.Namespace, ranks: int, device: str) -> tuple[Callable[..., Tuned], object, int]:
    """What measures, what is wanted, and how large the heap must be."""
    from iris_core.errors import ArgumentError
    from iris_core.tuning.collectives import TuneOptions, tune_on_this_rank

    if args.shape:
        raise ArgumentError("--shape is one of fused operations: give --ops, too, or --min and --max")
    wanted = TuneOptions(
        ops=tuple(args.op) or TuneOptions.ops,
        dtypes=tuple(args.dtype) or TuneOptions.dtypes,
        min_nbytes=TuneOptions.min_nbytes if args.min is None else _nbytes("--min", args.min),
        max_nbytes=TuneOptions.max_nbytes if args.max is None else _nbytes("--max", args.max),
        factor=TuneOptions.factor if args.factor is None else args.factor,
    )
    # two buffers; workspaces lie between them and stay, so twice that, for room in one piece
    return tune_on_this_rank, wanted, max(64 << 20, 4 * wanted.max_nbytes + (256 << 20))


def _operations(args: argparse.Namespace, ranks: int, device: str) -> tuple[Callable[..., Tuned], object, int]:
    """The same of fused operations."""
    from iris_core.errors import ArgumentError
    from iris_core.tuning.matmuls import FusedTuneOptions, tune_operations_on_this_rank

    if strange := [f"--{name}" for name in ("min", "max", "factor") if getattr(args, name) is not None]:
        raise ArgumentError(f"{', '.join(strange)}: fused operations have shapes (--shape), not sizes of buffers")
    wanted = FusedTuneOptions(
        ops=tuple(args.op) or FusedTuneOptions.ops,
        dtypes=tuple(args.dtype) or FusedTuneOptions.dtypes,
        layers=tuple(_shape(text) for text in args.shape) or FusedTuneOptions.layers,
    )
    if device == "cpu" and not args.shape:
        raise ArgumentError("on CPU ranks, the layers of large models take hours: give small ones by --shape")
    return tune_operations_on_this_rank, wanted, max(sample.heap_nbytes for _, sample in wanted.samples(0, ranks))


def _check_out(out: str, device: str, ranks: int) -> None:
    """Refuse a file that the table cannot be written to, before anything is measured."""
    from iris_core.dispatch.tables import read_table
    from iris_core.errors import ArgumentError

    path = Path(out)
    if not out:
        return
    if path.exists():
        table = read_table(path)
        if table.group_size != ranks or (table.device == "cpu") != (device == "cpu"):
            raise ArgumentError(f"--out {out} is a table of {table.group_size} ranks on {table.device}: name another")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise ArgumentError(f"--out {out}: files cannot be made in {path.parent}")


def _entries_there(path: Path, device: str, ranks: int) -> Sequence[Entry]:
    """The entries of the table that is there, if it was measured with as many ranks on this device."""
    from iris_core.dispatch.tables import read_table
    from iris_core.errors import SettingsError

    if not path.exists():
        return ()
    try:
        table = read_table(path)
    except SettingsError as error:
        problem = str(error)
    else:
        if table.measured and (table.device, table.group_size) == (device, ranks):
            return table.entries
        problem = f"the times of {path} are a model's"
        if table.measured:
            problem = f"{path} is of {table.group_size} ranks on {table.device}"
    print(f"iris tune: {problem}; it is replaced", file=sys.stderr)
    return ()


def _nbytes(option: str, text: str) -> int:
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from iris_core.errors import ArgumentError

    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise ArgumentError(f"{option} {text}: a size is a number of bytes or text such as 64MiB") from None


def _shape(text: str) -> tuple[int, int, int]:
    from iris_core.errors import ArgumentError

    sizes = text.lower().split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ArgumentError(f"--shape {text}: a shape is three numbers such as 2048x28672x8192: rows, and N x K")
    m, n, k = map(int, sizes)
    return m, n, k


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


def _print_fastest(entries: Sequence[Entry]) -> None:
    """Print the fastest algorithm of each point."""
    from iris_core.cli._output import print_table

    fastest: dict[tuple[Any, ...], Entry] = {}
    for entry in sorted(entries, key=lambda each: each.seconds):
        fastest.setdefault(entry.point, entry)
    rows = []
    for _, entry in sorted(fastest.items()):
        dim = "" if entry.gather_dim is None else str(entry.gather_dim)
        size = "x".join(map(str, entry.size))
        config = json.dumps(dict(entry.config)) if entry.config else ""
        rows.append((entry.op, dim, entry.dtype, size, entry.algorithm, f"{entry.seconds * 1e6:.2f}", config))
    print_table(("OPERATION", "DIM", "DTYPE", "BYTES OR M x N x K", "ALGORITHM", "US", "CONFIG"), rows)
