"""Rank jobs: kernels that wait for each other for good, and kernels that only wait for a slow rank."""

import os
import random
import time
import unittest.mock

import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core import Iris
from iris_triton.interpreter import DeadlockError, configured


@triton.jit
def token_kernel(context, flags, turn, rank, world: tl.constexpr, STARTS: tl.constexpr):
    """Pass a token round: each rank waits for the one before, and the first one starts, or not."""
    ctx = iris.DeviceContext.initialize(context, rank, world)
    if tl.program_id(0) == 0:
        if STARTS:
            ctx.signal(flags, turn, (rank + 1) % world)
            ctx.wait(flags, turn)
        else:
            ctx.wait(flags, turn)
            ctx.signal(flags, turn, (rank + 1) % world)
    else:
        ctx.wait(flags, turn)


def tokens(seed, turns, bad):
    """Ranks are late by themselves, between launches; in one turn nobody starts.  Only a proof ends a wait.

    Returns turn, rank and last value of the error, whether its notes name the rank, and the last token.
    """
    said = None
    with unittest.mock.patch.dict(os.environ):
        os.environ.pop("IRIS_DEVICE_TIMEOUT", None)  # which would end the waits
        ctx = Iris("1MiB", device="cpu")
    with ctx, configured(timeout_s=1e6):
        rank, size = ctx.cur_rank, ctx.num_ranks
        own = random.Random(100 * seed + rank)
        flags = ctx.zeros(1, dtype=torch.int64)
        for turn in range(1, turns + 1):
            time.sleep(own.choice([0, 0, 0.1, 0.8, 1.5]))
            starts = rank == turn % size and turn != bad
            try:
                token_kernel[(2,)](ctx.get_device_context(), flags, turn, rank, size, starts)
            except DeadlockError as error:
                named = any(f"rank {rank} of {size}, at " in note for note in error.__notes__)
                said = turn, error.rank, error.last_value, named
                ctx.barrier()
        ctx.barrier()
        return said, int(flags.item())
