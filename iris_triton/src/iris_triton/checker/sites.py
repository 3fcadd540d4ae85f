"""Where an access is: the line of the user's kernel, or of the program on the host, by a number that all ranks know."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from iris_triton.checker.shared import SITES
from iris_triton.interpreter import launch
from iris_triton.interpreter.state import DEVICE_FUNCTIONS, is_kernel_code

if TYPE_CHECKING:
    from iris_triton.checker.shared import Tables

_LAUNCH = launch.launch.__code__
_LIBRARIES = ("torch", "triton", "iris_core", "iris_triton", "iris_gluon", "numpy")
_OURS = tuple(f"{os.sep}{name}{os.sep}" for name in _LIBRARIES)


class Sites:
    """The lines that accesses of one context come from."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._numbers: dict[Any, int] = {}

    def of_kernel(self, what: str) -> int:
        """Return the number of the running line of a kernel; of library code only where nothing else is running."""
        frame: Any = sys._getframe(2)
        place: Any = None
        via = ""
        while frame is not None:
            code = frame.f_code
            if is_kernel_code(code):
                if place is not None:
                    via = place[0].co_name
                place = code, frame.f_lineno
                if not any(part in code.co_filename for part in DEVICE_FUNCTIONS):
                    break
            elif code is _LAUNCH:
                via = ""  # all of it is a library's: the line of the kernel says enough
                break
            frame = frame.f_back
        return self._number(what, place, via)

    def of_host(self, what: str) -> int:
        """Return the number of the line of the program that has called torch or Iris."""
        frame: Any = sys._getframe(2)
        while frame.f_back is not None and any(part in frame.f_code.co_filename for part in _OURS):
            frame = frame.f_back
        return self._number(what, (frame.f_code, frame.f_lineno), "")

    def _number(self, what: str, place: Any, via: str) -> int:
        key = what, place, via
        found = self._numbers.get(key)
        if found is None:
            code, line = place or (None, 0)
            where = {"file": code.co_filename if code else "?", "line": line, "function": code.co_name if code else "?"}
            said = f"{what} of {via}()" if via and via != what else what
            text = json.dumps({"what": said, **where})
            with self._tables as tables:
                found = self._numbers[key] = tables.take(SITES)
                tables.put_text(tables.sites[found], text)
        return found

    def describe(self, number: int) -> dict[str, Any]:
        """Return what, file, line and function of a site of any rank."""
        text = bytes(self._tables.sites[number]).rstrip(b"\0").decode(errors="replace")
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:  # a path that is too long was cut
            found = {"what": "access", "file": "?", "line": 0, "function": text[:80]}
        return found
