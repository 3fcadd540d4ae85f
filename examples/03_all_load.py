"""Every rank reads the numbers of all ranks and adds them up: an all-reduce by loads alone.

All loads of a block are under way at the same time, since none needs another's result.  Each rank begins with its own
numbers and goes on with those of the next ranks, so that the ranks do not all read rank 0 first.

    python examples/03_all_load.py [ranks]
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
def add_up(numbers, total, numel, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, WORLD)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    acc = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(WORLD):
        acc += ctx.load(numbers + i, (ctx.rank + step) % WORLD, mask=mask)
    tl.store(total + i, acc, mask=mask)


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        numel = 1 << 24 if on_gpu(ctx) else 5000
        numbers = ctx.full((numel,), 2.0**rank)  # powers of 2: each sum of them tells who is in it
        total = torch.empty(numel, device=ctx.device)

        def launch():
            grid = (triton.cdiv(numel, BLOCK),)
            add_up[grid](numbers, total, numel, ctx.get_device_context(), WORLD=world, BLOCK=BLOCK)

        ctx.barrier()  # all numbers are there
        launch()
        time = timing(ctx, launch, nbytes=4 * numel * (world - 1))
        ctx.barrier()  # all have read
        assert (total == 2.0**world - 1).all()
        return f"rank {rank} of {world} on {ctx.device} added {numel} numbers of {world} ranks{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 4)))
