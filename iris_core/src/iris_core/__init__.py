"""Symmetric heap, plugin registry and host API of Iris.

Importing this package pulls in neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from iris_core.types import VERSION as __version__

if TYPE_CHECKING:
    from iris_core.api import Iris
    from iris_core.hooks import hookimpl
    from iris_core.logs import logger, set_logger_level
    from iris_core.settings import IrisSettings, PluginSettings
    from iris_core.world.launch import run

__all__ = ["Iris", "IrisSettings", "PluginSettings", "__version__", "hookimpl", "logger", "run", "set_logger_level"]


def loaded_on_use(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package that gets each of these names from a module of its own."""

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = there[name] = getattr(importlib.import_module(homes[name]), name)
        return value

    there = vars(sys.modules[package])
    return get, lambda: sorted({*there, *homes})


__getattr__, __dir__ = loaded_on_use(__name__, {
    "Iris": "iris_core.api",
    "hookimpl": "iris_core.hooks",
    "run": "iris_core.world.launch",
    **dict.fromkeys(["IrisSettings", "PluginSettings"], "iris_core.settings"),
    **dict.fromkeys(["logger", "set_logger_level"], "iris_core.logs"),
})  # fmt: skip
