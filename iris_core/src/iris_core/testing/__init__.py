"""Test support for Iris and its plugins: a pool of rank processes and the conformance kit.

Needs the extra `iris-core[testing]`.  Names are loaded on first use: rank processes import this package too, and need
neither pytest nor the kit.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iris_core.testing.conformance.allocator import AllocatorConformance as AllocatorConformance
    from iris_core.testing.conformance.backend import BackendConformance as BackendConformance
    from iris_core.testing.conformance.collective import CollectiveConformance as CollectiveConformance
    from iris_core.testing.conformance.plugin import PluginConformance as PluginConformance
    from iris_core.testing.conformance.stack import StackConformance as StackConformance
    from iris_core.testing.pool import RankPool as RankPool

__all__ = [
    "AllocatorConformance", "BackendConformance", "CollectiveConformance", "PluginConformance", "RankPool",
    "StackConformance",
]  # fmt: skip

if "pytest" in sys.modules:  # an installed package's assertions say nothing unless pytest rewrites them
    sys.modules["pytest"].register_assert_rewrite(f"{__name__}.conformance")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "pool" if name == "RankPool" else f"conformance.{name.removesuffix('Conformance').lower()}"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
