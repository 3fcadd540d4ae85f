"""All ranks count their numbers into one histogram on rank 0, with remote atomics.

Additions of several programs and ranks to one bin come one after the other, and none is lost.  `relaxed` is enough: an
addition hands over nothing but itself, and the histogram is read behind a barrier.

    python examples/05_atomic_add.py [ranks]
"""

import sys

import torch
import triton
import triton.language as tl

import iris_core
from iris_triton import DeviceContext

BINS, NUMEL, BLOCK = 16, 4000, 256


@triton.jit
def count(values, histogram, numel, context, rank: tl.constexpr, world_size: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context, rank, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    bins = tl.load(values + i, mask=mask, other=0)
    ctx.atomic_add(histogram + bins, 1, 0, mask=mask, sem="relaxed")


def numbers_of(rank):
    """What a rank counts."""
    return torch.randint(0, BINS, (NUMEL,), generator=torch.Generator().manual_seed(rank), dtype=torch.int32)


def main():
    with iris_core.Iris(heap_size="1MiB") as ctx:
        histogram = ctx.zeros(BINS, dtype=torch.int32)
        values = numbers_of(ctx.cur_rank).to(ctx.device)
        ctx.barrier()
        grid = (triton.cdiv(NUMEL, BLOCK),)
        count[grid](values, histogram, NUMEL, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks, BLOCK=BLOCK)
        ctx.barrier()
        where = f"rank {ctx.cur_rank} of {ctx.num_ranks} on {ctx.device}"
        if ctx.cur_rank != 0:
            return f"{where} counted {NUMEL} numbers"
        everything = torch.cat([numbers_of(rank) for rank in range(ctx.num_ranks)])
        assert histogram.tolist() == torch.bincount(everything, minlength=BINS).tolist()
        return f"{where} has {histogram.sum()} numbers in {BINS} bins: {histogram.tolist()}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 3)))
