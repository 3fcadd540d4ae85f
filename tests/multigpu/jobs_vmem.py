"""What test_allocators runs on ranks, a GPU each: memory that comes and goes, existing tensors, memory pools."""

import contextlib
import gc
import os

import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core import Iris
from iris_core.errors import HeapExhaustedError, UnsupportedError

MIB = 1 << 20
BLOCK = 1024
I32 = torch.int32


@triton.jit
def pull(x, out, bases, rank: tl.constexpr, peer, n, BLOCK: tl.constexpr):
    """Read `x` of a peer."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, iris.load(x + i, rank, peer, bases, mask=i < n, other=0), mask=i < n)


@triton.jit
def push(x, value, bases, rank: tl.constexpr, peer, n, BLOCK: tl.constexpr):
    """Write `x` of a peer."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    iris.store(x + i, tl.zeros((BLOCK,), tl.int32) + value, rank, peer, bases, mask=i < n)


def free_bytes(ctx):
    """Free memory of this rank's GPU, as nvidia-smi sees it; the same moment on all ranks."""
    ctx.barrier()
    free, _ = torch.cuda.mem_get_info(ctx.target.index)
    ctx.barrier()
    return free


def wrong(ctx, x, expected):
    """For every peer whose copy of `x` is not `expected(rank)` everywhere: its rank and how many elements differ."""
    ctx.barrier()
    out = torch.empty(x.shape, dtype=x.dtype, device=ctx.device)
    problems = []
    for peer in range(ctx.num_ranks):
        out.fill_(-1)
        n = x.numel()
        pull[(triton.cdiv(n, BLOCK),)](x, out, ctx.get_heap_bases(), ctx.cur_rank, peer, n, BLOCK=BLOCK)
        differing = int((out != expected(peer)).sum())
        if differing:
            problems.append(f"rank {ctx.cur_rank} of rank {peer}: {differing} of {n} differ, such as {out.max()}")
    ctx.barrier()
    return problems


