"""What test_allocators runs on ranks, a GPU each: memory that comes and goes, streams, existing tensors, pools."""

import contextlib
import gc
import os

import torch
import triton
import triton.language as tl

import iris_triton as iris
from iris_core import Iris
from iris_core.errors import HeapError, HeapExhaustedError, UnsupportedError

MIB = 1 << 20
BLOCK = 1024
I32, U8 = torch.int32, torch.uint8
NUMEL = 4 * MIB  # of int32: 16 MiB
SLEEP_S = 0.4
MOST_POLLS = 1 << 26  # of a held stream, about a minute: then the host waits for it and would wait for good
EXPANDABLE = "expandable_segments:True,garbage_collection_threshold:0.75"


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


def sleep_on_gpu(seconds=SLEEP_S):
    """Keep the current stream busy; a cycle takes half a nanosecond or more."""
    torch.cuda._sleep(int(seconds * 2e9))


def open_heap(allocator, size="64MiB", device="cuda"):
    return Iris(size, device=device, allocator=allocator)


# -- streams ----------------------------------------------------------------------------------------------------------
@triton.jit
def hold(gate, most):
    """Keep a stream busy until the gate is open."""
    polls = 0
    while (tl.atomic_or(gate, 0) == 0) & (polls < most):
        polls += 1


class Held:
    """A stream that stays busy until the host opens it.

    Attributes:
        waits: keeps the current stream busy; what is launched on it afterwards comes late.
    """

    def __init__(self):
        # as long as the blocks: filling either loads the same kernel, which no host can do while a stream is held
        self._gate, self._opener = torch.ones(NUMEL, dtype=I32, device="cuda"), torch.cuda.Stream()
        self.waits()
        self._open()
        self._gate.zero_()
        torch.cuda.synchronize()

    def waits(self):
        hold[(1,)](self._gate, MOST_POLLS)

    def _open(self):
        with torch.cuda.stream(self._opener):
            self._gate.fill_(1)

    @contextlib.contextmanager
    def late(self, stream):
        """Open it at the end; yields a function: whether all that was launched on `stream` so far is still to come."""
        done = torch.cuda.Event()
        done.record(stream)
        try:
            yield lambda: not done.query()
        finally:
            self._open()


def write_late(ctx, x, value, side, peer=None, busy=sleep_on_gpu):
    """On another stream: write to a tensor, own or a peer's copy, but not before `busy()` has ended there."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        busy()
        if peer is None:
            x.fill_(value)
        else:
            n = x.numel()
            grid = (-(-n // BLOCK),)
            push[grid](x, value, ctx.get_heap_bases(), ctx.cur_rank, peer, n, BLOCK=BLOCK)


def reuse_alone(allocator, record):
    """A rank alone frees a block that another stream is going to write to, and allocates it again.

    Args:
        allocator: by name.
        record: tell the heap of the other stream; if not, the late write is expected to do damage.

    Returns:
        Whether it was the same block, whether the new content is whole, and whether the host had it while the other
        stream was still held.
    """
    with open_heap(allocator) as ctx:
        side, held = torch.cuda.Stream(), Held()
        x = ctx.zeros(NUMEL, dtype=I32)
        ctx.barrier()
        ptr = x.data_ptr()
        write_late(ctx, x, 7, side, busy=held.waits)
        with held.late(side) as still_to_come:
            if record:
                ctx.heap.record_stream(x, side)
            ctx.free(x)
            y = ctx.empty(NUMEL, dtype=I32)
            y.fill_(1)
            if not record:  # else it waits for the other stream
                torch.cuda.current_stream().synchronize()
            at_once = still_to_come()
        torch.cuda.synchronize()
        return y.data_ptr() == ptr, bool((y == 1).all()), at_once


def reuse_among_ranks(allocator, dropped):
    """The last rank writes late to the next rank's copy of a block that all have freed, or dropped.

    Returns:
        Offsets of the block, of one allocated after a barrier of the current stream, and of one allocated after a
        barrier of the device; whether all ranks left the first barrier before the late write; and what was wrong in
        the second block.
    """
    with open_heap(allocator) as ctx:
        rank, last = ctx.cur_rank, ctx.num_ranks - 1
        side, held = torch.cuda.Stream(), Held()
        x = ctx.zeros(NUMEL, dtype=I32)
        if rank == last:  # loaded before a stream is held
            push[(1,)](x, 7, ctx.get_heap_bases(), rank, 0, NUMEL, BLOCK=BLOCK)
        ctx.barrier()
        offsets = [ctx.heap.offset_of(x)]
        if rank == last:
            write_late(ctx, x, 7, side, peer=0, busy=held.waits)
            ctx.heap.record_stream(x, side)
        with held.late(side) as still_to_come:
            if dropped:
                del x
            else:
                ctx.free(x)
            ctx.barrier(torch.cuda.current_stream())
            ctx._world.barrier()  # of the hosts: all have left the one before
            at_once = still_to_come() or rank != last
            y = ctx.empty(NUMEL, dtype=I32)  # before the late write may come
        y.fill_(10 + rank)
        offsets.append(ctx.heap.offset_of(y))
        problems = wrong(ctx, y, lambda peer: 10 + peer)  # its barriers wait for the devices
        z = ctx.empty(NUMEL, dtype=I32)
        offsets.append(ctx.heap.offset_of(z))
        return offsets, at_once, problems


def pressure_among_ranks(allocator):
    """A block that is still written to is all there is: allocating waits.  Returns offsets and what was wrong."""
    with open_heap(allocator, "24MiB") as ctx:  # room for one
        rank, last = ctx.cur_rank, ctx.num_ranks - 1
        side = torch.cuda.Stream()
        x = ctx.zeros(NUMEL, dtype=I32)
        offsets = [ctx.heap.offset_of(x)]
        ctx.barrier()
        if rank == last:
            write_late(ctx, x, 7, side)
            ctx.heap.record_stream(x, side)
        ctx.free(x)
        y = ctx.full((NUMEL,), 20 + rank, dtype=I32)
        offsets.append(ctx.heap.offset_of(y))
        return offsets, wrong(ctx, y, lambda peer: 20 + peer)


def capture(allocator):
    """Allocate and free in a capture; returns the errors, and whether a graph on the heap's memory works after them."""
    with open_heap(allocator) as ctx:
        x, extra = ctx.zeros(1000, dtype=I32), ctx.zeros(10)
        x += 1  # loaded before the capture
        errors = []

        def refused(call):
            try:
                call()
            except HeapError as e:
                errors.append(str(e))

        graph = torch.cuda.CUDAGraph()
        ctx.barrier()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x += 1
            refused(lambda: ctx.zeros(10))
            refused(lambda: ctx.free(extra))
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        content = x.unique().tolist()
        ctx.free(extra)
        ctx.barrier()
        del graph
        return errors, content


