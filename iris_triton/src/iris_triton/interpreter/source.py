"""Where a kernel is: lines and names of variables, for messages."""

from __future__ import annotations

import linecache
import os
import re
import sys
from typing import NamedTuple

_CELL = "_iris_call"
"""A closure variable that every rewritten function with a call has; see `iris_triton.interpreter.rewrite`."""

_TRITON = f"{os.sep}triton{os.sep}"
DEVICE_FUNCTIONS = (_TRITON, f"{os.sep}iris_triton{os.sep}", f"{os.sep}iris_gluon{os.sep}")
"""Parts of paths of device functions that are no user's."""

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


def here(libraries: tuple[str, ...] = (_TRITON,)) -> Line:
    """The line of the user's code that is running, below device functions of libraries, by default of Triton itself."""
    frame = sys._getframe(1)
    found = Line("", 0)
    while frame is not None:
        code = frame.f_code
        if _CELL in code.co_freevars:
            found = Line(code.co_filename, frame.f_lineno or 0)
            if not any(part in code.co_filename for part in libraries):
                break
        frame = frame.f_back  # type: ignore[assignment]  # None at the end of the stack
    return found
