"""Benchmarks that test_session runs on ranks."""

import ctypes
import pathlib
import sys
import time

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
from rma_signals import EngineTurns

from iris_core import bench
from iris_triton import DeviceContext

ARRAY = 8


@triton.jit
def add_to_all(sums, value, context, WORLD: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, WORLD)
    for peer in range(WORLD):
        ctx.atomic_add(sums, value, peer)


@bench.register
@bench.axis("nbytes", lambda options: [4 * options.num_ranks])
def exchange(state, ctx):
    """Ranks take different times; one provider leaves wrong data on rank 1."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    out = ctx.zeros(ARRAY)
    before = ctx.stats().num_blocks
    state.set_bytes(state["nbytes"])
    state.set_repeat(1)
    state.set_timer("reported")

    def call():
        out.fill_(rank)
        return 0.002 * (rank + 1)

    def spoil():
        out.fill_(-1)

    state.provider("right", call, prepare=spoil, check=lambda: bool((out == rank).all()))
    state.provider("wrong", call, prepare=spoil, check=lambda: bool((out == 0).all()))
    state.provider("alone", call if rank == world - 1 else None, prepare=spoil, check=None, baseline="right")
    state.add_counter("blocks", before)


@bench.register
@bench.axis("point", [0, 1])
def frees(state, ctx):
    """Each point may use nearly the whole heap."""
    x = ctx.zeros(ctx.heap_size // 2, dtype=torch.uint8)
    state.provider("a", lambda: None, check=lambda: x.numel() == ctx.heap_size // 2)


@bench.register(by_default=False)
def resets(state, ctx):
    """Each call adds to what the preamble has zeroed; one rank's data comes late, and each rank's preamble may be."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    sums, seen = ctx.zeros(1, dtype=torch.int64), []

    def preamble():
        seen.append(int(sums))  # the sum of the last call, which is over everywhere
        sums.zero_()

    def call():
        if rank == len(seen) % world:
            time.sleep(0.02)
        add_to_all[(1,)](sums, 1, ctx.get_device_context(), world)

    def check():
        assert seen[0] == 0, seen
        assert set(seen[1:]) == {world}, seen

    bench.do_bench(call, ctx.barrier, preamble, n_warmup=1, n_repeat=6)
    check()
    state.set_repeat(4)
    state.exec(call, preamble_fn=preamble, check=check)


@bench.register
def turns(state, ctx):
    """Three round trips by signals of the copy engine, for which the host's memory copy stands in, from rank 1 to 0."""
    state.set_repeat(2)
    EngineTurns(ctx, 1, 0, 3, ctypes.memmove).declare(state, "copy")


@bench.register(by_default=False)
def hangs(state, ctx):
    """One rank never comes back."""
    state.provider("a", (lambda: time.sleep(600)) if ctx.cur_rank == ctx.num_ranks - 1 else (lambda: None), check=None)
