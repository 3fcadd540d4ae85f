"""The launch and the program of the running thread.

Launches from several Python threads are independent: each has its own scheduler and its own bounds checker, and
programs of different launches run side by side.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_triton.interpreter.memory.regions import BoundsChecker
    from iris_triton.interpreter.scheduler import Program


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """The program that calls an entry.

    Attributes:
        pid: its index, as tl.program_id gives it.
        grid: number of programs per axis.
    """

    pid: tuple[int, int, int]
    grid: tuple[int, int, int]

    @property
    def linear_id(self) -> int:
        """Its place in the order in which programs start; the x axis runs fastest."""
        x, y, z = self.pid
        return x + self.grid[0] * (y + self.grid[1] * z)


@dataclass(slots=True)
class Launch:
    """One launch: constant while its programs run, but for what a language adds to `options`.

    `refuse` makes accesses that `checker` does not know errors, `raise_hints` hints that are not true.
    """

    kernel: str
    grid: tuple[int, int, int]
    checker: BoundsChecker
    refuse: bool
    raise_hints: bool
    options: dict[str, Any]


class _Current(threading.local):
    launch: Launch
    program: Program
    region: Any = None  # of the reduction or scan whose combine function is running


current = _Current()


def program_info() -> ProgramInfo:
    """Describe the running program to a CPU entry."""
    return ProgramInfo(current.program.pid, current.launch.grid)
