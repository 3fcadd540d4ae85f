"""`iris demo`: multi-rank programs that show the main job and check themselves."""

from __future__ import annotations

import json
import math
import multiprocessing
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse

    from rich.progress import TaskID

DEFAULT_RANKS = 4


@dataclass(frozen=True)
class Row:
    """One demonstration as the table shows it.

    Attributes:
        name: short name of the demonstration.
        title: one line about it.
        ranks: number of ranks.
        backend: device backend.
        allocator: allocator.
        device: device of rank 0.
        time_s: seconds of the slowest rank.
        error: largest error of any rank.
        tolerance: what was allowed.
        detail: one line about the problem.
        ok: whether every rank's result is right.
    """

    name: str
    title: str
    ranks: int
    backend: str
    allocator: str
    device: str
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

    ranks, device, note = choose_ranks(args.ranks, args.device)
    messages = multiprocessing.get_context("spawn").Queue()
    choice = {"device": device, "backend": args.backend, "allocator": args.allocator}
    start = time.perf_counter()
    with _Display(messages, quiet=args.json):
        per_rank = iris_core.run(_rank_main, ranks, choice, tuple(args.only), messages)
    seconds = time.perf_counter() - start
    rows = merge([rows for rows, _ in per_rank])
    explanation = per_rank[0][1]
    if args.json:
        documents = [asdict(row) for row in rows]
        for each in documents:
            if not math.isfinite(each["error"]):
                each["error"] = None  # JSON has no NaN
        document = {"rows": documents, "seconds": seconds, "choice": explanation, "note": note}
        print(json.dumps(document, indent=2))
    else:
        _print(rows, seconds, explanation, note)
    return 0 if all(row.ok for row in rows) else 1


def choose_ranks(ranks: int | None, device: str | None) -> tuple[int, str | None, str]:
    """Choose ranks and device where the user did not.

    Ranks that share a GPU take turns on it, waiting included: that is slow and has to be asked for (`--device cuda`).

    Returns:
        (ranks, device, note): the note says where the GPUs are not used as one might expect; empty if they are.
    """
    if ranks is not None and ranks < 1:
        raise SystemExit("iris demo: --ranks must be at least 1")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is not None and device.startswith("cpu"):
        return ranks or DEFAULT_RANKS, device, ""
    if device is not None:
        ranks = ranks or max(1, min(gpus, DEFAULT_RANKS))
        shared = 0 < gpus < ranks or (ranks > 1 and ":" in device)
        return ranks, device, "several ranks share a GPU and take turns on it: the times mean little" if shared else ""
    if gpus == 0:
        return ranks or DEFAULT_RANKS, "cpu", ""
    if gpus == 1 or (ranks or 0) > gpus:
        wanted = ranks or DEFAULT_RANKS
        few = "is only one GPU" if gpus == 1 else f"are only {gpus} GPUs"
        return wanted, "cpu", f"{wanted} ranks run on the CPU, because there {few}; with --device cuda they share"
    return ranks or min(gpus, DEFAULT_RANKS), None, ""


def merge(per_rank: list[list[Row]]) -> list[Row]:
    """Make one row per demonstration out of every rank's rows: the worst error, the longest time."""
    merged = []
    for rows in zip(*per_rank, strict=True):
        errors = [row.error for row in rows]
        values = asdict(rows[0])
        values["error"] = math.nan if any(math.isnan(e) for e in errors) else max(errors)
        values["time_s"] = max(row.time_s for row in rows)
        values["ok"] = all(row.ok for row in rows)
        merged.append(Row(**values))
    return merged


def _rank_main(choice: dict[str, Any], only: tuple[str, ...], messages: Any) -> tuple[list[Row], str]:
    """One rank: run the demonstrations that the backend brings."""
    from iris_core import Iris
    from iris_core.errors import UnsupportedError

    rows = []
    with Iris("64MiB", **choice) as ctx:
        offered = getattr(ctx.backend, "demos", None)
        if offered is None:
            raise UnsupportedError(f"backend {ctx.backend.info.name!r} brings no demonstrations; try --backend triton")
        demos = list(offered())
        unknown = set(only) - {demo.name for demo in demos}
        if unknown:
            names = ", ".join(demo.name for demo in demos)
            raise UnsupportedError(f"no demonstration is called {', '.join(sorted(unknown))}; there are: {names}")
        for demo in demos:
            if only and demo.name not in only:
                continue
            report = _reporter(messages, demo.title) if ctx.cur_rank == 0 else _no_report
            report(0.0)
            start = time.perf_counter()
            with ctx.scope():
                result = demo.run(ctx, report)
            seconds = time.perf_counter() - start
            used = ctx.plugin_names
            rows.append(
                Row(
                    demo.name, demo.title, ctx.num_ranks, used["backend"], used["allocator"], ctx.device,
                    seconds, result.error, result.tolerance, result.detail, result.ok,
                )
            )  # fmt: skip
            report(1.0)
        return rows, ctx.explain()


def _reporter(messages: Any, title: str) -> Any:
    return lambda done: messages.put((title, float(done)))


def _no_report(done: float) -> None:
    """Ranks other than 0 do not report."""


class _Display:
    """Shows progress while the ranks work: bars on a terminal, a line per program elsewhere."""

    def __init__(self, messages: Any, *, quiet: bool) -> None:
        self._messages = messages
        self._quiet = quiet
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._messages.put(None)
        self._thread.join(5)
        self._messages.close()

    def _listen(self) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

        console = Console(stderr=True)
        if self._quiet or not console.is_terminal:
            self._plain()
            return
        columns = (SpinnerColumn(), *Progress.get_default_columns()[:2], TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            first = progress.add_task("starting ranks", total=None)
            tasks: dict[str, TaskID] = {}
            while (message := self._messages.get()) is not None:
                progress.update(first, visible=False)
                title, done = message
                if title not in tasks:
                    tasks[title] = progress.add_task(title, total=1.0)
                progress.update(tasks[title], completed=done)

    def _plain(self) -> None:
        seen = set()
        if not self._quiet:
            print("starting ranks ...", file=sys.stderr, flush=True)
        while (message := self._messages.get()) is not None:
            title, _ = message
            if title not in seen and not self._quiet:
                print(f"running: {title} ...", file=sys.stderr, flush=True)
            seen.add(title)


def _print(rows: list[Row], seconds: float, explanation: str, note: str) -> None:
    from iris_core.cli._output import print_table

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
