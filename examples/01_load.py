"""Every rank reads the numbers of the next rank, where they lie.

A load asks nobody: the owner's kernels do not take part, and need not run.  So the reader must know that the numbers
are there, and the owner when they have been read: that is what the two barriers are for.

    python examples/01_load.py [ranks]
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
def fetch(numbers, result, numel, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, WORLD)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    tl.store(result + i, ctx.load(numbers + i, (ctx.rank + 1) % WORLD, mask=mask), mask=mask)


def main():
    with iris_core.Iris(heap_size="256MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        numel = 1 << 24 if on_gpu(ctx) else 5000
        numbers = ctx.empty(numel)  # on the symmetric heap
        numbers.copy_(torch.arange(numel) + rank)
        result = torch.empty(numel, device=ctx.device)

        def launch():
            grid = (triton.cdiv(numel, BLOCK),)
            fetch[grid](numbers, result, numel, ctx.get_device_context(), WORLD=world, BLOCK=BLOCK)

        ctx.barrier()  # all numbers are there
        launch()
        time = timing(ctx, launch, nbytes=4 * numel)
        ctx.barrier()  # all have read; a rank that closed its heap before would take the numbers away
        assert torch.equal(result, torch.arange(numel, dtype=torch.float32, device=ctx.device) + (rank + 1) % world)
        return f"rank {rank} of {world} on {ctx.device} read {numel} numbers of rank {(rank + 1) % world}{time}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 4)))
