"""Small jobs for ranks, used in examples and tests."""

from __future__ import annotations


def rank_and_world() -> tuple[int, int]:
    """Return (rank, world_size) of the calling process."""
    import torch.distributed as dist

    return dist.get_rank(), dist.get_world_size()
