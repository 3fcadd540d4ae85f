"""Both allocators on GPUs: the kit, streams and freed blocks, 100,000 cycles, existing tensors, memory pools."""

import contextlib
import gc

import pytest
import torch
import triton
import triton.language as tl
from tables import raises, table

import iris_triton as iris
from iris_core import Iris
from iris_core.errors import HeapError, HeapExhaustedError, UnsupportedError
from iris_core.testing import AllocatorConformance, RankPool
from iris_core.testing.conformance import oracle

MIB = 1 << 20
BLOCK = 1024
I32, U8 = torch.int32, torch.uint8
NUMEL = 4 * MIB  # of int32: 16 MiB
SLEEP_S = 0.4
MOST_POLLS = 1 << 26  # of a held stream, about a minute: then the host waits for it and would wait for good
EXPANDABLE = "expandable_segments:True,garbage_collection_threshold:0.75"


@triton.jit
def pull(x, out, bases, rank: tl.constexpr, peer, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, iris.load(x + i, rank, peer, bases, mask=i < n, other=0), mask=i < n)


@triton.jit
def push(x, value, bases, rank: tl.constexpr, peer, n, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    iris.store(x + i, tl.zeros((BLOCK,), tl.int32) + value, rank, peer, bases, mask=i < n)


def free_bytes(ctx):
    """Free memory of this rank's GPU, as nvidia-smi sees it; the same moment on all ranks."""
    ctx.barrier()
    free, _ = torch.cuda.mem_get_info(ctx.target.index)
    ctx.barrier()
    return free


def check(ctx, x, expected):
    """Every peer's copy of `x` is `expected(rank)` everywhere, as kernels of this rank see it."""
    ctx.barrier()
    out, n = torch.empty(x.shape, dtype=x.dtype, device=ctx.device), x.numel()
    for peer in range(ctx.num_ranks):
        out.fill_(-1)
        pull[(triton.cdiv(n, BLOCK),)](x, out, ctx.get_heap_bases(), ctx.cur_rank, peer, n, BLOCK=BLOCK)
        assert bool((out == expected(peer)).all()), (ctx.cur_rank, peer, out.min(), out.max())
    ctx.barrier()


def push_to(ctx, x, value, peer):
    push[(triton.cdiv(x.numel(), BLOCK),)](x, value, ctx.get_heap_bases(), ctx.cur_rank, peer, x.numel(), BLOCK=BLOCK)


def come_and_go(nbytes):
    """Use a part of a heap of 1 TiB and free it; how much of the GPU is taken after allocating, and after freeing."""
    taken = []
    with Iris("1TiB", device="cuda", allocator="vmem") as ctx:
        rank, right = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
        warm = ctx.zeros(BLOCK, dtype=I32)
        check(ctx, warm, lambda peer: 0)  # kernels are loaded
        torch.cuda.empty_cache()  # of what earlier jobs have left
        free = free_bytes(ctx)
        for base in (0, 10):
            x = ctx.full((nbytes // 4,), base + rank, dtype=I32)
            check(ctx, x, lambda peer, base=base: base + peer)
            push_to(ctx, x, 100 + rank, right)
            check(ctx, x, lambda peer: 100 + (peer - 1) % ctx.num_ranks)
            torch.cuda.empty_cache()
            taken.append(free - free_bytes(ctx))
            ctx.free(x)
            del x
            for _ in range(3):
                ctx.barrier()
            taken.append(free - free_bytes(ctx))
        check(ctx, warm, lambda peer: 0)
    return taken


def existing_tensors():
    """Put tensors of torch's expandable segments on the heap."""
    torch.cuda.empty_cache()
    with Iris("4GiB", device="cuda", allocator="vmem") as ctx:
        rank, empty = ctx.cur_rank, ctx.stats().committed
        with raises(UnsupportedError, "allocators.expandable"):  # memory of cudaMalloc
            ctx.as_symmetric(torch.ones(64, device=ctx.device))
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
        assert ctx.is_symmetric(shared)
        assert shared.data_ptr() != view.data_ptr()
        check(ctx, shared, lambda peer: 3 + peer)
        x.fill_(70 + rank)  # from the next kernel on it is seen there
        check(ctx, shared, lambda peer: 70 + peer)
        committed = ctx.stats().committed
        inside = ctx.as_symmetric(view[5000:6000])
        check(ctx, inside, lambda peer: 70 + peer)
        assert ctx.stats().committed == committed, "the same memory was mapped twice"
        other = ctx.as_symmetric(small)
        check(ctx, other, lambda peer: 40 + peer)
        ctx.free(shared)
        ctx.barrier()
        check(ctx, inside, lambda peer: 70 + peer)
        ctx.free(inside)
        ctx.free(other)
        for _ in range(3):
            ctx.barrier()
        assert (ctx.stats().committed, ctx.stats().allocated) == (empty, 0)
        assert bool((x == 70 + rank).all()), "the tensor itself has changed"
        del shared, inside, other


def memory_pool(allocator):
    """Results of torch operators on the heap; returns how much of the GPU is still taken."""
    with Iris("1MiB", device="cuda", allocator=allocator) as outer:
        warm = outer.zeros(BLOCK, dtype=I32)
        check(outer, warm, lambda peer: 0)
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
            for tensor, base in ((y, 1), (z, 9)):
                assert ctx.is_symmetric(tensor)
                assert ctx.heap.offset_of(tensor) == ctx.broadcast(ctx.heap.offset_of(tensor))
                check(ctx, tensor, lambda peer, base=base: base + peer)
            outside = torch.empty(100, device=ctx.device)
            assert not ctx.is_symmetric(outside)
            with pytest.raises(torch.OutOfMemoryError), torch.cuda.use_mem_pool(ctx.mem_pool()):
                torch.empty(2 << 30, dtype=U8, device=ctx.device)
            with pytest.raises(HeapExhaustedError) as caught, ctx.use_mem_pool():
                torch.empty(2 << 30, dtype=U8, device=ctx.device)
            assert caught.value.requested_bytes >= 2 << 30
            assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
            with ctx.use_mem_pool():
                again = torch.full((BLOCK,), 70 + rank, dtype=I32, device=ctx.device)
            check(ctx, again, lambda peer: 70 + peer)
            check(ctx, z, lambda peer: 9 + peer)
            del y, z, tensor, a, b, outside, again, caught
            gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.empty_cache()  # a heap that lies in torch's memory is torch's again only when its pool has gone
        return before - free_bytes(outer)


def exhausted():
    """The last rank's GPU is full, which is the same error everywhere; the heap can be used afterwards."""
    with Iris("64GiB", device="cuda", allocator="vmem") as ctx:
        check(ctx, ctx.zeros(BLOCK, dtype=I32), lambda peer: 0)
        full, hog = ctx.num_ranks - 1, None
        if ctx.cur_rank == full:
            free, _ = torch.cuda.mem_get_info(ctx.target.index)
            hog = torch.empty(free - (2 << 30), dtype=U8, device=ctx.device)
        committed = ctx.stats().committed
        ctx.barrier()
        with raises(HeapExhaustedError, "allocators.full", rank=full):
            ctx.empty(8 << 30, dtype=U8)
        assert ctx.stats().committed == committed
        x = ctx.full((64 * MIB // 4,), 5 + ctx.cur_rank, dtype=I32)
        check(ctx, x, lambda peer: 5 + peer)
        del hog
        torch.cuda.empty_cache()
        ctx.barrier()
        y = ctx.full((8 << 28,), 6 + ctx.cur_rank, dtype=I32)
        check(ctx, y[: 1 << 20], lambda peer: 6 + peer)


def descriptors():
    """Open descriptors but for those of the processes' own talk."""
    own = " socket:", " pipe:", " anon_inode:[event"
    return sum(not any(each in opened for each in own) for opened in oracle.open_descriptors())


def sleep_on_gpu(seconds=SLEEP_S):
    """Keep the current stream busy; a cycle takes half a nanosecond or more."""
    torch.cuda._sleep(int(seconds * 2e9))


def open_heap(allocator, size="64MiB", device="cuda"):
    return Iris(size, device=device, allocator=allocator)


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
        torch.cuda.synchronize()  # the opener's stream does not wait for this one: it would open the gate anew
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
        x.fill_(value) if peer is None else push_to(ctx, x, value, peer)


def reuse_alone(allocator):
    """Whether a block that another stream writes to is the same again, whether it is whole, and there at once."""
    with open_heap(allocator) as ctx:
        side, held = torch.cuda.Stream(), Held()
        x = ctx.zeros(NUMEL, dtype=I32)
        ctx.barrier()
        ptr = x.data_ptr()
        write_late(ctx, x, 7, side, busy=held.waits)
        with held.late(side) as still_to_come:
            ctx.heap.record_stream(x, side)
            ctx.free(x)
            y = ctx.empty(NUMEL, dtype=I32)
            y.fill_(1)
            at_once = still_to_come()
        torch.cuda.synchronize()
        return y.data_ptr() == ptr, bool((y == 1).all()), at_once


def reuse_among_ranks(allocator, dropped):
    """Offsets of a block that is still written to, of one after a stream's barrier, and of one after the device's."""
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
            assert still_to_come() or rank != last, "the barrier of a stream does not wait for another one"
            y = ctx.empty(NUMEL, dtype=I32)  # before the late write may come
        y.fill_(10 + rank)
        offsets.append(ctx.heap.offset_of(y))
        check(ctx, y, lambda peer: 10 + peer)  # its barriers wait for the devices
        z = ctx.empty(NUMEL, dtype=I32)
        offsets.append(ctx.heap.offset_of(z))
        return offsets


def pressure_among_ranks(allocator):
    """A block that is still written to is all there is: allocating waits."""
    with open_heap(allocator, "24MiB") as ctx:  # room for one
        rank, last = ctx.cur_rank, ctx.num_ranks - 1
        side = torch.cuda.Stream()
        x = ctx.zeros(NUMEL, dtype=I32)
        offset = ctx.heap.offset_of(x)
        ctx.barrier()
        if rank == last:
            write_late(ctx, x, 7, side)
            ctx.heap.record_stream(x, side)
        ctx.free(x)
        y = ctx.full((NUMEL,), 20 + rank, dtype=I32)
        assert ctx.heap.offset_of(y) == offset
        check(ctx, y, lambda peer: 20 + peer)


def capture(allocator):
    """Allocating and freeing are refused in a capture; a graph on the heap's memory works after that."""
    with open_heap(allocator) as ctx:
        x, extra = ctx.zeros(1000, dtype=I32), ctx.zeros(10)
        x += 1  # loaded before the capture
        graph = torch.cuda.CUDAGraph()
        ctx.barrier()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            x += 1
            for name, call in (("zeros", lambda: ctx.zeros(10)), ("free", lambda: ctx.free(extra))):
                with raises(HeapError, "heap.captured", name=name):
                    call()
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        assert x.unique().tolist() == [6]
        ctx.free(extra)
        ctx.barrier()
        del graph


def many_cycles(allocator, cycles):
    """Figures before and after many allocations, drops and barriers on two streams, and what is taken and left open."""
    with open_heap(allocator) as ctx:
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()

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


def is_expandable(tensor):
    ptr = tensor.data_ptr()
    (segment,) = (s for s in torch.cuda.memory_snapshot() if s["address"] <= ptr < s["address"] + s["total_size"])
    return bool(segment["is_expandable"])


def settings_now():
    return torch.cuda.memory._snapshot()["allocator_settings"]


def with_expandable_segments(set_here):
    """Use a heap of "torch" in expandable segments, which are switched on here or by the environment."""
    torch.cuda.empty_cache()
    if set_here:
        torch._C._accelerator_setAllocatorSettings(EXPANDABLE)
    try:
        before = settings_now()
        assert before["expandable_segments"]
        x = torch.ones(8 * MIB, device="cuda")
        assert is_expandable(x)
        with open_heap("torch", "256MiB") as ctx:
            t = ctx.full((10 * MIB,), 3 + ctx.cur_rank, dtype=I32)
            check(ctx, t, lambda peer: 3 + peer)
            y = torch.ones(30 * MIB, device="cuda")
            assert is_expandable(y), "they were switched off for good"
            with torch.cuda.use_mem_pool(ctx.mem_pool()):
                z = torch.full((3 * MIB,), 40 + ctx.cur_rank, dtype=I32, device="cuda")
            assert ctx.is_symmetric(z)
            check(ctx, z, lambda peer: 40 + peer)
            del y, z, t
        assert settings_now() == before
        assert bool((x == 1).all()), "memory of torch was changed"
        del x
    finally:
        if set_here:
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        gc.collect()
        torch.cuda.empty_cache()


def share_a_gpu(allocator):
    with open_heap(allocator, device="cuda:0") as ctx:
        rank, right = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
        x = ctx.full((NUMEL,), 5 + rank, dtype=I32)
        check(ctx, x, lambda peer: 5 + peer)
        push_to(ctx, x, 50 + rank, right)
        check(ctx, x, lambda peer: 50 + (peer - 1) % ctx.num_ranks)


BOTH = pytest.mark.parametrize("allocator", ["torch", "vmem"])
SLACK = 300 * MIB  # granules of up to 64 MiB, code that the driver loads late, torch's own small segments


@pytest.mark.gpu
class TestTorchAllocator(AllocatorConformance):
    """The kit; a process cannot open an IPC handle of its own, so only other processes can be peers."""

    name = "torch"
    same_process_peers = False
    num_cycles = 20


@pytest.mark.gpu
class TestVmemAllocator(AllocatorConformance):
    name = "vmem"
    num_cycles = 20


@pytest.mark.gpu
@BOTH
def test_a_block_is_not_overwritten_by_a_stream_that_had_it(pool, allocator):
    ((same, whole, at_once),) = pool.run(reuse_alone, 1, allocator)
    assert same, "the block is handed out at once"
    assert whole
    assert at_once, "the host does not wait"


@pytest.mark.multigpu(shared=False)  # turns on a GPU take longer than the late write
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("dropped", [False, True])
@BOTH
def test_no_rank_gets_a_block_that_a_stream_of_another_still_writes_to(pool, allocator, dropped, num_ranks):
    results = pool.run(reuse_among_ranks, num_ranks, allocator, dropped)
    assert results == [results[0]] * num_ranks
    first, second, third = results[0]
    assert second != first, "still in use on one rank"
    assert third == first


@pytest.mark.multigpu
@table(("job", "num_ranks"), [(pressure_among_ranks, 2), (pressure_among_ranks, 8), (capture, 1), (capture, 2)])
@BOTH
def test_under_pressure_and_in_captures(pool, allocator, job, num_ranks):
    assert pool.run(job, num_ranks, allocator) == [None] * num_ranks


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@BOTH
def test_nothing_is_left_of_100000_cycles(pool, allocator, num_ranks):
    for before, after, taken, descriptors in pool.run(many_cycles, num_ranks, allocator, 100_000):
        assert after == before
        assert after[:3] == (0, 0, 0)
        assert taken <= 4 * MIB
        assert descriptors <= 0


@pytest.mark.alone
@pytest.mark.multigpu(shared=False)  # a rank would see what the others take
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_memory_comes_with_use_and_goes_when_free(pool, num_ranks):
    nbytes = 2 << 30
    for taken in pool.run(come_and_go, num_ranks, nbytes):
        assert all(nbytes - SLACK <= used <= nbytes + SLACK for used in taken[::2])
        assert all(freed <= SLACK for freed in taken[1::2])


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_full_gpu_on_one_rank_is_the_same_error_everywhere(pool, num_ranks):
    assert pool.run(exhausted, num_ranks) == [None] * num_ranks


@pytest.mark.gpu
@BOTH
def test_ranks_may_share_a_gpu(pool, allocator):
    assert pool.run(share_a_gpu, 2, allocator) == [None] * 2


@pytest.mark.alone
@pytest.mark.multigpu
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@BOTH
def test_results_of_torch_operators_on_the_heap(pool, allocator, num_ranks):
    assert all(taken <= 64 * MIB for taken in pool.run(memory_pool, num_ranks, allocator))


@pytest.mark.multigpu
@pytest.mark.parametrize(("job", "args", "variable", "num_ranks"), [
    *((existing_tensors, (), "", n) for n in (2, 4, 8)),
    *((with_expandable_segments, (True,), "", n) for n in (2, 4, 8)),
    *((with_expandable_segments, (False,), name, 2) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")),
])  # fmt: skip
def test_expandable_segments_switched_on_by_the_program_or_the_environment(job, args, variable, num_ranks):
    """Tensors in them may be put on the heap of "vmem"; that of "torch" is in no such segment."""
    environ = {"IRIS_DEVICE_TIMEOUT": "30"} | ({variable: EXPANDABLE} if variable else {})
    # new processes: torch would use what is left of segments that others have made
    with RankPool(timeout_s=120.0, environ=environ) as pool:
        assert pool.run(job, num_ranks, *args) == [None] * num_ranks
