"""Jobs of test_launch: ranks that return, raise, die and hang.  Only those that use torch import it."""

import atexit
import multiprocessing
import os
import re
import sys
import time

from iris_core.world import connect


def rank():
    return int(os.environ["RANK"])


def describe(word):
    world = connect(None, 30.0)
    world.barrier()
    world.close()
    return word, world.rank, world.world_size, os.environ["RANK"], os.environ["LOCAL_RANK"]


def all_of_it(word):
    """What a rank may do, with helpers of its own, as a DataLoader has."""
    with multiprocessing.get_context("fork").Pool(1) as helpers:
        lengths = helpers.map(len, ["a", "bc"])
    return *describe(word), os.environ["IRIS_X_TEST"], lengths


def raise_on(number):
    if rank() == number:
        raise ValueError(f"deliberate, on {number}, {'with' if 'torch' in sys.modules else 'without'} torch")
    connect(None, 30.0)  # the others wait for a rank that does not come
    return "ok"


def die_on(number, by_signal=False):
    if rank() == number:
        os.abort() if by_signal else os._exit(7)
    connect(None, 30.0)
    return "ok"


def end_slowly(number):
    """A process that ends closes its connections first."""
    world = connect(None, 30.0)
    if rank() == number:
        os.closerange(3, 1024)
        time.sleep(0.3)
        os._exit(7)
    world.barrier()


def hang_on(number):
    if rank() == number:
        time.sleep(600)
    return "ok"


def process_id():
    return os.getpid()


def unpicklable():
    return lambda: None


def fork_and_use(device):
    """A child that was forked off a rank is refused, whatever it does; the ranks must not notice."""
    import gc

    import torch
    from jobs_common import said_by

    from iris_core import Iris

    with Iris("1MiB", device=device) as ctx:
        x, pid, heap, ccl = ctx.ones(4), os.getpid(), ctx.heap, ctx.ccl
        ccl.all_reduce(x, x)
        ctx.barrier()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            uses = {
                "barrier": ctx.barrier, "zeros": lambda: ctx.zeros(4),
                "allocate": lambda: heap.allocate(4, torch.float32), "free": lambda: ctx.free(x),
                "all_reduce": lambda: ccl.all_reduce(x, x), "broadcast": lambda: ctx.broadcast(1),
                "context": ctx.get_device_context, "world": ctx._world.barrier, "peers": heap.check_peers,
                "device_barrier": ctx.device_barrier,
            }  # fmt: skip
            try:  # whatever happens, the child must not go on as a rank
                said = {name: said_by(use) for name, use in uses.items()}
                refused = re.compile(rf"HeapClosedError: .*process {pid}\b", re.DOTALL)
                ctx.close()
                os.write(writing, repr([each for each in said.items() if not refused.match(each[1])]).encode())
                del uses, ctx, heap, ccl, x
                gc.collect()
                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        said = os.read(reading, 1000).decode()
        ctx.barrier()
        x.fill_(ctx.cur_rank + 1)
        ccl.all_reduce(x, x)
        ctx.barrier()
        return said, x[0].item()
