"""Bulk copies: what they compile to, where they are refused, and what they copy."""

import itertools
import re

import pytest
import torch
from gluon_kernels import said_by_the_compiler
from rank_counts import rank_counts
from tables import says, table
from triton.backends.compiler import GPUTarget
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris_core import Iris
from iris_core.tracing.layout import TraceEvent
from iris_gluon import IrisDeviceCtx, default_layout
from iris_gluon._compat import tma_load
from iris_gluon.bulk import fence_async_global
from iris_triton.testing.compile_only import assembly, compile_for

INT64 = torch.int64

# elements, first element of the source and of the target; in the last three addresses are no multiples of 16 bytes
CASES = ((0, 0, 0), (1, 0, 0), (32, 0, 0), (33, 16, 32), (4096, 0, 0), (100_003, 64, 128), (5000, 1, 0), (5000, 0, 3),
         (5000, 1, 1))  # fmt: skip
SIZE = 1 << 17


@gluon.jit(do_not_specialize=["numel", "first", "to", "peer"])
def move(
    IrisDeviceCtx: gl.constexpr, context, x, y, numel, first, to, peer, op: gl.constexpr, CHUNK_BYTES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Two copies one after the other, so that what the first one leaves behind is found."""
    ctx = IrisDeviceCtx.initialize(context)
    half = numel // 2 // 16 * 16
    if op == "put":
        ctx.put_bulk(x + first, y + to, half, peer, CHUNK_BYTES, STAGES)
        ctx.put_bulk(x + first + half, y + to + half, numel - half, peer, CHUNK_BYTES, STAGES)
    else:
        ctx.get_bulk(x + first, y + to, half, peer, CHUNK_BYTES, STAGES)
        ctx.get_bulk(x + first + half, y + to + half, numel - half, peer, CHUNK_BYTES, STAGES)


@gluon.jit
def load_awaited(IrisDeviceCtx: gl.constexpr, context, flag, box, out, WHOLE: gl.constexpr, FENCED: gl.constexpr):
    """TMA reads what a peer has stored before its signal."""
    ctx = IrisDeviceCtx.initialize(context)
    if FENCED:
        shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([16, 32], gl.int32)
        tile = gl.allocate_shared_memory(gl.int32, [16, 32], shared)
        full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(full, count=1)
        descriptor = tma.make_tensor_descriptor(box, [16, 32], [32, 1], [16, 32], shared)
        peer = (ctx.cur_rank + 1) % ctx.num_ranks
        layout: gl.constexpr = default_layout([16, 32])
        rows = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
        columns = gl.arange(0, 32, layout=gl.SliceLayout(0, layout))
        where = rows[:, None] * 32 + columns[None, :]
        ctx.store(box + where, where + 1000 * ctx.cur_rank, peer)
        ctx.signal(flag, 1, peer)
        ctx.wait(flag, 1)
        fence_async_global(WHOLE)
        mbarrier.expect(full, descriptor.block_type.nbytes)
        tma_load(descriptor, [0, 0], full, tile)
        mbarrier.wait(full, 0)
        gl.store(out + where, tile.load(layout))
        mbarrier.invalidate(full)
    else:
        ctx.wait(flag, 1)
        fence_async_global(WHOLE)
        gl.store(out, gl.load(box))


def run_load_awaited(device):
    with Iris("4MiB", backend="gluon", device=device) as ctx:
        flag, box = ctx.zeros(1, dtype=torch.int64), ctx.zeros(16, 32, dtype=torch.int32)
        out = torch.zeros(16, 32, dtype=torch.int32, device=ctx.device)
        ctx.barrier()
        load_awaited[(1,)](IrisDeviceCtx, ctx.get_device_context(), flag, box, out, True, True)
        ctx.barrier()
        before = (ctx.cur_rank - 1) % ctx.num_ranks
        return torch.equal(out.cpu(), torch.arange(512, dtype=torch.int32).view(16, 32) + 1000 * before)


@gluon.jit
def _compute(ctx, x, y, numel):
    gl.store(y + 2047, 7.0)


@gluon.jit
def _move(ctx, x, y, numel):
    ctx.put_bulk(x, y, numel, ctx.cur_rank)
    i = gl.arange(0, 32, layout=default_layout([32]))  # the partition's own warps
    gl.store(y + 2000 + i, gl.load(x + i))


@gluon.jit(do_not_specialize=["numel"])
def move_aside(IrisDeviceCtx: gl.constexpr, context, x, y, numel):
    """One warp copies while the others do something else."""
    ctx = IrisDeviceCtx.initialize(context)
    gl.warp_specialize([(_compute, (ctx, x, y, numel)), (_move, (ctx, x, y, numel))], [1], [40])


@gluon.jit(do_not_specialize=["numel"])
def traced(IrisDeviceCtx: gl.constexpr, context, x, y, numel):
    ctx = IrisDeviceCtx.initialize(context, tracing=True)
    ctx.put_bulk(x, y, numel, ctx.cur_rank)
    ctx.get_bulk(x, y, 1000, ctx.cur_rank)


@gluon.jit
def hand_over(IrisDeviceCtx: gl.constexpr, context, x, y, out, flags, numel, rounds, LANES: gl.constexpr):
    """Each rank stores to its block, copies it to the next one and signals: who waits and loads must see all of it."""
    ctx = IrisDeviceCtx.initialize(context)
    succ = (ctx.cur_rank + 1) % ctx.num_ranks
    pred = (ctx.cur_rank + ctx.num_ranks - 1) % ctx.num_ranks
    lanes = gl.arange(0, LANES, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    for r in range(rounds):
        for start in range(0, numel, LANES):
            gl.store(x + start + lanes, (ctx.cur_rank + 1) * 1000 + r + start + lanes)
        ctx.wait(flags + 1, r)  # the next rank has read the block before
        ctx.put_bulk(x, y, numel, succ)
        ctx.signal(flags, r + 1, succ)
        ctx.wait(flags, r + 1)
        wrong = 0
        for start in range(0, numel, LANES):
            seen = gl.load(y + start + lanes)
            wrong += gl.sum((seen != (pred + 1) * 1000 + r + start + lanes).to(gl.int32), axis=0)
        gl.store(out + r, wrong)
        ctx.signal(flags + 1, r + 1, pred)


def run_moves(op, dtype, num_warps, device):
    """Copy between this rank and the next one."""
    with Iris("4MiB", device=device, backend="gluon") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        peer = (rank + 1) % world
        source = peer if op == "get" else (rank - 1) % world
        x, y = ctx.empty(SIZE, dtype=dtype), ctx.empty(SIZE, dtype=dtype)
        for number, (numel, first, to) in enumerate(CASES):
            chunks = (1024, 2), (16384, 4)
            for chunk, stages in chunks if device != "cpu" else chunks[number % 2 :][:1]:
                x.copy_(_numbers(rank, dtype))
                y.fill_(99)
                ctx.barrier()
                move[(1,)](
                    IrisDeviceCtx, ctx.get_device_context(), x, y, numel, first, to, peer, op,
                    CHUNK_BYTES=chunk, STAGES=stages, num_warps=num_warps,
                )  # fmt: skip
                ctx.barrier()
                wanted = torch.full((SIZE,), 99).to(dtype)
                wanted[to : to + numel] = _numbers(source, dtype)[first : first + numel]
                assert torch.equal(y.cpu(), wanted), f"{op} of {numel} {dtype} from {first} to {to}, {chunk} x {stages}"


def run_hand_over(rounds, num_warps, device):
    """Return how many elements were wrong in each round."""
    with Iris("4MiB", device=device, backend="gluon") as ctx:
        numel = 32768 if ctx.device != "cpu" else 4096
        x, y = ctx.zeros(numel, dtype=torch.int32), ctx.zeros(numel, dtype=torch.int32)
        flags = ctx.zeros(2, dtype=torch.int64)
        out = torch.full((rounds,), -1, dtype=torch.int32, device=ctx.device)
        ctx.barrier()
        context = ctx.get_device_context()
        hand_over[(1,)](IrisDeviceCtx, context, x, y, out, flags, numel, rounds, LANES=256, num_warps=num_warps)
        ctx.barrier()
        return out.tolist()


def _numbers(rank, dtype):
    numbers = (torch.arange(SIZE) * 7 + rank * 13) % 61
    return numbers > 30 if dtype is torch.bool else numbers.to(dtype)


def compiled(target="sm_90", op="put", dtype=torch.int32, chunk=16384, stages=4, num_warps=4):
    arguments = [IrisDeviceCtx, INT64, dtype, dtype, 1000, 0, 0, 1, op]
    return compile_for(move, arguments, {"CHUNK_BYTES": chunk, "STAGES": stages, "num_warps": num_warps}, target)


@table("op, dtype, num_warps", [("put", torch.int8, 1), ("put", torch.float32, 4), ("get", torch.bfloat16, 1)])
def test_what_it_compiles_to(op, dtype, num_warps):
    kernel = compiled(op=op, dtype=dtype, num_warps=num_warps)
    ptx = assembly(kernel)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared::\w+\.global\.mbarrier", ptx)
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared::cta\.bulk_group", ptx)
    # before the copies what was stored and acquired; behind them all that was begun, not only its reading
    assert ptx.index("fence.proxy.async;") < ptx.index("cp.async.bulk.tensor")
    assert ptx.rindex("cp.async.bulk.wait_group 0;") > ptx.rindex("cp.async.bulk.tensor")
    assert kernel.metadata.shared < 2 * 65536, "the second copy uses the memory of the first one"


@table("whole_program", [True, False])
def test_a_fence_stands_between_a_wait_and_tma(whole_program):
    arguments = IrisDeviceCtx, INT64, INT64, torch.int32, torch.int32, whole_program
    ptx = assembly(compile_for(load_awaited, (*arguments, True)))
    between = ptx[ptx.index("ld.acquire.sys") : ptx.index("cp.async.bulk.tensor")]
    assert "fence.proxy.async;" in between
    behind = between[between.index("fence.proxy.async;") :]
    assert ("bar.sync" in behind) or not whole_program
    assert "buffer_inv" in assembly(compile_for(load_awaited, (*arguments, False), target="gfx942"))


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[3]))
def test_tma_reads_what_was_awaited(pool, num_ranks, device):
    assert pool.run(run_load_awaited, num_ranks, device) == [True] * num_ranks


@table("change, key", [
    *(({"target": target}, "tma.target") for target in ("gfx942", "gfx950", GPUTarget("cuda", 80, 32))),
    ({"chunk": 1000}, "tma.chunk"), ({"chunk": 65536}, "tma.chunk"), ({"stages": 1}, "tma.stages"),
])  # fmt: skip
def test_what_is_refused(change, key):
    assert re.search(says(key), said_by_the_compiler(compiled, **change))


DTYPES = [torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.int64]
COMBINATIONS = list(itertools.product(("put", "get"), (1, 4), DTYPES))


@pytest.mark.parametrize("num_ranks", rank_counts(2, seldom=[1, 4, 8]))
def test_copies(pool, num_ranks, device, some):
    """One rank and two copy every size of elements, on the CPU in turn; more of them only a few."""
    cases = [each for each in COMBINATIONS if num_ranks <= 2 or each[2] in (torch.bool, torch.float32)]
    for op, num_warps, dtype in some(cases, 7, num_ranks) if device == "cpu" else cases:
        assert pool.run(run_moves, num_ranks, op, dtype, num_warps, device) == [None] * num_ranks


@pytest.mark.parametrize("num_ranks", rank_counts(3, seldom=[1, 2, 4, 8]))
def test_stored_before_and_loaded_behind(pool, num_ranks, device):
    rounds = 3 if device == "cpu" else 200
    for num_warps in (1, 4):
        assert pool.run(run_hand_over, num_ranks, rounds, num_warps, device) == [[0] * rounds] * num_ranks


def test_a_partition_of_one_warp_copies_while_the_others_compute():
    arguments = [IrisDeviceCtx, INT64, torch.float32, torch.float32, 1001]
    kernel = compile_for(move_aside, arguments, {"num_warps": 4})
    assert "cp.async.bulk.tensor" in assembly(kernel)
    assert len(re.findall(r"ttg\.warp_specialize\(", kernel.asm["ttgir"])) == 1
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        x, y = ctx.arange(2048, dtype=torch.float32), ctx.zeros(2048)
        move_aside[(1,)](IrisDeviceCtx, ctx.get_device_context(), x, y, 1001, num_warps=4)
        assert torch.equal(y[:1001], x[:1001])
        assert not y[1001:2000].any()
        assert y[2047] == 7
        with pytest.raises(AssertionError):
            move_aside[(1,)](IrisDeviceCtx, ctx.get_device_context(), x, y, -5, num_warps=4)


def test_copies_are_traced():
    with Iris("1MiB", device="cpu", backend="gluon") as ctx:
        x, y = ctx.zeros(2048, dtype=torch.float16), ctx.zeros(2048, dtype=torch.float16)
        ctx.tracing.enable()
        traced[(1,)](IrisDeviceCtx, ctx.get_device_context(), x, y, 1001)
        events = ctx.tracing.events().columns
    names = "event_id", "payload_size", "address", "target_rank"
    rows = list(zip(*(events[name].tolist() for name in names), strict=True))
    assert rows == [(TraceEvent.PUT, 2002, y.data_ptr(), 0), (TraceEvent.GET, 2000, x.data_ptr(), 0)]
    assert (events["duration_cycles"] > 0).all()
    arguments = [IrisDeviceCtx, INT64, torch.float16, torch.float16, 1001]
    assert "globaltimer" in assembly(compile_for(traced, arguments))
