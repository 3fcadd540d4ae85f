"""`iris check`: run a program on CPU ranks with the checker on, and print what it finds."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from iris_core.cli.timeline import draw
from iris_core.settings import CHECKS

Row = dict[str, Any]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the command line."""
    parser = subparsers.add_parser("check", help="run a program on CPU ranks and report races and other mistakes")
    names = ",".join(CHECKS)
    parser.add_argument("--only", default=names, metavar="NAMES", help="as IRIS_CHECK (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="findings as JSON; the program's output on stderr")
    parser.add_argument("--timeline", metavar="FILE", help="write a picture of the findings for Perfetto into FILE")
    parser.add_argument("script", help="the program, a Python file")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the program; 1 if there are findings, else the program's own status, 1 where a signal ended it."""
    from iris_core.cli._output import print_json
    from iris_core.settings import load_settings

    checks = load_settings(check=args.only).check  # refused before anything is started
    if not os.path.isfile(args.script):
        raise FileNotFoundError(f"there is no program {args.script}")
    if args.timeline and not os.path.isdir(folder := os.path.dirname(args.timeline) or "."):
        raise FileNotFoundError(f"there is no folder {folder} for the picture")
    with tempfile.TemporaryDirectory(prefix="iris-check-") as folder:
        path = os.path.join(folder, "findings")
        environ = {**os.environ, "IRIS_CHECK": ",".join(checks), "IRIS_CHECK_REPORTS": path, "IRIS_DEVICE": "cpu"}
        environ["IRIS_CHECK_TIMELINE"] = str(bool(args.timeline))
        output = sys.stderr if args.json else None
        status = subprocess.run([sys.executable, args.script, *args.args], env=environ, stdout=output).returncode
        rows = []
        if os.path.exists(path):
            with open(path) as file:
                rows = [json.loads(line) for line in file]
    findings, benign = merged(rows), [row for row in rows if row["kind"] == "benign"]
    drawn = draw(args.timeline, [row for row in rows if row["kind"] == "timeline"]) if args.timeline else 0
    if args.json:
        print_json({"findings": findings, "benign": benign, "status": status})
    else:
        for number, row in enumerate(findings, 1):
            times = f" ({row['count']} ranks)" if row["count"] > 1 else ""
            print(f"{number}. {row['text']}{times}")
        for row in benign:
            print(f"declared benign on rank {row['rank']}, {row['races']} races: {row['reason']}")
        ended = "" if status == 0 else f"; the program ended with status {status}"
        print(f"iris check ({', '.join(checks)}): {len(findings)} findings{ended}")
        if args.timeline:
            print(f"{args.timeline} shows {drawn} of them as they were made, rank by rank: open it in ui.perfetto.dev")
    return 1 if findings or status < 0 else status


def merged(rows: list[Row]) -> list[Row]:
    """Return the findings, those of several ranks about the same lines once, with their `count`."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["kind"] not in ("benign", "timeline"):
            sides = [(side["file"], side["line"]) for side in (row["access"], row["other"]) if side is not None]
            first = found.setdefault(repr((row["kind"], sorted(sides))), {**row, "count": 0})
            first["count"] += 1
    return list(found.values())
