"""Producer and consumer: each rank sends blocks to the next one and works on what the previous one sends.

One launch per rank holds both sides.  Program i < blocks produces block i for the next rank: it waits until the slot
is empty (a credit from the consumer), puts the block there and raises the slot's flag.  Program blocks + i consumes: it
waits for the flag, works on the block, and returns the credit.  Flags and credits only ever grow, so nothing is reset
between rounds.
"""

import torch
import triton
import triton.language as tl

from iris_core.types import DemoResult
from iris_triton.context import DeviceContext

BLOCK = 1024
BLOCKS = 4
ROUNDS = 5


@triton.jit
def pass_messages(
    source, slots, result, flags, credits, context, rank: tl.constexpr, world_size: tl.constexpr,
    rounds, num_blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """Send `rounds` times every block of `source` to the next rank; add up what arrives in `result`."""
    ctx = DeviceContext.initialize(context, rank, world_size)
    succ = (rank + 1) % world_size
    pred = (rank + world_size - 1) % world_size
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if program < num_blocks:
        block = program * BLOCK + lanes
        for r in range(rounds):
            ctx.wait(credits + program, r, cmp="ge")
            data = tl.load(source + block) * (r + 1)
            ctx.store(slots + block, data, succ)
            ctx.signal(flags + program, r + 1, succ)
    else:
        slot = program - num_blocks
        block = slot * BLOCK + lanes
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for r in range(rounds):
            ctx.wait(flags + slot, r + 1, cmp="ge")
            total += tl.load(slots + block)
            ctx.signal(credits + slot, r + 1, pred)
        tl.store(result + block, total)


def launch(ctx, *tensors) -> None:
    """Launch it on this rank: one program for each side of each block."""
    pass_messages[(2 * BLOCKS,)](
        *tensors, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks, ROUNDS, BLOCKS, BLOCK=BLOCK
    )


def run(ctx, launch=launch) -> DemoResult:
    """Run it on every rank of `ctx` and compare with the sum computed directly.

    `launch` is called with ctx, source, slots, result, flags and credits; that of another language is in iris_gluon.
    """
    rank, world = ctx.cur_rank, ctx.num_ranks
    numel = BLOCK * BLOCKS
    slots = ctx.zeros(numel, dtype=torch.float32)
    flags, credits = (ctx.zeros(BLOCKS, dtype=torch.int64) for _ in range(2))
    source, came = (torch.linspace(-1, 1, numel) + each for each in (rank, (rank - 1) % world))
    result = torch.full((numel,), float("nan"), device=ctx.device)
    ctx.barrier()
    launch(ctx, source.to(ctx.device), slots, result, flags, credits)
    ctx.barrier()
    error = (result.cpu() - came * sum(range(1, ROUNDS + 1))).abs().max().item()
    return DemoResult(error, 1e-4, f"{ROUNDS} rounds x {BLOCKS} blocks of {BLOCK}")
