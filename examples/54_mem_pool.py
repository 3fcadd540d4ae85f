"""What torch computes within a block lies where peers reach it: a layer whose partial products are added by loads.

    python examples/54_mem_pool.py [ranks]

Each rank has some columns of x and the rows of w that go with them, so every rank's `torch.matmul` is one part of the
sum.  One kernel adds up this rank's rows of all parts, straight from the peers' memory: no copy to a communication
buffer.  torch has memory pools for GPUs only; on the CPU an output on the heap is given to the same operator.
"""

import sys

import torch
import triton
import triton.language as tl

import iris_core
from iris_triton import DeviceContext

ROWS, COLUMNS, BLOCK = 24, 32, 256


@triton.jit
def add_rows(parts, out, numel, context, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.from_tensor(context, WORLD)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    total = tl.zeros((BLOCK,), tl.float32)
    for step in tl.static_range(WORLD):
        peer = (ctx.rank + step) % WORLD
        total += ctx.load(parts + ctx.rank * numel + i, peer, mask=mask, other=0)
    tl.store(out + i, total, mask=mask)


def on_heap(ctx, x, w):
    """Return the product of x and w, on the heap at the same place on all ranks."""
    if not x.is_cuda:
        return torch.matmul(x, w, out=ctx.empty(len(x), w.shape[1]))
    torch.matmul(x, w)  # the workspace that torch keeps for products is made outside of the block
    with ctx.use_mem_pool():
        return torch.matmul(x, w)


def main():
    with iris_core.Iris(heap_size="64MiB") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        drawn = torch.Generator().manual_seed(0)
        x, w = (
            torch.randint(-2, 3, shape, generator=drawn).float().to(ctx.device)
            for shape in ((world * ROWS, world * 16), (world * 16, COLUMNS))
        )
        parts = on_heap(ctx, x.chunk(world, dim=1)[rank].contiguous(), w.chunk(world)[rank])
        assert ctx.is_symmetric(parts)
        out = torch.empty(ROWS, COLUMNS, device=ctx.device)
        ctx.barrier()  # all parts are there
        grid = (triton.cdiv(out.numel(), BLOCK),)
        add_rows[grid](parts, out, out.numel(), ctx.get_device_context(), WORLD=world, BLOCK=BLOCK)
        ctx.barrier()  # all have read
        torch.testing.assert_close(out, (x @ w)[rank * ROWS :][:ROWS])
        return f"rank {rank} of {world} on {ctx.device} added {world} products of torch"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 2)))
