"""Rank 0 sends blocks to rank 1 through one slot: flags for "full", credits for "empty".

Uses the functional API, which takes the ranks and the heap bases.  Run it alone, or under torchrun:

    python examples/11_message_passing_put.py
    torchrun --nproc-per-node 2 examples/11_message_passing_put.py
"""

import os

import torch
import triton
import triton.language as tl

import iris_core
import iris_triton as iris

BLOCK, MESSAGES = 1024, 8
TIMEOUT_NS = tl.constexpr(60 * 10**9)  # then `wait` gives up, and the numbers below will be wrong


@triton.jit
def produce(source, slot, full, empty, heap_bases, rank, peer, messages, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for m in range(messages):
        iris.wait(empty, m, timeout_ns=TIMEOUT_NS)  # the consumer has read message m - 1
        iris.put(source + m * BLOCK + i, slot + i, rank, peer, heap_bases)
        iris.signal(full, m + 1, rank, peer, heap_bases)


@triton.jit
def consume(result, slot, full, empty, heap_bases, rank, peer, messages, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    for m in range(messages):
        iris.wait(full, m + 1, timeout_ns=TIMEOUT_NS)
        tl.store(result + m * BLOCK + i, tl.load(slot + i))
        iris.signal(empty, m + 1, rank, peer, heap_bases)


def main() -> str:
    with iris.iris(heap_size=1 << 20) as ctx:
        rank = ctx.get_rank()
        slot = ctx.zeros(BLOCK)
        full, empty = ctx.zeros(1, dtype=torch.int64), ctx.zeros(1, dtype=torch.int64)
        data = torch.arange(MESSAGES * BLOCK, dtype=torch.float32, device=ctx.device)
        ctx.barrier()
        arguments = (slot, full, empty, ctx.get_heap_bases(), rank)
        result = torch.zeros_like(data)
        if rank == 0:
            produce[(1,)](data, *arguments, 1, MESSAGES, BLOCK=BLOCK)
        elif rank == 1:
            consume[(1,)](result, *arguments, 0, MESSAGES, BLOCK=BLOCK)
        ctx.barrier()
        if rank == 1:
            assert torch.equal(result, data)
            return f"rank 1 received {MESSAGES} messages of {BLOCK} numbers"
        return f"rank {rank} is done"


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun has started the ranks
        print(main())
    else:
        print("\n".join(iris_core.run(main, 2)))
