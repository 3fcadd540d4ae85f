"""A program in the manner of the reference system: ranks by mp.spawn, nothing closed at the end.

Only the line `import iris_triton.as_iris` is ours.  Run it with
`python ported_spawn.py 2 tcp://127.0.0.1:29500`; with IRIS_LOG_LEVEL=INFO it logs a line for each rank.
"""

import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl

import iris_triton.as_iris
import iris


@triton.jit
def add_everywhere(x, n, cur_rank: tl.constexpr, world: tl.constexpr, heap_bases, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for remote in range(world):
        iris.atomic_add(x + offsets, 1.0, cur_rank, remote, heap_bases, mask=offsets < n, sem="relaxed", scope="sys")


def _worker(local_rank, world_size, init_url, heap_size):
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend=backend, init_method=init_url, world_size=world_size, rank=local_rank)
    shmem = iris.iris(heap_size)
    x = shmem.zeros(1000, dtype=torch.float32)
    shmem.barrier()
    add_everywhere[(8,)](x, 1000, shmem.get_rank(), shmem.get_num_ranks(), shmem.get_heap_bases(), 128)
    shmem.barrier()
    shmem.info(f"sum {x.sum().item():g}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(fn=_worker, args=(int(sys.argv[1]), sys.argv[2], 1 << 20), nprocs=int(sys.argv[1]), join=True)
