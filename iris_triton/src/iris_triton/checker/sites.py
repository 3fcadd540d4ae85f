"""Where an access is: the line of the user's kernel, or of the program on the host, by a number that all ranks know.

Lanes that a mask leaves out of a load without `other` are undefined.  `Undefined` fills them with values that are known
again where they are stored: NaN with a payload, which arithmetic, reductions and conversions between 16, 32 and 64 bits
hand on (IEEE 754-2019, 6.2.3), and large integers, which lead out of a tensor.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

import numpy as np

from iris_triton.checker.shared import SITES, Tables
from iris_triton.interpreter import launch
from iris_triton.interpreter.state import DEVICE_FUNCTIONS, is_kernel_code

_LAUNCH = launch.launch.__code__
_LIBRARIES = ("torch", "triton", "iris_core", "iris_triton", "iris_gluon", "numpy")
_OURS = tuple(f"{os.sep}{name}{os.sep}" for name in _LIBRARIES)


class Sites:
    """The lines that accesses of one context come from."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._number = functools.cache(self._new)

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
                if not code.co_filename.startswith(DEVICE_FUNCTIONS):
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

    def _new(self, what: str, place: Any, via: str) -> int:
        code, line = place or (None, 0)
        where = {"file": code.co_filename if code else "?", "line": line, "function": code.co_name if code else "?"}
        said = f"{what} of {via}()" if via and via != what else what
        with self._tables as tables:
            number = tables.take(SITES)
            tables.put_text(tables.sites[number], json.dumps({"what": said, **where}))
        return number

    def describe(self, number: int) -> dict[str, Any]:
        """Return what, file, line and function of a site of any rank."""
        text = bytes(self._tables.sites[number]).rstrip(b"\0").decode(errors="replace")
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:  # a path that is too long was cut
            found = {"what": "access", "file": "?", "line": 0, "function": text[:80]}
        return found


_INTEGER = 0x3A3A3A3A
_PAYLOAD = 0x55  # the seven highest bits of the payload, all that bfloat16 has
_SITES = 1 << 13  # lines that the lowest bits of float32 tell apart

_FORMS = {  # by kind and size of a type: the exponent's bits with the payload, and how many bits come behind
    (kind, nbytes): (((1 << exponent) - 1) << 7 | _PAYLOAD, shift)
    for kind, nbytes, exponent, shift in (("f", 2, 5, 3), ("f", 4, 8, 16), ("f", 8, 11, 45), ("u", 2, 8, 0))
}


class Undefined:
    """Values of lanes that no load has filled, and their lines."""

    def __init__(self) -> None:
        self._lines: list[int] = []

    def fill(self, dtype: Any, site: int) -> Any:
        """Return what such lanes of a load in a line get; None for types that have no such value."""
        if dtype.kind == "i":
            return np.array(_INTEGER, dtype) if dtype.itemsize >= 4 else None
        pattern, shift = _FORMS.get((dtype.kind, dtype.itemsize), (0, 0))
        if not pattern:
            return None
        bits = pattern << shift
        if dtype == np.float32:
            if site not in self._lines:
                self._lines.append(site)
            bits |= (self._lines.index(site) + 1) % _SITES
        return np.array(bits, f"u{dtype.itemsize}").view(dtype)

    def find(self, data: Any, mask: Any) -> tuple[bool, int | None]:
        """Return whether active elements hold such a value, and the number of the line of the load if it is known."""
        pattern, shift = _FORMS.get((data.dtype.kind, data.itemsize), (0, 0))
        if not pattern or (data.dtype.kind == "f" and not np.isnan(data).any()):
            return False, None
        bits = np.ascontiguousarray(data).view(f"u{data.itemsize}")
        found = (bits << np.array(1, bits.dtype)) >> np.array(shift + 1, bits.dtype) == np.array(pattern, bits.dtype)
        if mask is not None:
            found = found & mask
        if not found.any():
            return False, None
        number = int(bits[found].flat[0]) % _SITES if data.dtype == np.float32 else 0
        return True, self._lines[number - 1] if 0 < number <= len(self._lines) else None
