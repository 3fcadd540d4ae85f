"""Every rank stores its numbers into the memory of all ranks: an all-gather by stores alone.

A number is read once and stored once for each rank.  Stores are not waited for, so many are under way; the barrier
behind the kernel says when they have arrived.  Each rank has a row of its own on every rank, so no two write to the
same place.

    python examples/04_all_store.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl
from example_tools import on_gpu, timing

import iris_core
from iris_triton import DeviceContext

BLOCK = 1024


@triton.jit
def spread(numbers, rows, numel, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, WORLD)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    values = tl.load(numbers + i, mask=mask)
    row = rows + ctx.rank.to(tl.int64) * numel
    for step in tl.static_range(1, WORLD + 1):  # the next rank first, this one last
        ctx.store(row + i, values, (ctx.rank + step) % WORLD, mask=mask)


def main():
    with iris_core.Iris(heap_size="1GiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        numel = 1 << 23 if on_gpu(ctx) else 5000  # the largest number stays below 2**24, up to which float32 counts
        rows = ctx.full((world, numel), -1.0)
        numbers = torch.arange(numel, dtype=torch.float32, device=ctx.device) + rank

        def launch():
            grid = (triton.cdiv(numel, BLOCK),)
            spread[grid](numbers, rows, numel, ctx.get_device_context(), WORLD=world, BLOCK=BLOCK)

        ctx.barrier()  # all rows are filled with -1: what arrives from here on is not overwritten
        launch()
        ctx.barrier()  # all numbers have arrived
        for source in range(world):
            assert torch.equal(rows[source], numbers - rank + source), f"row {source} is wrong"
        time = timing(ctx, launch, nbytes=4 * numel * (world - 1))
        return f"rank {rank} of {world} on {ctx.device} has {world} rows of {numel} numbers{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 4)))
