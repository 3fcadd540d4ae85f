"""Collectives: `ctx.ccl` (see docs/collectives.md)."""

from __future__ import annotations

from iris_core.dispatch.config import Config
from iris_core.types import ReduceOp

__all__ = ["Config", "ReduceOp"]
