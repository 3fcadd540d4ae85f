"""Rank jobs of test_threads."""

import threading

import torch
from jobs_ccl import on_heap, said_by


@on_heap("16MiB")
def from_new_threads(ctx):
    """The first call of each kind, and later ones, each from a thread of its own; on GPUs its current device is 0."""
    results, errors = [], []

    def reduce():
        y = torch.zeros(1000, device=ctx.device)
        ctx.ccl.all_reduce(y, torch.full((1000,), ctx.cur_rank + 1.0, device=ctx.device))
        results.append(y.unique().tolist())

    def on_the_heap():
        x, y = ctx.ones(1000), ctx.zeros(1000)
        ctx.device_barrier()
        ctx.ccl.all_reduce(y, x, async_op=True).wait()
        ctx.ccl.barrier()
        results.append(y.unique().tolist())

    def multiply():
        x, y = ctx.ones(32, 32), ctx.zeros(32, 32)
        ctx.ops.matmul_all_reduce(y, x, x)
        ctx.barrier()
        results.append(y.unique().tolist())

    for call in (reduce, on_the_heap, multiply) * 2:
        thread = threading.Thread(target=lambda call=call: errors.append(said_by(call)))
        thread.start()
        thread.join()
    return results, errors
