"""`iris demo`: multi-rank programs that show the main job and check themselves."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from iris_core.cli._arguments import check, choose_plugins
from iris_core.cli._output import print_json, print_table
from iris_core.device.targets import num_gpus
from iris_core.errors import ArgumentError
from iris_core.settings import nearest, sizes_of
from iris_core.types import Demo, DemoResult

if TYPE_CHECKING:
    import argparse

    from iris_core import Iris

    Row = dict[str, Any]


DEFAULT_RANKS = 4
BETWEEN = "between-nodes"


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("demo", help="run multi-rank programs on this machine and check their results")
    parser.add_argument("--ranks", type=int, default=None, help=f"number of ranks (default {DEFAULT_RANKS})")
    parser.add_argument("--nodes", metavar="NxR", help="as if on N machines of R ranks each: 2x2")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this one only; repeatable")
    parser.add_argument("--device", default=None, help="cpu or cuda (default: GPUs where there are any)")
    parser.add_argument("--backend", default="auto", help="device backend (default: auto)")
    parser.add_argument("--allocator", default="auto", help="allocator (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demonstrations; 0 if every result is right, 1 otherwise."""
    settings, ranks = check(args)
    ranks, device, note = choose_ranks(ranks, settings.device)
    plan = choose_plugins(settings, device)
    sizes = sizes_of(settings.nodes) if settings.nodes else []
    names = plan.backend.info.demos if plan.backend.info else frozenset()
    if not names:
        raise ArgumentError(f"backend {plan.backend.name!r} names no demonstrations; try --backend triton")
    names |= {BETWEEN} if sizes else set()
    if unknown := [name for name in args.only if name not in names]:
        raise ArgumentError(f"--only: there is no {unknown[0]!r}{nearest(unknown[0], names)}")
    import iris_core
    from iris_core.world.rendezvous import VARIABLE

    choice = {"device": device, "backend": args.backend, "allocator": args.allocator}
    print("starting ranks ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    where: Any = {"environ": {VARIABLE: settings.nodes}, "torch_distributed": True} if sizes else {}
    per_rank = iris_core.run(_on_rank, ranks, choice, tuple(args.only), sizes, **where)
    seconds = time.perf_counter() - start
    rows = merge([rows for rows, _ in per_rank])
    explanation, status = per_rank[0][1], int(not all(row["ok"] for row in rows))
    if args.json:
        documents = [row | {"error": row["error"] if math.isfinite(row["error"]) else None} for row in rows]
        print_json({"rows": documents, "seconds": seconds, "choice": explanation, "note": note})
        return status
    headings = ("DEMO", "ABOUT", "RANKS", "BACKEND", "ALLOCATOR", "DEVICE", "TIME", "ERROR", "ALLOWED", "RESULT")
    table = []
    for row in rows:
        about = [str(row[key]) for key in ("title", "detail", "ranks", "backend", "allocator", "device")]
        numbers = f"{row['time_s']:.2f} s", f"{row['error']:.1e}", f"{row['tolerance']:.0e}"
        table.append((*about, *numbers, "right" if row["ok"] else "WRONG"))
    print_table(headings, table, title="iris demo")
    print(f"every result was checked against torch on one process; {seconds:.1f} s in all, start included")
    print(explanation + (f"\nnote: {note}" if note else ""))
    return status


def choose_ranks(ranks: int | None, device: str | None) -> tuple[int, str | None, str]:
    """Return the number of ranks, the device, and a note where the GPUs are not used as one might expect.

    Ranks that share a GPU take turns on it, waiting included: that is slow and has to be asked for (`--device cuda`).
    """
    gpus = 0 if device == "cpu" else num_gpus()
    on_gpus = gpus > 1 if device is None else not device.startswith("cpu")
    wanted = ranks or (max(1, min(gpus, DEFAULT_RANKS)) if on_gpus else DEFAULT_RANKS)
    if device is None:
        if 1 < gpus >= wanted:
            return wanted, None, ""
        note = f"{wanted} ranks run on the CPU, for torch sees {gpus} GPUs; with --device cuda ranks share them"
        return wanted, "cpu", note if gpus else ""
    shared = on_gpus and (0 < gpus < wanted or (wanted > 1 and ":" in device))
    return wanted, device, "several ranks share a GPU and take turns on it: the times mean little" if shared else ""


def merge(per_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """Make one row per demonstration out of every rank's rows: the worst error, the longest time."""
    merged = []
    for rows in zip(*per_rank, strict=True):
        worst = max((row["error"] for row in rows), key=lambda each: (math.isnan(each), each))
        slowest, ok = max(row["time_s"] for row in rows), all(row["ok"] for row in rows)
        merged.append(rows[0] | {"time_s": slowest, "error": worst, "ok": ok})
    return merged


def _on_rank(choice: dict[str, Any], only: Sequence[str], sizes: Sequence[int]) -> tuple[list[Row], str]:
    """Run the backend's demonstrations, in each of the nodes of these sizes, and then collectives between nodes."""
    from iris_core import Iris

    group = None
    if sizes:
        import torch.distributed as dist

        ends = itertools.accumulate(sizes)
        nodes = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
        group, _ = dist.new_subgroups_by_enumeration(nodes)  # type: ignore[no-untyped-call]
    with Iris("64MiB", group=group, **choice) as ctx:
        demos: Sequence[Demo] = getattr(ctx.backend, "demos", tuple)()
        rows = [_row(ctx, demo) for demo in demos if not only or demo.name in only]
        explanation = ctx.explain()
    if sizes and (not only or BETWEEN in only):
        with Iris("64MiB", **choice) as ctx:
            rows.append(_row(ctx, Demo(BETWEEN, "collectives of all nodes", _between_nodes)))
    return rows, explanation


def _row(ctx: Iris, demo: Demo) -> Row:
    if ctx.cur_rank == 0:
        print(f"running {demo.title} ...", file=sys.stderr, flush=True)
    about = {"ranks": ctx.num_ranks, **ctx.plugin_names, "device": ctx.device}
    start = time.perf_counter()
    with ctx.scope():
        result = demo.run(ctx)
    seconds = time.perf_counter() - start
    about |= {"name": demo.name, "title": demo.title, "time_s": seconds, "ok": result.ok}
    return about | dataclasses.asdict(result)


def _between_nodes(ctx: Iris) -> DemoResult:
    """Compare collectives of all nodes with sums and concatenations of what all ranks draw alike."""
    import torch

    size, rank, count = ctx.num_ranks, ctx.cur_rank, 4096
    every = torch.randint(100, (size, size, count), generator=torch.Generator().manual_seed(0)).float().to(ctx.device)
    mine, total = every[rank].contiguous(), every.sum(0)
    wanted = {"all_reduce": total, "reduce_scatter": total[rank], "all_gather": every, "all_to_all": every[:, rank]}
    error = 0.0
    for op, right in wanted.items():
        out = torch.empty_like(right, memory_format=torch.contiguous_format)
        getattr(ctx.ccl, op)(out, mine)
        error = max(error, float((out - right).abs().max()))
    return DemoResult(error, 0.0, f"{', '.join(wanted)} of {count * size * 4 >> 10} KiB on {ctx.num_nodes} nodes")