def come_and_go(nbytes):
    """Use a part of a heap of 1 TiB and free it.

    Returns:
        What went wrong in the data; how much of the GPU was taken by opening, after allocating, and after freeing.
    """
    problems, taken = [], []
    with Iris("1TiB", device="cuda", allocator="vmem") as ctx:
        rank, right = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
        warm = ctx.zeros(BLOCK, dtype=I32)
        problems += wrong(ctx, warm, lambda peer: 0)  # kernels are loaded
        torch.cuda.empty_cache()  # of what earlier jobs have left
        free = free_bytes(ctx)
        for round_ in range(2):
            x = ctx.full((nbytes // 4,), 10 * round_ + rank, dtype=I32)
            problems += wrong(ctx, x, lambda peer, base=10 * round_: base + peer)
            push[(triton.cdiv(x.numel(), BLOCK),)](x, 100 + rank, ctx.get_heap_bases(), rank, right, x.numel(), BLOCK)
            problems += wrong(ctx, x, lambda peer: 100 + (peer - 1) % ctx.num_ranks)
            torch.cuda.empty_cache()
            taken.append(free - free_bytes(ctx))
            ctx.free(x)
            del x
            for _ in range(3):
                ctx.barrier()
            taken.append(free - free_bytes(ctx))
        problems += wrong(ctx, warm, lambda peer: 0)
    return problems, taken


def existing_tensors():
    """Put tensors of torch's expandable segments on the heap; returns what went wrong."""
    problems = []
    torch.cuda.empty_cache()
    with Iris("4GiB", device="cuda", allocator="vmem") as ctx:
        rank, empty = ctx.cur_rank, ctx.stats().committed
        plain = torch.ones(64, device=ctx.device)
        try:
            ctx.as_symmetric(plain)
            problems.append("memory of cudaMalloc was shared")
        except UnsupportedError as e:
            if "expandable_segments:True" not in str(e):
                problems.append(f"the error does not say what would help: {e}")
        torch.cuda.empty_cache()
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        try:
            # 50 MB span several pieces of physical memory; a view begins somewhere inside
            x = torch.full((50 * MIB // 4,), 3 + rank, dtype=I32, device=ctx.device)
            # above 1 MiB, or torch finds room beside its small tensors from before, in memory of cudaMalloc
            small = torch.full((3 * MIB // 4,), 40 + rank, dtype=I32, device=ctx.device)
        finally:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        view = x[1000 : 30 * MIB // 4]
        shared = ctx.as_symmetric(view)
        if not ctx.is_symmetric(shared) or shared.data_ptr() == view.data_ptr():
            problems.append("the result is not on the heap")
        problems += wrong(ctx, shared, lambda peer: 3 + peer)
        x.fill_(70 + rank)  # from the next kernel on it is seen there
        problems += wrong(ctx, shared, lambda peer: 70 + peer)
        committed = ctx.stats().committed
        inside = ctx.as_symmetric(view[5000:6000])
        problems += wrong(ctx, inside, lambda peer: 70 + peer)
        if ctx.stats().committed != committed:
            problems.append("the same memory was mapped twice")
        other = ctx.as_symmetric(small)
        problems += wrong(ctx, other, lambda peer: 40 + peer)
        ctx.free(shared)
        ctx.barrier()
        problems += wrong(ctx, inside, lambda peer: 70 + peer)
        ctx.free(inside)
        ctx.free(other)
        for _ in range(3):
            ctx.barrier()
        if ctx.stats().committed != empty or ctx.stats().allocated:
            problems.append(f"left on the heap: {ctx.stats()}")
        if not bool((x == 70 + rank).all()):
            problems.append("the tensor itself has changed")
        del shared, inside, other
    return problems


def memory_pool(allocator):
    """Results of torch operators on the heap; returns what went wrong and how much of the GPU is still taken."""
    problems = []
    with Iris("1MiB", device="cuda", allocator=allocator) as outer:
        warm = outer.zeros(BLOCK, dtype=I32)
        problems += wrong(outer, warm, lambda peer: 0)
        square = torch.ones((512, 512), device=outer.device)
        torch.relu(square @ square)  # the library's workspace is made here and not in the pool
        torch.cuda.empty_cache()
        before = free_bytes(outer)
        with Iris("1GiB", device="cuda", allocator=allocator) as ctx:
            rank = ctx.cur_rank
            a = torch.full((512, 512), 1.0 + rank, device=ctx.device)
            b = torch.eye(512, device=ctx.device)
            with torch.cuda.use_mem_pool(ctx.mem_pool()):
                y = torch.relu(a @ b).to(I32)
                z = torch.full((3 * MIB,), 9 + rank, dtype=I32, device=ctx.device)
            for name, tensor, base in (("y", y, 1), ("z", z, 9)):
                if not ctx.is_symmetric(tensor):
                    problems.append(f"{name} is not on the heap")
                    continue
                if ctx.heap.offset_of(tensor) != ctx.broadcast(ctx.heap.offset_of(tensor)):
                    problems.append(f"{name} lies elsewhere on rank {rank}")
                problems += wrong(ctx, tensor, lambda peer, base=base: base + peer)
            outside = torch.empty(100, device=ctx.device)
            if ctx.is_symmetric(outside):
                problems.append("allocations outside of the block are on the heap")
            try:
                with torch.cuda.use_mem_pool(ctx.mem_pool()):
                    torch.empty(2 << 30, dtype=torch.uint8, device=ctx.device)
                problems.append("2 GiB were found on a heap of 1 GiB")
            except torch.OutOfMemoryError:
                pass
            try:
                with ctx.use_mem_pool():
                    torch.empty(2 << 30, dtype=torch.uint8, device=ctx.device)
                problems.append("2 GiB were found on a heap of 1 GiB")
            except HeapExhaustedError as e:
                if e.requested_bytes < 2 << 30 or not isinstance(e.__cause__, torch.OutOfMemoryError):
                    problems.append(f"the reason says too little: {e}")
            with ctx.use_mem_pool():
                again = torch.full((BLOCK,), 70 + rank, dtype=I32, device=ctx.device)
            problems += wrong(ctx, again, lambda peer: 70 + peer)
            problems += wrong(ctx, z, lambda peer: 9 + peer)
            del y, z, tensor, a, b, outside, again
            gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.empty_cache()  # a heap that lies in torch's memory is torch's again only when its pool has gone
        return problems, before - free_bytes(outer)


def exhausted():
    """The last rank's GPU is full; returns the error of each rank and whether the heap can be used afterwards."""
    with Iris("64GiB", device="cuda", allocator="vmem") as ctx:
        problems = wrong(ctx, ctx.zeros(BLOCK, dtype=I32), lambda peer: 0)
        full = ctx.num_ranks - 1
        hog = None
        if ctx.cur_rank == full:
            free, _ = torch.cuda.mem_get_info(ctx.target.index)
            hog = torch.empty(free - (2 << 30), dtype=torch.uint8, device=ctx.device)
        committed = ctx.stats().committed
        ctx.barrier()
        try:
            ctx.empty(8 << 30, dtype=torch.uint8)
            error = "none"
        except HeapExhaustedError as e:
            error = str(e)
        if ctx.stats().committed != committed:
            problems.append(f"{ctx.stats().committed - committed} bytes stayed")
        x = ctx.full((64 * MIB // 4,), 5 + ctx.cur_rank, dtype=I32)
        problems += wrong(ctx, x, lambda peer: 5 + peer)
        del hog
        torch.cuda.empty_cache()
        ctx.barrier()
        y = ctx.full((8 << 28,), 6 + ctx.cur_rank, dtype=I32)
        problems += wrong(ctx, y[: 1 << 20], lambda peer: 6 + peer)
        return error, problems


def descriptors():
    """Open descriptors but for those of the processes' own talk."""
    count = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that was listing
            count += not os.readlink(f"/proc/self/fd/{fd}").startswith(("socket:", "pipe:", "anon_inode:[event"))
    return count


def open_and_close(allocator, cycles):
    """Open, use and close again and again; returns by how much descriptors and used GPU memory have grown."""

    def cycle():
        with Iris("256MiB", device="cuda", allocator=allocator) as ctx:
            x = ctx.full((20 * MIB // 4,), ctx.cur_rank, dtype=I32)
            return wrong(ctx, x, lambda peer: peer)

    with Iris("1MiB", device="cuda", allocator=allocator) as outer:
        problems = cycle()
        torch.cuda.empty_cache()
        free, num_descriptors = free_bytes(outer), descriptors()
        for _ in range(cycles):
            problems += cycle()
        gc.collect()
        torch.cuda.empty_cache()
        return problems, descriptors() - num_descriptors, free - free_bytes(outer)
