"""A program in the manner of the reference system, from its imports to its end; the line of as_iris is ours.

It allocates without barriers, stores and launches, has int() in kernels, do_bench with a preamble, and the paths of
that system.  Run it with `python ported_program.py 4 file:///tmp/store`.
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
from iris.ccl import Config
from iris.ccl.all_gather import all_gather
from iris.ccl.utils import chiplet_transform_chunked, extract_group_info
from iris.device.utils import read_realtime
from iris.host.logging import INFO, logger
from iris.host.platform.hip import get_num_xcc
from iris.host.platform.utils import do_bench, is_simulation_env
from iris.host.tracing.events import TraceEvent
from iris.mem.triton.context import Context
from iris.ops.all_gather_matmul_hbm_buffer import all_gather_matmul_hbm_buffer
from iris.ops.config import FusedConfig
from iris.ops.matmul_reduce_scatter import matmul_reduce_scatter

BLOCK = 64


@triton.jit
def put_to_partner(data, results, n, cur_rank: tl.constexpr, num_ranks: tl.constexpr, heap_bases, BLOCK: tl.constexpr):
    """Only the partner's memory is written."""
    partner = int((cur_rank + num_ranks // 2) % num_ranks)
    pid = chiplet_transform_chunked(tl.program_id(0), tl.num_programs(0), 1, 1)
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    iris.put(data + offsets, results + offsets, cur_rank, partner, heap_bases, mask=offsets < n)


@triton.jit
def add_everywhere(results, ticks, n, context, cur_rank: tl.constexpr, num_ranks: tl.constexpr, BLOCK: tl.constexpr):
    ctx = Context.initialize(context, cur_rank, num_ranks, tracing=True)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin = read_realtime()
    handle = ctx.tracing.record_event_start(TraceEvent().compute, cur_rank, results + offsets, 0, 0, offsets < n)
    for remote in range(num_ranks):
        ctx.atomic_add(results + offsets, 1.0, remote, mask=offsets < n, sem="relaxed", scope="sys")
    ctx.tracing.record_event_end(handle)
    tl.store(ticks + tl.program_id(0), read_realtime() - begin)


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
    _benchmark(shmem, rank, world)
    _collectives(shmem, rank, world)
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


def _benchmark(shmem, rank, world):
    """The preamble runs before every call: what is left is one call's sum."""
    results = shmem.zeros(BLOCK)
    ticks = shmem.zeros(1, dtype=torch.int64)
    shmem.tracing.enable(max_events=100)
    run = lambda: add_everywhere[(1,)](results, ticks, BLOCK, shmem.get_device_context(), rank, world, BLOCK)
    times = do_bench(run, shmem.barrier, lambda: results.zero_(), n_warmup=1, n_repeat=3, return_mode="all")
    assert len(times) == 3
    assert min(times) > 0
    shmem.barrier()
    assert (results == float(world)).all()
    assert int(ticks) > 0
    assert int(shmem.tracing.op_index_counter) == 5 * world  # one call, a warm-up and three that are timed
    assert int(shmem.tracing.trace_counter) == 5 * world + 5
    recorded = shmem.tracing.trace_buffers["event_id"][: int(shmem.tracing.trace_counter)]
    assert int((recorded == 2048).sum()) == 5  # compute


def _collectives(shmem, rank, world):
    m, n, k = 32 * world, 32, 32 * world
    inp, out = shmem.full((8, 64), float(rank)), shmem.zeros((8 * world, 64))
    all_gather(out, inp, shmem, config=Config(comm_sms=8, block_size_m=32))
    assert out[:, 0].tolist() == [float(r) for r in range(world) for _ in range(8)]
    assert tuple(extract_group_info(None, shmem))[:3] == (rank, rank, world)

    shard, weight = shmem.full((m, k // world), float(rank + 1)), shmem.ones((k, n))
    product = shmem.zeros((m, n))
    all_gather_matmul_hbm_buffer(
        shmem, product, shard, weight, config=FusedConfig(block_size_m=32, block_size_n=32, block_size_k=32),
        k_per_flag=1, fetch_block_m=32, fetch_block_k=32, num_fetch_stages=1, staged_a_layout="m_contiguous",
    )  # fmt: skip
    assert (product == float(k // world * world * (world + 1) // 2)).all()

    A, tiles = shmem.ones((m, k)), shmem.zeros((m, n))
    matmul_reduce_scatter(shmem, tiles, A, weight, config=FusedConfig(block_size_m=32, block_size_n=32))
    mine = tiles[tiles != 0]
    assert mine.numel() == m * n // world
    assert (mine == float(k * world)).all()
    shmem.barrier()


if __name__ == "__main__":
    mp.spawn(fn=_worker, args=(int(sys.argv[1]), sys.argv[2]), nprocs=int(sys.argv[1]), join=True)
