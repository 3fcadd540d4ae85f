"""The launch, the program and the line of the running thread: launches from several Python threads run side by side."""

from __future__ import annotations

import importlib.util
import linecache
import os
import re
import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # for the package loads no numpy
    from iris_triton.interpreter.memory.regions import BoundsChecker
    from iris_triton.interpreter.scheduler import Program


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """The program that calls an entry."""

    pid: tuple[int, int, int]  #: its index, as tl.program_id gives it
    grid: tuple[int, int, int]  #: number of programs per axis

    @property
    def linear_id(self) -> int:
        """Linear index in the order in which programs start; the x axis runs fastest."""
        x, y, z = self.pid
        return x + self.grid[0] * (y + self.grid[1] * z)


@dataclass(slots=True)
class Launch:
    """One launch: constant while its programs run, except for entries that a language adds to `options`."""

    kernel: str
    grid: tuple[int, int, int]
    checker: BoundsChecker
    refuse: bool  # accesses that `checker` does not know
    raise_hints: bool  # an error where a hint is not true
    options: dict[str, Any]
    watch: Any = None  # the strands of the launch while the checker is on
    views: Any = None  # its tensor arguments, where their pointers carry numbers; see `iris_triton.checker.given_views`


class _Current(threading.local):
    launch: Launch
    program: Program
    region: Any = None  # of the reduction or scan whose combine function is running


current = _Current()


def program_info() -> ProgramInfo:
    """Describe the running program to a CPU entry."""
    return ProgramInfo(current.program.pid, current.launch.grid)


# -- where a kernel is, for messages ----------------------------------------------------------------------------------
_CELL = "_iris_call"  # a closure variable that every rewritten function with a call has; see `rewrite`


def _folders(*packages: str) -> tuple[str, ...]:
    """Return the folders of packages, of those that are installed."""
    specs = map(importlib.util.find_spec, packages)
    return tuple(os.path.join(os.path.dirname(spec.origin), "") for spec in specs if spec and spec.origin)


_TRITON = _folders("triton")
DEVICE_FUNCTIONS = _folders("triton", "iris_triton", "iris_gluon")  # folders of those that are no user's
_TARGET = re.compile(r"\s*(\w+)\s*(?::[^=]+)?=[^=]")


class Line(NamedTuple):
    """A line of a kernel or device function."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"line {self.number} of {os.path.basename(self.file)}"

    @property
    def target(self) -> str:
        """Name of the variable that the line assigns to; empty if it assigns to none."""
        found = _TARGET.match(linecache.getline(self.file, self.number))
        return found.group(1) if found else ""


def is_kernel_code(code: Any) -> bool:
    """Return whether a code object is that of a kernel or device function."""
    return _CELL in code.co_freevars


def here(libraries: tuple[str, ...] = _TRITON) -> Line:
    """Return the running line of the user's code, skipping device functions of libraries, by default Triton's."""
    frame: Any = sys._getframe(1)
    found = Line("", 0)
    while frame is not None:
        if is_kernel_code(frame.f_code):
            found = Line(frame.f_code.co_filename, frame.f_lineno or 0)
            if not found.file.startswith(libraries):
                break
        frame = frame.f_back
    return found
