"""`iris.experimental` of the reference system: what of it has a place here."""

from __future__ import annotations

import importlib
from typing import Any, NoReturn

from iris_core.errors import UnsupportedError


class RocshmemProvider:
    """A heap of rocSHMEM's, which is not offered: making one raises.

    Raises:
        UnsupportedError: always; `ctx.allocate_symmetric` returns the same pair of tensor and peers' addresses.
    """

    def __new__(cls, device: Any = None) -> NoReturn:
        """Refuse."""
        raise UnsupportedError(
            "RocshmemProvider: there is no rocSHMEM here; iris_triton.iris(...).allocate_symmetric(...) returns the "
            "same: a tensor and its address on every rank"
        )


def __getattr__(name: str) -> Any:
    if name == "iris_gluon":
        return importlib.import_module(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
