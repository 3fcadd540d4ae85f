"""`iris check`: run a program on CPU ranks with the checker on, and print what it finds."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

from iris_core.cli import all_orders
from iris_core.cli._arguments import choose_plugins
from iris_core.cli._output import counted, print_json
from iris_core.cli.timeline import draw
from iris_core.errors import ArgumentError, SettingsError
from iris_core.settings import ORDINARY_CHECKS, load_settings, writable

Row = dict[str, Any]
_PATIENCE_S = 5.0  # from SIGTERM to SIGKILL


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("check", help="run a program on CPU ranks and report races and other mistakes")
    names = ",".join(ORDINARY_CHECKS)
    parser.add_argument("--only", default=names, metavar="NAMES", help="as IRIS_CHECK (default: %(default)s)")
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument("--seeds", type=int, metavar="N", help="run it in N schedules, those of the seeds 0 to N - 1")
    seeds.add_argument("--replay", metavar="SEED", help="run it in the schedule of one seed, or one order, again")
    orders = "run it in all orders of synchronisation, in N runs at most"
    seeds.add_argument("--all-orders", type=int, metavar="N", help=orders)
    parser.add_argument("--json", action="store_true", help="findings as JSON; the program's output on stderr")
    parser.add_argument("--timeline", metavar="FILE", help="write a picture of the findings for Perfetto into FILE")
    parser.add_argument("script", help="the program, a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments").required = False


def run(args: argparse.Namespace) -> int:
    """Run the program; 1 if there are findings, or nothing was checked, else its own status, 1 where a signal ended it.

    In several schedules, its own status is the first one that is not 0, and its output is shown where it is not.
    """
    for option, number in (("--seeds", args.seeds), ("--all-orders", args.all_orders)):
        if number is not None and number < 1:
            raise SettingsError(f"{option} needs a positive number, got {number}")
    only, one = args.only, args.replay is not None
    if not only.strip(" ,"):
        raise SettingsError(f"--only needs at least one of {', '.join(ORDINARY_CHECKS)}")
    if (args.seeds or one or args.all_orders) and "schedules" not in only:
        only = f"{only},schedules"
    try:
        settings = load_settings(check=only, check_seed=args.replay if one else 0, device="cpu")
    except SettingsError as error:
        if not one or "check_seed" not in str(error):
            raise
        known = "a seed, such as 7, or an order that --all-orders has named, such as order:1.0.2"
        raise SettingsError(f"--replay needs {known}, not {args.replay!r}") from None
    checks = settings.check
    if args.all_orders and "races" not in checks:
        raise SettingsError("--all-orders walks the orders of atomics and waits; it needs races for all other accesses")
    if not os.path.isfile(args.script):
        raise ArgumentError(f"there is no program {args.script}")
    if args.timeline and (args.seeds or args.all_orders):
        raise SettingsError("--timeline shows one run: give it with --replay SEED, not with --seeds or --all-orders")
    if args.timeline:
        writable(args.timeline)
    try:
        with open(args.script, "rb") as file, warnings.catch_warnings(action="ignore"):  # Python's, when it runs
            compile(file.read(), args.script, "exec")
    except OSError as error:
        raise ArgumentError(f"{args.script} cannot be read: {error.strerror or error}") from error
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(f"{args.script} is no program in Python: {error}") from error
    choose_plugins(settings, "cpu")
    rows: list[Row] = []
    failed: list[Row] = []
    status, is_checked = 0, False

    def once(seed: int | str | None) -> list[list[int]] | None:
        """Run the program; returns the journal of its order, if it was run in one and has one context."""
        nonlocal status, is_checked
        found, ended = _run_once(args, checks, seed)
        status, is_checked = status or ended, is_checked or found is not None
        found = found or []
        journals = [row for row in found if row["kind"] == "order"]
        journal = max((row["rows"] for row in journals), key=len, default=None)
        name = seed if journal is None else all_orders.name_of(journal)
        rows.extend(row if row.get("seed") is None else {**row, "seed": name} for row in found)
        if ended and name is not None:
            failed.append({"seed": name, "status": ended})
        return journal if len(journals) <= (journals[0]["ranks"] if journals else 0) else None

    walked = all_orders.Walk()
    if args.all_orders:
        walked = all_orders.walk(once, args.all_orders)
    else:
        for seed in range(args.seeds) if args.seeds else [settings.check_seed if one else None]:
            once(seed)
    findings, benign = merged(rows), _declared(rows)
    if args.json:
        orders = {"orders": vars(walked)} if args.all_orders else {}
        about = {"checked": is_checked, "status": status, "failed": failed, **orders}
        print_json({"findings": findings, "benign": benign, **about})
    else:
        for number, row in enumerate(findings, 1):
            print(f"{number}. {row['text']}{_times(row)}")
        for row in benign:
            print(f"declared benign on rank {row['rank']}, {counted(row['races'], 'race')}: {row['reason']}")
        for row in failed:
            print(f"with seed {row['seed']} the program ended with status {row['status']}: --replay {row['seed']}")
        other = "" if status == 0 or failed else f"; the program ended with status {status}"
        under = f" in {counted(args.seeds, 'schedule')}, {len(failed)} of which failed" if args.seeds else ""
        if args.all_orders:
            are = f"{'which are all' if walked.is_whole else 'and there may be more'}, in {counted(walked.runs, 'run')}"
            under = f" in {walked.orders} orders of synchronisation, {are}; {len(failed)} failed"
        what = counted(len(findings), "finding")
        if not is_checked:
            what = f"{args.script} opened no context that could be checked"
        print(f"iris check ({', '.join(checks)}): {what}{under}{other}")
    if args.timeline:
        drawn = draw(args.timeline, [row for row in rows if row["kind"] == "timeline"])
        if not args.json:
            print(f"{args.timeline} shows {drawn} of them as they were made, rank by rank: open it in ui.perfetto.dev")
    return 1 if findings or status < 0 or not (is_checked or status) else status


def _run_once(args: argparse.Namespace, checks: Sequence[str], seed: int | str | None) -> tuple[list[Row] | None, int]:
    """Run the program; returns what was found, None where no context was checked, and its status."""
    quiet = args.seeds or args.all_orders  # its output is shown if the status is not 0
    with tempfile.TemporaryDirectory(prefix="iris-check-") as folder:
        path = os.path.join(folder, "findings")
        environ = {**os.environ, "IRIS_CHECK": ",".join(checks), "IRIS_CHECK_REPORTS": path, "IRIS_DEVICE": "cpu"}
        environ["IRIS_CHECK_TIMELINE"] = str(bool(args.timeline))
        if seed is not None:
            environ["IRIS_CHECK_SEED"] = str(seed)
        kept = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        where: Any = kept if quiet else {"stdout": sys.stderr if args.json else None}
        done = _ended([sys.executable, args.script, *args.args], env=environ, **where)
        if quiet and done.returncode:
            said = done.stdout.decode(errors="replace")
            print(f"-- with {seed if isinstance(seed, str) else f'seed {seed}'}:", said, sep="\n", file=sys.stderr)
        if not os.path.exists(path):
            return None, done.returncode
        with open(path) as file:
            return [json.loads(line) for line in file], done.returncode


def _ended(command: list[str], **how: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a program until it ends; SIGTERM ends it and the ranks that it has started, and then this process."""
    was = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with subprocess.Popen(command, process_group=0, **how) as program:
            try:
                said, _ = program.communicate()
            except BaseException:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(program.pid, signal.SIGTERM)
                    program.wait(_PATIENCE_S)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                raise
    finally:
        signal.signal(signal.SIGTERM, was)
    return subprocess.CompletedProcess(command, program.returncode, said)


