"""Events of a rank as columns, on the time axis that all ranks share, and as a file for Perfetto or chrome://tracing.

(Trace Event Format, Google, 2016: "X" is an event with a duration, "i" one without, "M" names processes and threads;
times are microseconds.)  A process is a rank, a thread a line of `Events.lanes`.  Every event is a line of the file, so
files of several ranks are put together without being parsed.
"""

from __future__ import annotations

import heapq
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from iris_core.tracing.clocks import Clock
from iris_core.tracing.layout import NO_DURATION

SCHEMA_VERSION = "1.2"
_CU_BITS = 16
_BEGIN, _END = '{"traceEvents": [\n', "\n],\n"
_INSTANT, _LASTING = '"ph": "i", "s": "t"', '"ph": "X", "dur": '
_IN_ARGS = ("pid", "pid_m", "pid_n", "target_rank", "address", "xcc_id", "cu_id", "op_index", "payload_size")


class Events:
    """Events of a rank, sorted by time."""

    def __init__(self, columns: Mapping[str, np.ndarray[Any, Any]], dropped: int) -> None:
        order = np.argsort(columns["timestamp"], kind="stable")
        # one value for each event, by name (`iris_core.tracing.layout.COLUMNS`)
        self.columns = {name: values[order] for name, values in columns.items()}
        self.dropped = dropped  # number of events that did not fit into the buffers

    def __len__(self) -> int:
        return len(self.columns["timestamp"])

    def begin_us(self, clock: Clock) -> np.ndarray[Any, Any]:
        """Begin of each event in microseconds after the clocks' origin."""
        begin: np.ndarray[Any, Any] = clock.align(self.columns["timestamp"]) * (1e6 / clock.ticks_per_second)
        return begin

    def lanes(self, cpu_rank: int | None = None) -> tuple[np.ndarray[Any, Any], dict[int, str]]:
        """Say on which line to draw each event, so that none overlaps another one that it is not nested in.

        A line is a slot of a multiprocessor (or compute unit): programs that are on one at a time have lines of their
        own, and one that comes later takes the line of one that has ended.  On a CPU rank, which has none, a line is a
        program; `cpu_rank` is this rank there.  Returns the line of each event, and the names of the lines.
        """
        units = self.columns["xcc_id"].astype(np.int64) << _CU_BITS | self.columns["cu_id"]
        units = units if cpu_rank is None else self.columns["pid"].astype(np.int64)
        programs, which = np.unique(units << 32 | self.columns["pid"], return_inverse=True)
        begin = self.columns["timestamp"]
        end = begin + np.maximum(self.columns["duration_cycles"], 0)
        first, last = np.full(len(programs), np.iinfo(np.int64).max), np.full(len(programs), -1)
        np.minimum.at(first, which, begin)
        np.maximum.at(last, which, end)
        slots = _slots((programs >> 32).tolist(), first, last.tolist())
        several = {unit for unit, slot in slots if slot}
        numbers = {key: number for number, key in enumerate(sorted(set(slots)))}
        line_of_program = np.array([numbers[key] for key in slots], dtype=np.int64)
        names = {}
        for (unit, slot), number in numbers.items():
            place = f"XCC{unit >> _CU_BITS}_CU{unit & ((1 << _CU_BITS) - 1)}"
            names[number] = place if cpu_rank is None else f"rank {cpu_rank}, program {unit}"
            names[number] += f" #{slot}" if unit in several else ""
        return line_of_program[which], names


def _slots(units: Sequence[int], first: np.ndarray[Any, Any], last: Sequence[int]) -> list[tuple[int, int]]:
    """Give each program a slot of its unit that is free from its first to its last moment: (unit, slot)."""
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[int, int]]] = {}  # (end, slot)
    found = [(0, 0)] * len(units)
    for index in np.argsort(first, kind="stable").tolist():
        unit, begin = units[index], first[index]
        taken, idle = busy.setdefault(unit, []), free.setdefault(unit, [])
        while taken and taken[0][0] <= begin:
            heapq.heappush(idle, heapq.heappop(taken)[1])
        slot = heapq.heappop(idle) if idle else len(taken)  # without an idle one, all that there are are taken
        heapq.heappush(taken, (last[index], slot))
        found[index] = unit, slot
    return found


def event_lines(
    events: Events, clock: Clock, zero_us: float, names: Mapping[int, str], rank: int, on_cpu: bool = False
) -> list[str]:
    """Return the events of a rank as JSON, one text each.

    The axis begins `zero_us` microseconds after the clocks' origin; events without a name are called "event <number>".
    """
    columns = events.columns
    lanes, lane_names = events.lanes(rank if on_cpu else None)
    begin = np.round(events.begin_us(clock) - zero_us, 3).tolist()
    ticks = columns["duration_cycles"]
    lasting = np.where(ticks == NO_DURATION, np.nan, ticks * (1e6 / clock.ticks_per_second))
    duration = np.round(lasting, 3).tolist()
    known = {n: json.dumps(names.get(n, f"event {n}")) for n in np.unique(columns["event_id"]).tolist()}
    arguments = zip(*(columns[name].tolist() for name in _IN_ARGS), strict=True)
    about: list[dict[str, Any]] = [
        {"name": "process_name", "args": {"name": f"rank {rank}"}},
        {"name": "process_sort_index", "args": {"sort_index": rank}},
        *({"name": "thread_name", "tid": lane, "args": {"name": name}} for lane, name in lane_names.items()),
    ]
    return [json.dumps({**each, "ph": "M", "pid": rank}) for each in about] + [
        f'{{"name": {known[event]}, "cat": "iris", "pid": {rank}, "tid": {lane}, "ts": {ts}, '
        f'{_INSTANT if dur != dur else _LASTING + str(dur)}, "args": {{'
        f'"program_id": {pid}, "pid_m": {pid_m}, "pid_n": {pid_n}, "target_rank": {target}, "address": "{address:#x}", '
        f'"xcc_id": {xcc}, "cu_id": {cu}, "op_index": {op}, "payload_size": {payload}}}}}'
        for event, lane, ts, dur, (pid, pid_m, pid_n, target, address, xcc, cu, op, payload) in zip(
            columns["event_id"].tolist(), lanes.tolist(), begin, duration, arguments, strict=True
        )
    ]


def write(path: pathlib.Path, lines: Iterable[str], metadata: Mapping[str, Any]) -> None:
    """Write a file."""
    with path.open("w") as file:
        file.write(_BEGIN)
        file.write(",\n".join(lines))
        file.write(f'{_END}"displayTimeUnit": "ns",\n"metadata": {json.dumps(dict(metadata), indent=1)}\n}}\n')


def lines_of(path: pathlib.Path) -> list[str]:
    """Return the events of a file that `write` has written, as text."""
    text = path.read_text()
    begin, end = len(_BEGIN), text.rindex(_END)
    if not text.startswith(_BEGIN):
        raise ValueError(f"{path} is not a trace of iris")
    return [line.rstrip(",") for line in text[begin:end].split("\n") if line]
