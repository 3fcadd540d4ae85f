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
from iris_triton.language.blocks import lanes as places
from iris_triton.testing.languages import open_context

BLOCK = 1024
BLOCKS = 4
ROUNDS = 5


@triton.jit
def pass_messages(
    Context: tl.constexpr, context, world_size: tl.constexpr, source, slots, result, flags, credits, rounds,
    num_blocks, BLOCK: tl.constexpr
):  # fmt: skip
    """Send `rounds` times every block of `source` to the next rank; add up what arrives in `result`."""
    ctx = open_context(Context, context, world_size)
    succ = (ctx.rank + 1) % world_size
    pred = (ctx.rank + world_size - 1) % world_size
    program = tl.program_id(0)
    lanes = places(BLOCK)
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
        total = lanes * 0.0  # zeros, in the layout that the language gives the lanes
        for r in range(rounds):
            ctx.wait(flags + slot, r + 1, cmp="ge")
            total += tl.load(slots + block)
            ctx.signal(credits + slot, r + 1, pred)
        tl.store(result + block, total)


def run(ctx, kernel=pass_messages, Context=DeviceContext) -> DemoResult:
    """Run it on every rank of `ctx`, in the language of the kernel, and compare with the sum computed directly."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    numel = BLOCK * BLOCKS
    slots = ctx.zeros(numel, dtype=torch.float32)
    flags, credits = (ctx.zeros(BLOCKS, dtype=torch.int64) for _ in range(2))
    source, came = (torch.linspace(-1, 1, numel) + each for each in (rank, (rank - 1) % world))
    result = torch.full((numel,), float("nan"), device=ctx.device)
    ctx.barrier()
    kernel[(2 * BLOCKS,)](  # one program for each side of each block
        Context, ctx.get_device_context(), world, source.to(ctx.device), slots, result, flags, credits,
        ROUNDS, BLOCKS, BLOCK=BLOCK,
    )  # fmt: skip
    ctx.barrier()
    error = (result.cpu() - came * sum(range(1, ROUNDS + 1))).abs().max().item()
    return DemoResult(error, 1e-4, f"{ROUNDS} rounds x {BLOCKS} blocks of {BLOCK}")
