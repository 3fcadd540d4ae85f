"""Events as a file in the Trace Event Format, which Perfetto and chrome://tracing open.

(Trace Event Format, Google, 2016: "X" is an event with a duration, "i" one without, "M" names processes and threads;
times are microseconds.)  A process is a rank, a thread a line of `Events.lanes`.  Every event is a line of the file, so
files of several ranks are put together without being parsed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterable, Mapping

    from iris_core.tracing.clocks import Clock
    from iris_core.tracing.events import Events

SCHEMA_VERSION = "1.2"
_BEGIN, _END = '{"traceEvents": [\n', "\n],\n"
_INSTANT, _LASTING = '"ph": "i", "s": "t"', '"ph": "X", "dur": '
_IN_ARGS = ("pid", "pid_m", "pid_n", "target_rank", "address", "xcc_id", "cu_id", "op_index", "payload_size")


def event_lines(events: Events, clock: Clock, zero_us: float, names: Mapping[int, str], rank: int) -> list[str]:
    """Return the events of a rank as JSON, one text each.

    The axis begins `zero_us` microseconds after the clocks' origin; events without a name are called "event <number>".
    """
    columns = events.columns
    lanes, lane_names = events.lanes()
    begin = np.round(events.begin_us(clock) - zero_us, 3).tolist()
    duration = np.round(events.duration_us(clock), 3).tolist()
    known = {n: json.dumps(names.get(n, f"event {n}")) for n in np.unique(columns["event_id"]).tolist()}
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
            columns["event_id"].tolist(),
            lanes.tolist(),
            begin,
            duration,
            zip(*(columns[name].tolist() for name in _IN_ARGS), strict=True),
            strict=True,
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
