"""Kernels and rank jobs of test_bulk."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris_core import Iris
from iris_gluon import IrisDeviceCtx, default_layout
from iris_gluon._compat import tma_load
from iris_gluon.bulk import fence_async_global

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
def load_awaited(
    IrisDeviceCtx: gl.constexpr, context, flag, box, out, WHOLE_PROGRAM: gl.constexpr, FENCED: gl.constexpr
):
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
        fence_async_global(WHOLE_PROGRAM)
        mbarrier.expect(full, descriptor.block_type.nbytes)
        tma_load(descriptor, [0, 0], full, tile)
        mbarrier.wait(full, 0)
        gl.store(out + where, tile.load(layout))
        mbarrier.invalidate(full)
    else:
        ctx.wait(flag, 1)
        fence_async_global(WHOLE_PROGRAM)
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
def hand_over(
    IrisDeviceCtx: gl.constexpr, context, x, y, out, flags, numel, rounds, LANES: gl.constexpr,
):  # fmt: skip
    """Each rank changes its block, copies it to the next rank, and signals; who waits must see all of it.

    The block is changed by ordinary stores right before, and read by ordinary loads right behind.
    """
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


def run_moves(op: str, dtype: torch.dtype, num_warps: int, device: str) -> list[str]:
    """Copy between this rank and the next one; returns what was wrong."""
    problems = []
    with Iris("4MiB", device=device, backend="gluon") as ctx:
        rank, world = ctx.cur_rank, ctx.num_ranks
        peer = (rank + 1) % world
        origin = rank if op == "get" else (rank - 1) % world
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
                source = peer if op == "get" else origin
                wanted = torch.full((SIZE,), 99).to(dtype)
                wanted[to : to + numel] = _numbers(source, dtype)[first : first + numel]
                if not torch.equal(y.cpu(), wanted):
                    problems.append(f"rank {rank}: {op} of {numel} {dtype} from {first} to {to}, {chunk} x {stages}")
    return problems


def run_hand_over(rounds: int, num_warps: int, device: str) -> list[int]:
    """Return how many elements were wrong in each round."""
    with Iris("4MiB", device=device, backend="gluon") as ctx:
        numel = 32768 if ctx.device != "cpu" else 4096
        x, y = ctx.zeros(numel, dtype=torch.int32), ctx.zeros(numel, dtype=torch.int32)
        flags = ctx.zeros(2, dtype=torch.int64)
        out = torch.full((rounds,), -1, dtype=torch.int32, device=ctx.device)
        ctx.barrier()
        hand_over[(1,)](
            IrisDeviceCtx, ctx.get_device_context(), x, y, out, flags, numel, rounds, LANES=256, num_warps=num_warps
        )
        ctx.barrier()
        return out.tolist()


def _numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    numbers = (torch.arange(SIZE) * 7 + rank * 13) % 61
    return numbers > 30 if dtype is torch.bool else numbers.to(dtype)
