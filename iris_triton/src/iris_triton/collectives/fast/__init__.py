"""Collectives for NVIDIA GPUs: packets that carry the proof of their own arrival, instead of meetings.

docs/collectives.md says what they are for, and on what they lean.  Imports nothing until it is asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_core.protocols import Collective


def collectives() -> list[Collective]:
    """Return the algorithms."""
    from iris_triton.collectives.fast.algorithms import fast_collectives

    return list(fast_collectives())
