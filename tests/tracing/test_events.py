"""Events as columns, clocks of several ranks on one axis, and files."""

import json

import numpy as np
import pytest
from tables import raises

from iris_core.tracing.clocks import Clock, offset_of
from iris_core.tracing.events import Events, event_lines, lines_of, write
from iris_core.tracing.layout import COLUMNS
from iris_core.types import ClockOffset

ZERO = 1_800_000_000_000_000_000  # nanoseconds that no float64 can count
CLOCK = Clock(1e9, ClockOffset(ZERO, 0, 1.0), ClockOffset(ZERO + 10**9, 0, 1.0), ZERO)


def events(**given):
    length = max(map(len, given.values()))
    types = {each.name: np.int64 if each.bits == 64 else np.int32 for each in COLUMNS}
    return Events({name: np.array(given.get(name, [0] * length), dtype=kind) for name, kind in types.items()}, 0)


def test_offset():
    # the second clock is 1000 ahead; there takes 30, back takes 50, and a slower round before
    first, second = np.array([[0, 500], [1000, 1100]]), np.array([[1200, 1210], [2030, 2050]])
    offset = offset_of(first, second, resolution=2.0)
    assert offset == ClockOffset(2040, 990, 42.0)
    assert abs(offset.ahead - 1000) <= offset.error


def test_alignment_follows_the_drift():
    begin, end = ClockOffset(ZERO + 500, 500, 3.0), ClockOffset(ZERO + 10**9 + 1500, 1500, 5.0)
    clock = Clock(1e9, begin, end, ZERO)
    ticks = np.array([ZERO + 500, ZERO + 500 + (10**9 + 1000) // 2, ZERO + 10**9 + 1500])
    assert clock.align(ticks) == pytest.approx([0, 5e8, 1e9], abs=1)
    assert clock.error_us == pytest.approx(0.005)
    assert Clock(1e8, begin, begin, ZERO).align(ticks[:1]).tolist() == [0]


def test_lines():
    # on unit 5: programs 1 and 2 at the same time, 3 after 1; program 4 alone on unit 6 of another die
    found = events(
        timestamp=[0, 5, 10, 30, 40], duration_cycles=[20, 5, 100, 10, 1], pid=[1, 1, 2, 3, 4], cu_id=[5, 5, 5, 5, 6],
        xcc_id=[0, 0, 0, 0, 1],
    )  # fmt: skip
    lines, names = found.lanes()
    assert [names[line] for line in lines.tolist()] == ["XCC0_CU5 #0"] * 2 + ["XCC0_CU5 #1", "XCC0_CU5 #0", "XCC1_CU6"]
    lines, names = found.lanes(cpu_rank=7)
    assert [names[line] for line in lines.tolist()] == [f"rank 7, program {program}" for program in (1, 1, 2, 3, 4)]


def test_a_file(tmp_path):
    found = events(
        timestamp=[ZERO + 3000, ZERO + 1000], duration_cycles=[-1, 2500], event_id=[9000, 3], address=[0, 0x7F00],
        payload_size=[0, 64], target_rank=[1, 2], pid=[8, 8],
    )  # fmt: skip
    lines = event_lines(found, CLOCK, 1.0, {3: 'say "put"'}, 1)
    path = tmp_path / "t.json"
    write(path, lines, {"rank": 1})
    content = json.loads(path.read_text())
    first, second = (each for each in content["traceEvents"] if each["ph"] != "M")
    assert (first["name"], first["ts"], first["dur"], first["ph"], first["pid"]) == ('say "put"', 0.0, 2.5, "X", 1)
    assert (first["args"]["address"], first["args"]["payload_size"]) == ("0x7f00", 64)
    assert (second["name"], second["ts"], second["ph"]) == ("event 9000", 2.0, "i")
    assert (content["metadata"], content["displayTimeUnit"]) == ({"rank": 1}, "ns")
    assert lines_of(path) == lines
    (tmp_path / "other.json").write_text('{"x": [\n\n],\n}')
    with raises(ValueError, name="other.json"):
        lines_of(tmp_path / "other.json")
