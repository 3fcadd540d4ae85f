"""A picture of findings: what the programs of each did around it, for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

Row = dict[str, Any]
Lane = tuple[int, int | None]
"""Rank and program; None stands for the host."""

_AROUND = 40  # accesses that are drawn before and behind each side of a finding
_LONGEST_US = 200.0
"""How long an access is drawn at most; it ends where the next one of its program begins."""


def draw(path: str, recorded: list[Row], most: int = 100) -> int:
    """Write a picture of the first findings in rows of kind "timeline"; returns how many are in it, at most `most`.

    A process is a rank, a thread a program; an arrow goes from the access that is not ordered to the one that it is in
    conflict with.
    """
    from iris_core.tracing.events import write

    lanes: dict[Lane, list[Row]] = {}
    findings: list[tuple[Lane, Row]] = []
    for record in recorded:
        for row in record["rows"]:
            if "finding" in row:
                findings.append(((record["rank"], row["finding"]["access"]["program"]), row))
            else:
                lanes.setdefault((record["rank"], row["program"]), []).append(row)
    for rows in lanes.values():
        rows.sort(key=lambda row: row["ns"])
    drawn: dict[Lane, set[int]] = {}
    marks: list[tuple[str, list[tuple[Lane, int]]]] = []
    for lane, row in sorted(findings, key=lambda each: each[1]["ns"])[:most]:
        sides = []
        for side in (row["finding"]["other"], row["finding"]["access"]):
            where = lane if side is None else (side["rank"], side["program"])
            at = None if side is None else _last(lanes.get(where, []), side, row["ns"])
            if at is not None:
                sides.append((where, at))
                last = min(at + _AROUND, len(lanes[where]) - 1)
                drawn.setdefault(where, set()).update(range(max(at - _AROUND, 0), last + 1))
        marks.append((row["finding"]["text"], sides))
    zero = min((lanes[lane][min(found)]["ns"] for lane, found in drawn.items()), default=0)
    ranks, process = sorted({rank for rank, _ in drawn}), {"ph": "M", "name": "process_name"}
    lines: list[Row] = [{**process, "pid": rank, "args": {"name": f"rank {rank}"}} for rank in ranks]
    for lane, found in drawn.items():
        lines += _lane(lane, lanes[lane], sorted(found), zero)
    for number, (text, sides) in enumerate(marks, 1):
        for index, (lane, at) in enumerate(sides):
            begin = _us(lanes[lane][at]["ns"], zero)
            common = {"pid": lane[0], "tid": _thread(lane), "ts": begin, "cat": "finding"}
            lines.append({"ph": "i", "s": "t", "name": f"finding {number}", **common, "args": {"text": text}})
            if len(sides) == 2:
                flow = {"ph": "f", "bp": "e"} if index else {"ph": "s"}
                lines.append({**flow, "id": number, "name": "not ordered", **common})
    write(pathlib.Path(path), map(json.dumps, lines), {"findings": [text for text, _ in marks]})
    return len(marks)


def _last(rows: list[Row], side: Row, before: float) -> int | None:
    """Return the last access of a program that a side of a finding may be; None if it is no longer known."""
    for at, row in reversed(list(enumerate(rows))):
        if row["ns"] <= before and all(row[name] == side[name] for name in ("what", "file", "line")):
            return at
    return None


def _lane(lane: Lane, rows: list[Row], found: list[int], zero: int) -> list[Row]:
    rank, program = lane
    common = {"pid": rank, "tid": _thread(lane)}
    name = f"rank {rank}, " + ("host" if program is None else f"program {program}")
    lines: list[Row] = [{"ph": "M", **common, "name": "thread_name", "args": {"name": name}}]
    for at in found:
        row = rows[at]
        begin = _us(row["ns"], zero)
        end = _us(rows[at + 1]["ns"], zero) if at + 1 < len(rows) else begin + 1
        about = {
            "line": f"{os.path.basename(row['file'])}:{row['line']} in {row['function']}",
            "bytes": f"{row['first']} to {row['last']} of the heap of rank {row['owner']}",
        }
        shown = {"ph": "X", "ts": begin, "dur": round(min(end - begin, _LONGEST_US), 3), "name": row["what"]}
        lines.append({**common, **shown, "cat": "iris", "args": about})
    return lines


def _thread(lane: Lane) -> int:
    return 0 if lane[1] is None else lane[1] + 1


def _us(ns: int, zero: int) -> float:
    return round((ns - zero) / 1e3, 3)
