"""Products fused with communication: `ctx.ops` (see docs/ops.md)."""

from __future__ import annotations

from iris_core.dispatch.config import FusedConfig
from iris_core.ops.api import FusedWorkspace

__all__ = ["FusedConfig", "FusedWorkspace"]
