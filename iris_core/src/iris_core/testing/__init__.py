"""What tests of Iris and of its plugins share: a pool of rank processes and the conformance kit.

Needs the extra `iris-core[testing]`.
"""

from __future__ import annotations

from iris_core.testing.pool import RankPool

__all__ = ["RankPool"]
