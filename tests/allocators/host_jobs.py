"""What test_host_cycles runs on ranks."""

import gc

import torch

from iris_core import Iris
from iris_core.testing.conformance import oracle


def many_cycles(cycles):
    """Allocate and free again and again: sizes that change, drops, a scope and a barrier now and then.

    Returns:
        The heap's figures and the open descriptors before and after, and how many more bytes are mapped.
    """
    with Iris("64MiB", device="cpu", allocator="host") as ctx:

        def run(count):
            for k in range(count):
                x = ctx.heap.allocate((k * 7919) % (64 << 10) + 1, torch.uint8)
                if k % 3 == 2:
                    del x
                elif k % 97:
                    ctx.heap.free(x)
                else:
                    ctx.heap.free(x)
                    with ctx.scope():
                        ctx.heap.allocate(3 << 20, torch.uint8)[0] = 1
                if k % 200 == 199:
                    ctx.barrier()
            for _ in range(3):
                ctx.barrier()

        def figures():
            gc.collect()
            stats = ctx.stats()
            counts = stats.allocated, stats.pending, stats.num_blocks, stats.free, stats.largest_free, stats.committed
            return counts, oracle.open_descriptors()

        run(1000)  # what torch keeps is there
        before, mapped = figures(), oracle.mapped_bytes()
        run(cycles)
        return before, figures(), oracle.mapped_bytes() - mapped
