"""Bringing the clocks of several ranks onto one axis: that of rank 0's device.

Rank 0 sends a word and gets one back; each notes when it did so on its own clock.  With t0, t3 on rank 0 and t1, t2 on
the other, the other's clock is ahead by ((t1 - t0) + (t2 - t3)) / 2, and that is wrong by at most half of what the way
there and back took, ((t3 - t0) - (t2 - t1)) / 2, however unlike the two ways are.  (D. L. Mills, Internet Time
Synchronization: the Network Time Protocol, IEEE Trans. Communications 39, 1991.)  The fastest of many rounds counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from iris_core.types import ClockOffset


def offset_of(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any], resolution: float = 1.0) -> ClockOffset:
    """Return the offset of the second clock against the first one.

    Args:
        first: int64 of shape (rounds, 2), ticks of the first clock: before sending, and after the answer.
        second: int64 of shape (rounds, 2), ticks of the second one: after receiving, and before answering.
        resolution: ticks by which either clock goes on at least.
    """
    there_and_back = (first[:, 1] - first[:, 0]) - (second[:, 1] - second[:, 0])
    best = int(np.argmin(there_and_back))
    (t0, t3), (t1, t2) = first[best].tolist(), second[best].tolist()
    return ClockOffset((t1 + t2) // 2, ((t1 - t0) + (t2 - t3)) // 2, max(int(there_and_back[best]), 0) / 2 + resolution)


@dataclass(frozen=True)
class Clock:
    """One rank's clock between two measurements of its offset."""

    ticks_per_second: float  # of the device's constant clock, the same on all ranks
    begin: ClockOffset  # when tracing was switched on
    end: ClockOffset  # when the events were read
    # a point of rank 0's clock, the same for all ranks, from which aligned times count: nanoseconds of decades are too
    # many for a float64
    origin: int

    @property
    def error_us(self) -> float:
        """Most that an aligned time can be wrong by, in microseconds, if the clocks' rates do not change in between."""
        return max(self.begin.error, self.end.error) * 1e6 / self.ticks_per_second

    def align(self, ticks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Turn times of this clock (int64) into ticks of rank 0's since the origin (float64)."""
        span = self.end.at - self.begin.at
        drift = (self.end.ahead - self.begin.ahead) / span if span > 0 else 0.0
        since = (ticks - np.int64(self.begin.at)).astype(np.float64)
        shifted = ticks - np.int64(self.begin.ahead + self.origin)
        aligned: np.ndarray[Any, Any] = shifted.astype(np.float64) - drift * since
        return aligned