# -- many cycles ------------------------------------------------------------------------------------------------------
def many_cycles(allocator, cycles):
    """Allocate and free again and again: sizes that change, two streams, drops, a barrier now and then.

    Returns:
        What the figures, the GPU's free memory and the descriptors say afterwards against before.
    """
    with open_heap(allocator) as ctx:
        side = torch.cuda.Stream()
        main = torch.cuda.current_stream()

        def run(count):
            for k in range(count):
                x = ctx.heap.allocate((k * 7919) % (64 << 10) + 1, U8)
                if k % 50 == 0:
                    torch.cuda.set_stream(side if k % 100 else main)
                    x.fill_(k % 256)
                if k % 3 == 2:
                    del x
                else:
                    ctx.heap.free(x)
                if k % 200 == 199:
                    ctx.barrier()
            torch.cuda.set_stream(main)
            for _ in range(3):
                ctx.barrier()

        def figures():
            gc.collect()
            stats = ctx.stats()
            return stats.allocated, stats.pending, stats.num_blocks, stats.free, stats.committed

        run(1000)  # what torch and the driver keep is there
        before, free, open_before = figures(), free_bytes(ctx), descriptors()
        run(cycles)
        return before, figures(), free - free_bytes(ctx), descriptors() - open_before


# -- torch's settings -------------------------------------------------------------------------------------------------
def is_expandable(tensor):
    """Whether torch has put a tensor into an expandable segment."""
    ptr = tensor.data_ptr()
    (segment,) = (s for s in torch.cuda.memory_snapshot() if s["address"] <= ptr < s["address"] + s["total_size"])
    return bool(segment["is_expandable"])


def settings_now():
    """torch's allocator settings."""
    return torch.cuda.memory._snapshot()["allocator_settings"]


def with_expandable_segments(set_here):
    """Use a heap of "torch" while torch's expandable segments are on; returns what went wrong.

    Args:
        set_here: switch them on and off here; if not, the environment of the process has done so.
    """
    problems = []
    torch.cuda.empty_cache()
    if set_here:
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)
    try:
        before = settings_now()
        if not before["expandable_segments"]:
            return ["expandable segments are not on"]
        x = torch.ones(8 * MIB, device="cuda")
        if not is_expandable(x):
            problems.append("torch makes no expandable segments here")
        with open_heap("torch", "256MiB") as ctx:
            t = ctx.full((10 * MIB,), 3 + ctx.cur_rank, dtype=I32)
            problems += wrong(ctx, t, lambda peer: 3 + peer)
            y = torch.ones(30 * MIB, device="cuda")
            if not is_expandable(y):
                problems.append("they were switched off for good")
            with torch.cuda.use_mem_pool(ctx.mem_pool()):
                z = torch.full((3 * MIB,), 40 + ctx.cur_rank, dtype=I32, device="cuda")
            if not ctx.is_symmetric(z):
                problems.append("the pool's memory is not on the heap")
            problems += wrong(ctx, z, lambda peer: 40 + peer)
            del y, z, t
        if settings_now() != before:
            problems.append(f"settings were {before}, are {settings_now()}")
        if not bool((x == 1).all()):
            problems.append("memory of torch was changed")
        del x
    finally:
        if set_here:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        gc.collect()
        torch.cuda.empty_cache()
    return problems


def share_a_gpu(allocator):
    """All ranks on the first GPU; returns what went wrong."""
    with open_heap(allocator, device="cuda:0") as ctx:
        rank, right = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
        x = ctx.full((NUMEL,), 5 + rank, dtype=I32)
        problems = wrong(ctx, x, lambda peer: 5 + peer)
        grid = (-(-NUMEL // BLOCK),)
        push[grid](x, 50 + rank, ctx.get_heap_bases(), rank, right, NUMEL, BLOCK=BLOCK)
        return problems + wrong(ctx, x, lambda peer: 50 + (peer - 1) % ctx.num_ranks)
