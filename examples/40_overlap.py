"""A sum over all ranks that computes while its data arrives: some programs of a kernel send, the others add up.

python examples/40_overlap.py [ranks] [trace.json]
"""

import sys

import torch
import triton
import triton.language as tl

import iris_core
from iris_triton import DeviceContext

CHUNKS, BLOCK = 6, 512


@triton.jit
def add_up(
    x, inbox, arrived, out, turn, context, rank: tl.constexpr, world_size: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, TRACING: tl.constexpr
):  # fmt: skip
    ctx = DeviceContext.initialize(context, rank, world_size, tracing=TRACING)
    i = tl.arange(0, BLOCK)
    if tl.program_id(0) < CHUNKS:  # sends one chunk to every peer, the next rank first
        chunk = tl.program_id(0)
        mine = rank * CHUNKS + chunk
        for step in tl.static_range(1, world_size):
            peer = (rank + step) % world_size
            there = inbox + mine * BLOCK + i
            ctx.put_signal(x + chunk * BLOCK + i, there, arrived + mine, turn, peer)
    else:  # adds one chunk up, in the order in which it arrives
        chunk = tl.program_id(0) - CHUNKS
        total = tl.load(x + chunk * BLOCK + i)
        for step in tl.static_range(1, world_size):
            theirs = (rank + world_size - step) % world_size * CHUNKS + chunk
            ctx.wait(arrived + theirs, turn)
            total += tl.load(inbox + theirs * BLOCK + i)
        tl.store(out + chunk * BLOCK + i, total)


def main(trace: str = "") -> str:
    with iris_core.Iris(heap_size="4MiB") as ctx:
        rank, world_size, numel = ctx.cur_rank, ctx.num_ranks, CHUNKS * BLOCK
        inbox = ctx.empty(world_size * numel)
        arrived = ctx.zeros(world_size * CHUNKS, dtype=torch.int32)
        x = torch.arange(numel, dtype=torch.float32, device=ctx.device)
        if trace:
            ctx.tracing.enable(10_000)
        ctx.barrier()
        for turn in (1, 2, 3):  # the flags only grow, so nothing is reset
            out = torch.zeros_like(x)
            add_up[(2 * CHUNKS,)](
                x * (rank + turn), inbox, arrived, out, turn, ctx.get_device_context(), rank, world_size, CHUNKS, BLOCK,
                bool(trace),
            )  # fmt: skip
            ctx.barrier()  # all have read their inboxes
            assert torch.equal(out, x * sum(each + turn for each in range(world_size)))
        if trace:
            ctx.tracing.export(trace, merge=True)
        return f"rank {rank} of {world_size} on {ctx.device}: the sum is right 3 times"


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    print("\n".join(iris_core.run(main, ranks, *sys.argv[2:3])))
