"""Collectives: `ctx.ccl` (see docs/collectives.md)."""

from __future__ import annotations

from iris_core.ccl.config import Config
from iris_core.ccl.reduce_op import ReduceOp

__all__ = ["Config", "ReduceOp"]
