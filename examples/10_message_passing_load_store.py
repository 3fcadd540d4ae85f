"""Rank 0 computes blocks and stores them into the memory of rank 1, which works on each as soon as it is there.

The least that message passing needs: a store for the data, a flag for "it is there".  `signal` raises the flag after
everything that the program has stored (release), and whoever has seen it by `wait` sees those stores, too (acquire).
Stores alone have no order: without the two, rank 1 might read what was in its memory before.

Uses the functional API, which takes the ranks and the heap bases.

    python examples/10_message_passing_load_store.py
"""

import torch
import triton
import triton.language as tl

import iris_core
import iris_triton as iris

BLOCK, BLOCKS = 1024, 6
TIMEOUT_NS = tl.constexpr(60 * 10**9)  # then `wait` gives up and returns what it saw last


@triton.jit
def produce(source, inbox, flags, heap_bases, rank, consumer, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    iris.store(inbox + i, tl.load(source + i) * 2, rank, consumer, heap_bases)
    iris.signal(flags + block, 1, rank, consumer, heap_bases)


@triton.jit
def consume(inbox, result, flags, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    i = block * BLOCK + tl.arange(0, BLOCK)
    seen = iris.wait(flags + block, 1, timeout_ns=TIMEOUT_NS)
    tl.store(result + i, tl.load(inbox + i) + 1, mask=seen == 1)


def main():
    with iris_core.Iris(heap_size="1MiB") as ctx:
        rank = ctx.cur_rank
        inbox = ctx.zeros(BLOCKS * BLOCK)
        flags = ctx.zeros(BLOCKS, dtype=torch.int32)
        source = torch.arange(BLOCKS * BLOCK, dtype=torch.float32, device=ctx.device)
        result = torch.full_like(source, float("nan"))
        ctx.barrier()  # flags and inbox are zero on both
        if rank == 0:
            produce[(BLOCKS,)](source, inbox, flags, ctx.get_heap_bases(), rank, 1, BLOCK=BLOCK)
        else:
            consume[(BLOCKS,)](inbox, result, flags, BLOCK=BLOCK)
        ctx.barrier()
        if rank == 0:
            return f"rank 0 sent {BLOCKS} blocks of {BLOCK} numbers"
        assert torch.equal(result, source * 2 + 1)
        return f"rank 1 used {BLOCKS} blocks of {BLOCK} numbers"


if __name__ == "__main__":
    print("\n".join(iris_core.run(main, 2)))
