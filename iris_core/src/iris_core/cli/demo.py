"""`iris demo`: multi-rank programs that show the main job and check themselves."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

DEFAULT_RANKS = 4


@dataclass(frozen=True)
class Row:
    """One demonstration as the table shows it: of the slowest rank, and of the rank with the largest error."""

    name: str
    title: str
    ranks: int
    backend: str
    allocator: str
    device: str  # of rank 0
    time_s: float
    error: float
    tolerance: float
    detail: str
    ok: bool


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("demo", help="run multi-rank programs on this machine and check their results")
    parser.add_argument("--ranks", type=int, default=None, help=f"number of ranks (default {DEFAULT_RANKS})")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this one only; repeatable")
    parser.add_argument("--device", default=None, help="cpu or cuda (default: GPUs where there are any)")
    parser.add_argument("--backend", default="auto", help="device backend (default: auto)")
    parser.add_argument("--allocator", default="auto", help="allocator (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the demonstrations; 0 if every result is right, 1 otherwise."""
    import iris_core
    from iris_core.cli._output import print_json, print_table

    ranks, device, note = choose_ranks(args.ranks, args.device)
    choice = {"device": device, "backend": args.backend, "allocator": args.allocator}
    if not args.json:
        print("starting ranks ...", file=sys.stderr, flush=True)
    start = time.perf_counter()
    per_rank = iris_core.run(_on_rank, ranks, choice, tuple(args.only), args.json)
    seconds = time.perf_counter() - start
    rows = merge([rows for rows, _ in per_rank])
    explanation = per_rank[0][1]
    if args.json:
        documents = [asdict(row) | {"error": row.error if math.isfinite(row.error) else None} for row in rows]
        print_json({"rows": documents, "seconds": seconds, "choice": explanation, "note": note})
        return int(not all(row.ok for row in rows))
    headings = ("DEMO", "ABOUT", "RANKS", "BACKEND", "ALLOCATOR", "DEVICE", "TIME", "ERROR", "ALLOWED", "RESULT")
    table = [
        (
            row.title, row.detail, str(row.ranks), row.backend, row.allocator, row.device, f"{row.time_s:.2f} s",
            f"{row.error:.1e}", f"{row.tolerance:.0e}", "right" if row.ok else "WRONG",
        )
        for row in rows
    ]  # fmt: skip
    print_table(headings, table, title="iris demo")
    print(f"every result was checked against torch on one process; {seconds:.1f} s in all, start included")
    print(explanation)
    if note:
        print(f"note: {note}")
    return int(not all(row.ok for row in rows))


def choose_ranks(ranks: int | None, device: str | None) -> tuple[int, str | None, str]:
    """Return the number of ranks, the device, and a note where the GPUs are not used as one might expect.

    Ranks that share a GPU take turns on it, waiting included: that is slow and has to be asked for (`--device cuda`).
    """
    if ranks is not None and ranks < 1:
        raise SystemExit("iris demo: --ranks must be at least 1")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None and not device.startswith("cpu"):
        ranks = ranks or max(1, min(gpus, DEFAULT_RANKS))
        shared = 0 < gpus < ranks or (ranks > 1 and ":" in device)
        return ranks, device, "several ranks share a GPU and take turns on it: the times mean little" if shared else ""
    if device is not None or gpus == 0:
        return ranks or DEFAULT_RANKS, device or "cpu", ""
    if gpus == 1 or (ranks or 0) > gpus:
        wanted = ranks or DEFAULT_RANKS
        few = "is only one GPU" if gpus == 1 else f"are only {gpus} GPUs"
        return wanted, "cpu", f"{wanted} ranks run on the CPU, because there {few}; with --device cuda they share"
    return ranks or min(gpus, DEFAULT_RANKS), None, ""


def merge(per_rank: Sequence[Sequence[Row]]) -> list[Row]:
    """Make one row per demonstration out of every rank's rows: the worst error, the longest time."""
    merged = []
    for rows in zip(*per_rank, strict=True):
        errors = [row.error for row in rows]
        worst = math.nan if any(map(math.isnan, errors)) else max(errors)
        slowest, ok = max(row.time_s for row in rows), all(row.ok for row in rows)
        merged.append(dataclasses.replace(rows[0], error=worst, time_s=slowest, ok=ok))
    return merged


def _on_rank(choice: dict[str, Any], only: Sequence[str], quiet: bool) -> tuple[list[Row], str]:
    """Run the demonstrations that the backend brings; rank 0 shows on stderr how far they are."""
    from rich.console import Console
    from rich.progress import Progress

    from iris_core import Iris
    from iris_core.errors import UnsupportedError

    rows = []
    with Iris("64MiB", **choice) as ctx:
        offered = getattr(ctx.backend, "demos", None)
        if offered is None:
            raise UnsupportedError(f"backend {ctx.backend.info.name!r} brings no demonstrations; try --backend triton")
        demos = list(offered())
        if unknown := set(only) - {demo.name for demo in demos}:
            names = ", ".join(demo.name for demo in demos)
            raise UnsupportedError(f"no demonstration is called {', '.join(sorted(unknown))}; there are: {names}")
        console = Console(stderr=True)
        hidden = quiet or ctx.cur_rank != 0 or not console.is_terminal
        with Progress(console=console, transient=True, disable=hidden) as progress:
            for demo in demos:
                if only and demo.name not in only:
                    continue
                task = progress.add_task(demo.title, total=1.0)
                start = time.perf_counter()
                with ctx.scope():
                    result = demo.run(ctx, lambda done, task=task: progress.update(task, completed=done))
                seconds = time.perf_counter() - start
                used = ctx.plugin_names
                rows.append(
                    Row(
                        demo.name, demo.title, ctx.num_ranks, used["backend"], used["allocator"], ctx.device,
                        seconds, result.error, result.tolerance, result.detail, result.ok,
                    )
                )  # fmt: skip
        return rows, ctx.explain()
