"""A sum that travels around all ranks, with DeviceContext: ranks and heap bases are filled in.

Rank 0 sends its blocks to rank 1, which adds its own and sends them on, until rank 0 has the sum.  Blocks travel
independently: while rank 1 works on the second, rank 2 has the first.  `put_signal` copies a block and raises its flag
on the receiver.  Flags only grow, by one for each turn, so nothing is reset between the turns.

IRIS_DEVICE_TIMEOUT=60 bounds every wait of a DeviceContext to 60 seconds; `ctx.barrier()` raises when one took longer.

    python examples/12_message_passing_context.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl

import iris_core
from iris_triton import DeviceContext

BLOCK, BLOCKS, TURNS = 512, 5, 3


@triton.jit(do_not_specialize=["turn"])
def travel(numbers, inbox, arrived, turn, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each block; at the end the inbox of rank 0 has the sum."""
    ctx = DeviceContext.from_tensor(context, WORLD)
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    following = (ctx.rank + 1) % WORLD
    if ctx.rank == 0:
        ctx.put_signal(numbers + i, inbox + i, arrived + block, turn, following)
        ctx.wait(arrived + block, turn)
    else:
        ctx.wait(arrived + block, turn)
        ctx.store(inbox + i, tl.load(inbox + i) + tl.load(numbers + i), following)
        ctx.signal(arrived + block, turn, following)


def main():
    with iris_core.Iris(heap_size="1MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        inbox = ctx.zeros(BLOCKS * BLOCK)
        arrived = ctx.zeros(BLOCKS, dtype=torch.int64)
        count = torch.arange(BLOCKS * BLOCK, dtype=torch.float32, device=ctx.device)
        ctx.barrier()
        for turn in range(1, TURNS + 1):
            numbers = count * (rank + turn)
            travel[(BLOCKS,)](numbers, inbox, arrived, turn, ctx.get_device_context(), WORLD=world, BLOCK=BLOCK)
            ctx.barrier()
            if rank == 0:
                assert torch.equal(inbox, count * sum(each + turn for each in range(world)))
            ctx.barrier()  # rank 0 has looked at its inbox before the next sum arrives there
        return f"rank {rank} of {world} on {ctx.device}: the sum came around {TURNS} times"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 3)))
