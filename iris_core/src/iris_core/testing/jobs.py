"""Small jobs for ranks, used in examples and tests."""

from __future__ import annotations


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world_size) of the calling process."""
    import os

    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
