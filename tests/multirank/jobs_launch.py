"""Jobs of test_launch and test_pool: ranks that return, raise, die and hang."""

import os
import time

import torch.distributed as dist


def describe(word):
    return word, dist.get_rank(), dist.get_world_size(), os.environ["RANK"], os.environ["LOCAL_RANK"]


def variable(name):
    return os.environ.get(name)


def raise_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"deliberate, on {rank}")
    dist.barrier()  # the others wait for a rank that does not come
    return "ok"


def die_on(rank):
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()
    return "ok"


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(600)
    return "ok"


def process_id():
    return os.getpid()


def unpicklable():
    return lambda: None


def spawned(rank, num_ranks, device, store, answers):
    """A rank that torch.multiprocessing.spawn has started, with a process group of the program's own."""
    from torch._C._distributed_c10d import FileStore

    from iris_core import Iris

    dist.init_process_group("gloo", store=FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    with Iris("1MiB", device=device) as ctx:
        x = ctx.full((4,), float(rank))
        ctx.barrier()
        answers.put((ctx.cur_rank, ctx.num_ranks, x.sum().item()))
    dist.barrier()  # the program's group is still there after the context
    dist.destroy_process_group()


def start_a_process():
    """A rank may have helpers of its own, as a DataLoader has."""
    from torch.utils.data import DataLoader

    return [batch.tolist() for batch in DataLoader([1, 2, 3, 4], batch_size=2, num_workers=1)]


def fork_and_close(device):
    """A child that was forked off a rank closes the context; the ranks must not notice."""
    from iris_core import Iris

    with Iris("1MiB", device=device) as ctx:
        pid = os.fork()
        if pid == 0:
            ctx.close()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        ctx.barrier()
        return status
