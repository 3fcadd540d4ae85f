"""Test support for Iris and its plugins: a pool of rank processes and the conformance kit.

Needs the extra `iris-core[testing]`.  Names are loaded on first use: rank processes import this package too, and need
neither pytest nor the kit.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from iris_core import loaded_on_use

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


_suites = {name: f"{__name__}.conformance.{name.removesuffix('Conformance').lower()}" for name in __all__}
__getattr__, __dir__ = loaded_on_use(__name__, _suites | {"RankPool": f"{__name__}.pool"})
