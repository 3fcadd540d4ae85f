"""Every rank writes its numbers into the memory of the next rank."""

import torch
import triton
import triton.language as tl

import iris_core
from iris_triton import DeviceContext


@triton.jit
def send(source, inbox, numel, context, rank, world_size: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context, rank, world_size)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < numel
    ctx.store(inbox + i, tl.load(source + i, mask=mask), (rank + 1) % world_size, mask=mask)


def main():
    with iris_core.Iris(heap_size="64MiB") as ctx:
        rank, world_size = ctx.cur_rank, ctx.num_ranks
        inbox = ctx.zeros(1000)  # on the symmetric heap: at the same offset on every rank
        source = torch.full((1000,), float(rank), device=ctx.device)
        ctx.barrier()
        context, grid = ctx.get_device_context(), (triton.cdiv(1000, 256),)
        send[grid](source, inbox, 1000, context, rank, world_size, BLOCK=256)
        ctx.barrier()
        assert (inbox == (rank - 1) % world_size).all()
        return f"rank {rank} of {world_size} on {ctx.device} got {inbox[0].item():.0f}"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, 4)))
