"""A program in the manner of AMD's Iris, from its imports to its end; the line of as_iris is ours.

It allocates without barriers, stores and launches, has int() in kernels, and the paths of that system.  Run it with
`python ported_program.py 4 file:///tmp/store`.
"""

import random
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
import triton.language as tl

import iris_triton.as_iris
import iris
from iris.ccl.utils import chiplet_transform_chunked
from iris.host.logging import INFO, logger
from iris.host.platform.hip import get_num_xcc
from iris.host.platform.utils import is_simulation_env

BLOCK = 64


@triton.jit
def put_to_partner(data, results, n, cur_rank: tl.constexpr, num_ranks: tl.constexpr, heap_bases, BLOCK: tl.constexpr):
    """Only the partner's memory is written."""
    partner = int((cur_rank + num_ranks // 2) % num_ranks)
    pid = chiplet_transform_chunked(tl.program_id(0), tl.num_programs(0), 1, 1)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    iris.put(data + offsets, results + offsets, cur_rank, partner, heap_bases, mask=offsets < n)


def _worker(local_rank, world_size, init_url):
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend=backend, init_method=init_url, world_size=world_size, rank=local_rank)
    if not is_simulation_env():
        torch.cuda.set_device(iris.get_device_id_for_rank(local_rank))
    torch.manual_seed(0)
    shmem = iris.iris(1 << 23, allocator_type="torch")
    rank, world = shmem.get_rank(), shmem.get_num_ranks()
    assert logger.level == INFO
    assert shmem.heap_size == 1 << 23
    assert shmem.get_device().type == ("cpu" if is_simulation_env() else "cuda")
    assert get_num_xcc() >= 1
    _messages(shmem, rank, world)
    shmem.info(f"rank {rank} is done")
    shmem.barrier()
    dist.destroy_process_group()


def _messages(shmem, rank, world):
    """Allocations are the only barriers in front of the launch."""
    n = 5 * BLOCK - 3
    for turn in range(10):
        time.sleep(random.Random(turn * world + rank).random() / 20)
        data = shmem.full((n,), float(100 * turn + rank))
        results = shmem.zeros(n)
        put_to_partner[(triton.cdiv(n, BLOCK),)](data, results, n, rank, world, shmem.get_heap_bases(), BLOCK)
        shmem.barrier()
        assert (results == float(100 * turn + (rank - world // 2) % world)).all(), turn


if __name__ == "__main__":
    mp.spawn(fn=_worker, args=(int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]), join=True)