def _times(row: Row) -> str:
    if row["seeds"]:
        return f" (seed {row['seeds'][0]}, {len(row['seeds'])} in all)"
    return f" ({row['ranks']} ranks)" if row["ranks"] > 1 else ""


def _declared(rows: list[Row]) -> list[Row]:
    """Return the declared races, one for each rank and reason, with the numbers of all its tensors, in all runs."""
    found: dict[tuple[int, str], Row] = {}
    for row in rows:
        if row["kind"] == "benign":
            first = found.setdefault((row["rank"], row["reason"]), {**row, "races": 0})
            first["races"] += row["races"]
    return list(found.values())


def merged(rows: list[Row]) -> list[Row]:
    """Return the findings, those about the same lines once, with `count`, how many `ranks`, and the `seeds`."""
    found: dict[str, Row] = {}
    by: dict[str, set[int]] = {}
    for row in rows:
        if "text" in row:
            sides = [(side["file"], side["line"]) for side in (row["access"], row["other"]) if side is not None]
            key = repr((row["kind"], sorted(sides)))
            first = found.setdefault(key, {**row, "count": 0, "ranks": 0, "seeds": []})
            by.setdefault(key, set()).add(row["access"]["rank"])
            first["count"], first["ranks"] = first["count"] + 1, len(by[key])
            if row["seed"] is not None and row["seed"] not in first["seeds"]:
                first["seeds"].append(row["seed"])
    return list(found.values())
