"""Synchronisation words (`locks`) of tile-level collectives: number, creation, checks."""

from __future__ import annotations

import torch

from iris_core.api import Iris
from iris_core.errors import NotOnHeapError

VARIANTS = ("atomic", "ring", "one_shot", "two_shot", "spinlock")  # of all_reduce, by their codes
FIXED_WORDS = 3  # words of a tile beside the two that it has for each rank; `protocol` says what they are for


def lock_words(M: int, N: int, block_m: int, block_n: int, world_size: int, variant: str = "two_shot") -> int:
    """Return the number of words that `locks` must have.

    Args:
        M, N: rows and columns of the tensor that is cut into tiles (of `dst_view`).
        block_m, block_n: rows and columns of a tile.
        world_size: number of ranks.
        variant: "ring", "one_shot", "two_shot", "reduce_scatter": 2 * world_size + 3 words a tile.  "spinlock": one
            word a tile.  "atomic": none.

    Raises:
        ValueError: a size is not positive, or there is no such variant.

    Example:
        >>> from iris_triton.tiles import lock_words
        >>> lock_words(100, 100, 64, 64, world_size=8)
        76
    """
    for name, value in (("M", M), ("N", N), ("block_m", block_m), ("block_n", block_n), ("world_size", world_size)):
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    tiles = -(-M // block_m) * -(-N // block_n)
    if variant == "atomic":
        return 0
    if variant == "spinlock":
        return tiles
    if variant not in (*VARIANTS, "reduce_scatter"):
        raise ValueError(f"unknown variant {variant!r}: {', '.join(VARIANTS)} or reduce_scatter")
    return tiles * (2 * world_size + FIXED_WORDS)


def make_locks(ctx: Iris, M: int, N: int, block_m: int, block_n: int, variant: str = "two_shot") -> torch.Tensor:
    """Return `locks` for the collectives on one tensor: int64, zero, on the symmetric heap.

    Collective: all ranks, with the same arguments, those of `lock_words`.  A barrier between all ranks must follow
    before the first launch.  The words are never reset, except after a `DeviceTimeoutError`: then zero them on all
    ranks, between two barriers.

    Raises:
        ValueError: as in `lock_words`.
        HeapExhaustedError: the heap is full.
    """
    return ctx.zeros(max(lock_words(M, N, block_m, block_n, ctx.num_ranks, variant), 1), dtype=torch.int64)


def check_locks(
    ctx: Iris, locks: torch.Tensor, M: int, N: int, block_m: int, block_n: int, variant: str = "two_shot"
) -> None:
    """Check before a launch that `locks` has enough words for a kernel; `lock_words` says what the others are.

    Raises:
        ValueError: too few words, another dtype than int64 (for "spinlock", int32 will do), or not contiguous.
        NotOnHeapError: it does not lie on the symmetric heap.
    """
    words = lock_words(M, N, block_m, block_n, ctx.num_ranks, variant)
    if locks.dtype != torch.int64 and not (variant in ("spinlock", "atomic") and locks.dtype == torch.int32):
        raise ValueError(f"locks of {variant} are int64, not {locks.dtype}: see iris_triton.tiles.make_locks")
    if not locks.is_contiguous():
        raise ValueError("locks must be contiguous")
    if locks.numel() < words:
        raise ValueError(
            f"locks have {locks.numel()} words, but {variant} on {M} x {N} elements in tiles of {block_m} x {block_n} "
            f"needs {words} for {ctx.num_ranks} ranks: see iris_triton.tiles.make_locks"
        )
    if words and not ctx.is_symmetric(locks):
        raise NotOnHeapError("locks must lie on the symmetric heap: see iris_triton.tiles.make_locks")
