"""All ranks count their numbers into one histogram on rank 0, with remote atomics."""

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


def main() -> list[int]:
    with iris_core.Iris(heap_size="1MiB") as ctx:
        histogram = ctx.zeros(BINS, dtype=torch.int32)
        generator = torch.Generator().manual_seed(ctx.cur_rank)
        values = torch.randint(0, BINS, (NUMEL,), generator=generator, dtype=torch.int32).to(ctx.device)
        ctx.barrier()
        grid = (triton.cdiv(NUMEL, BLOCK),)
        count[grid](values, histogram, NUMEL, ctx.get_device_context(), ctx.cur_rank, ctx.num_ranks, BLOCK=BLOCK)
        ctx.barrier()
        return histogram.tolist()


if __name__ == "__main__":
    histogram = iris_core.run(main, 3)[0]
    assert sum(histogram) == 3 * NUMEL
    print(histogram)
