"""Rank jobs of test_threads."""

import threading

import torch

from iris_core import Iris


def from_new_threads(device):
    """The first call of each kind, and later ones, each from a thread of its own; on GPUs its current device is 0."""
    results, errors = {}, []
    with Iris("16MiB", device=device) as ctx:

        def reduce(name):
            y = torch.zeros(1000, device=ctx.device)
            ctx.ccl.all_reduce(y, torch.full((1000,), ctx.cur_rank + 1.0, device=ctx.device))
            results[name] = y.unique().tolist()

        def on_the_heap(name):
            x, y = ctx.ones(1000), ctx.zeros(1000)
            ctx.device_barrier()
            ctx.ccl.all_reduce(y, x, async_op=True).wait()
            ctx.ccl.barrier()
            results[name] = y.unique().tolist()

        def multiply(name):
            x, y = ctx.ones(32, 32), ctx.zeros(32, 32)
            ctx.ops.matmul_all_reduce(y, x, x)
            ctx.barrier()
            results[name] = y.unique().tolist()

        def run(call, name):
            try:
                call(name)
            except Exception as error:  # noqa: BLE001 - a thread's errors are the test's
                errors.append(f"{type(error).__name__}: {error}")

        for number, call in enumerate((reduce, on_the_heap, multiply, reduce, on_the_heap, multiply)):
            thread = threading.Thread(target=run, args=(call, f"{number} {call.__name__}"))
            thread.start()
            thread.join()
        ctx.barrier()
    return results, errors
