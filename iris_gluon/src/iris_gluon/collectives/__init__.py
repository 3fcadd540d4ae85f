"""Algorithms in Gluon for `ctx.ccl` (see docs/collectives.md).  Imports nothing until a backend asks for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_core.protocols import Collective


def collectives() -> list[Collective]:
    """Return the algorithms."""
    from iris_gluon.collectives.all_reduce import OneShot, TwoShot
    from iris_gluon.collectives.push import Push
    from iris_gluon.collectives.push_bulk import PushBulk

    moves = [cls(op) for cls in (Push, PushBulk) for op in ("all_gather", "all_to_all")]
    return [*moves, OneShot(), TwoShot()]
