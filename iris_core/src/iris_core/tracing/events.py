"""Events of a rank as columns, on the time axis that all ranks share."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from iris_core.tracing.layout import NO_DURATION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from iris_core.tracing.clocks import Clock

_CU_BITS = 16


@dataclass(frozen=True)
class Events:
    """Events of a rank, sorted by time.

    Attributes:
        columns: by name, one value for each event (`iris_core.tracing.layout.COLUMNS`).
        dropped: events for which there was no room.
    """

    columns: Mapping[str, np.ndarray[Any, Any]]
    dropped: int

    @classmethod
    def sorted(cls, columns: Mapping[str, np.ndarray[Any, Any]], dropped: int) -> Events:
        """Make events out of columns in any order."""
        order = np.argsort(columns["timestamp"], kind="stable")
        return cls({name: values[order] for name, values in columns.items()}, dropped)

    def __len__(self) -> int:
        return len(self.columns["timestamp"])

    def begin_us(self, clock: Clock) -> np.ndarray[Any, Any]:
        """Begin of each event in microseconds after the clocks' origin."""
        begin: np.ndarray[Any, Any] = clock.align(self.columns["timestamp"]) * (1e6 / clock.ticks_per_second)
        return begin

    def duration_us(self, clock: Clock) -> np.ndarray[Any, Any]:
        """Duration of each event in microseconds; NaN where there is none."""
        ticks = self.columns["duration_cycles"]
        return np.where(ticks == NO_DURATION, np.nan, ticks * (1e6 / clock.ticks_per_second))

    def lanes(self) -> tuple[np.ndarray[Any, Any], dict[int, str]]:
        """Say on which line to draw each event, so that none overlaps another one that it is not nested in.

        A line is a slot of a multiprocessor (or compute unit): programs that are on one at a time have lines of their
        own, and one that comes later takes the line of one that has ended.

        Returns:
            (line of each event, names of the lines).
        """
        units = self.columns["xcc_id"].astype(np.int64) << _CU_BITS | self.columns["cu_id"]
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
        names = {number: _line_name(*key, several=key[0] in several) for key, number in numbers.items()}
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


def _line_name(unit: int, slot: int, *, several: bool) -> str:
    return f"XCC{unit >> _CU_BITS}_CU{unit & ((1 << _CU_BITS) - 1)}" + (f" #{slot}" if several else "")
