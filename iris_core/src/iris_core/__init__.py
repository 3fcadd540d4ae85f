"""Symmetric heap, plugin registry and host API of Iris.

Importing this package pulls in neither torch nor triton; its names are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from iris_core.types import VERSION as __version__

if TYPE_CHECKING:
    from iris_core.api import Iris
    from iris_core.hooks import hookimpl
    from iris_core.logs import logger, set_logger_level
    from iris_core.settings import IrisSettings, PluginSettings
    from iris_core.world.launch import run


_HOMES = {
    "Iris": "iris_core.api",
    "hookimpl": "iris_core.hooks",
    "run": "iris_core.world.launch",
    **dict.fromkeys(["IrisSettings", "PluginSettings"], "iris_core.settings"),
    **dict.fromkeys(["logger", "set_logger_level"], "iris_core.logs"),
}

__all__ = ["Iris", "IrisSettings", "PluginSettings", "__version__", "hookimpl", "logger", "run", "set_logger_level"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
