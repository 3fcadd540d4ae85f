"""Waits between ranks, with what the kit has not: many rounds with random delays, and deadlocks.

The kit signals, compares, adds, meets, and gives up, on ranks of tests/kit, tests/gluon and tests/gpu.
"""

import contextlib
import os
import random
import time
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from delays import late_after_signals
from jobs_common import in_language
from rank_counts import languages, rank_counts

from iris_core import Iris
from iris_triton import DeviceContext
from iris_triton.interpreter import DeadlockError, configured
from iris_triton.language.blocks import lanes  # so that Gluon can compile the kernels, too: tests/gluon

BLOCK = 128


@triton.jit
def serve(
    inbox, arrived, granted, out, context, rank: tl.constexpr, world: tl.constexpr, rounds, LANES: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Rank 0 takes from whoever has sent, and lets that rank send again."""
    ctx = DeviceContext.initialize(context, rank, world)
    i = lanes(BLOCK)
    if rank > 0:
        for r in range(rounds):
            ctx.store(inbox + rank * BLOCK + i, 1000 * (r + 1) + rank, 0)
            ctx.signal(arrived + rank, r + 1, 0)
            ctx.wait(granted, r + 1)
    else:
        for taken in range(rounds * (world - 1)):
            sender = ctx.wait_any(arrived + lanes(LANES), 0, "gt")
            turn = ctx.load_acquire(arrived + sender)
            holds = ctx.test(arrived + sender, turn, "eq") & ~ctx.test(arrived + sender, turn + 1)
            tl.store(out + taken * BLOCK + i, tl.load(inbox + sender * BLOCK + i) * holds.to(tl.int32))
            tl.store(arrived + sender, 0)
            ctx.signal(granted, turn, sender)


def run_serve(rounds: int, shared_file: str, device: str = "cpu") -> list[int]:
    """Return what rank 0 took, an element of each block; blocks of different elements are an error."""
    with Iris("4MiB", device=device) as ctx:
        rank, world, lanes = ctx.cur_rank, ctx.num_ranks, triton.next_power_of_2(ctx.num_ranks)
        inbox, arrived = ctx.zeros(world, BLOCK, dtype=torch.int32), ctx.zeros(lanes, dtype=torch.int64)
        granted = ctx.zeros(1, dtype=torch.int64)
        out = torch.zeros(rounds * (world - 1), BLOCK, dtype=torch.int32, device=ctx.device)
        ctx.barrier()
        late = late_after_signals(shared_file, rank, world, 0.1) if device == "cpu" else contextlib.nullcontext()
        with late:
            serve[(1,)](inbox, arrived, granted, out, ctx.get_device_context(), rank, world, rounds, lanes, BLOCK=BLOCK)
            ctx.barrier()
        assert (out == out[:, :1]).all()
        return out[:, 0].tolist()


@triton.jit
def token_kernel(context, flags, turn, rank, world: tl.constexpr, STARTS: tl.constexpr):
    """Pass a token round: each rank waits for the one before, and the first one starts, or not."""
    ctx = DeviceContext.initialize(context, rank, world)
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
    """Ranks are late by themselves, between launches; in one turn no rank starts.  Only a proof ends a wait."""
    said = None
    with mock.patch.dict(os.environ):
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
        assert (said, int(flags.item())) == ((bad, rank, 1, True), turns)


@pytest.mark.parametrize(*languages(rank_counts(3, seldom=[2, 4])))
def test_whoever_comes_is_served(pool, language, num_ranks, device, tmp_path):
    """With ranks that are late at random: what was signalled is there behind wait_any, load_acquire and test."""
    rounds = 10 if device == "cpu" else 200
    args = language, run_serve, rounds, str(tmp_path / "changes"), device
    served, *_ = pool.run(in_language, num_ranks, *args)
    for sender in range(1, num_ranks):  # once a round, and its rounds in order
        assert [value for value in served if value % 1000 == sender] == [1000 * (r + 1) + sender for r in range(rounds)]
    assert len(served) == rounds * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 4))])
def test_a_deadlock_of_all_ranks(pool, num_ranks):
    """It is an error of all of them at once; a slow rank is none."""
    assert pool.run(tokens, num_ranks, num_ranks, 3, 2) == [None] * num_ranks
