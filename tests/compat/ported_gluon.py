"""Scripts in the manner of AMD's Iris, in Gluon: the context's class is a constexpr argument."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import iris_triton.as_iris
import iris
import iris.experimental.iris_gluon as iris_gl
from iris.gluon import IrisDeviceCtx

BLOCK = 256


@gluon.jit
def producer(
    IrisDeviceCtx: gl.constexpr, context, source, target, flags, n, rank: gl.constexpr, world: gl.constexpr,
    LANES: gl.constexpr, BLOCK: gl.constexpr, TRACING: gl.constexpr
):  # fmt: skip
    to_rank = int((rank + 1) % world)
    ctx = IrisDeviceCtx.initialize(context, tracing=TRACING)
    layout: gl.constexpr = gl.BlockedLayout([1], [LANES], [4], [0])
    pid = gl.program_id(0)
    offsets = pid * BLOCK + gl.arange(0, BLOCK, layout=layout)
    if TRACING:
        handle = ctx.tracing.record_event_start(
            iris.TraceEvent().compute, to_rank, target + offsets, pid, 7, offsets < n
        )
        ctx.tracing.record_event_end(handle)
    ctx.put(source + offsets, target + offsets, to_rank, mask=offsets < n)
    ctx.atomic_add(flags + pid, 1, to_rank, sem="release", scope="sys")


@gluon.jit
def consumer(IrisDeviceCtx: gl.constexpr, context, source, result, flags, n, LANES: gl.constexpr, BLOCK: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context)
    layout: gl.constexpr = gl.BlockedLayout([1], [LANES], [4], [0])
    pid = gl.program_id(0)
    done = 0
    while done == 0:
        done = ctx.atomic_cas(flags + pid, 1, 0, ctx.cur_rank, sem="acquire", scope="sys")
    offsets = pid * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = offsets < n
    own = gl.load(source + offsets, mask=mask)
    theirs = ctx.load(source + offsets, (ctx.cur_rank + ctx.num_ranks - 1) % ctx.num_ranks, mask=mask)
    gl.store(result + offsets, own + theirs, mask=mask)


def pipeline(traced=False):
    """Every rank sends to the next one; traced by hand-made events as well."""
    shmem = iris_gl.iris(1 << 22)
    rank, world = shmem.get_rank(), shmem.get_num_ranks()
    n = 3 * BLOCK - 11
    lanes = 64 if torch.version.hip else 32
    source = shmem.full((n,), float(rank))
    inbox, result = shmem.zeros(n), shmem.zeros(n)
    flags = shmem.zeros(3, dtype=torch.int32)
    if traced:
        shmem.tracing.enable(max_events=1000)
    context = shmem.get_device_context()
    shmem.barrier()
    producer[(3,)](IrisDeviceCtx, context, source, inbox, flags, n, rank, world, lanes, BLOCK, traced)
    consumer[(3,)](IrisDeviceCtx, context, inbox, result, flags, n, lanes, BLOCK)
    shmem.barrier()
    before = (rank + world - 1) % world
    assert torch.equal(inbox.cpu(), torch.full((n,), float(before)))
    assert result[0] >= before  # the other rank's inbox may have been empty still
    if traced:
        assert int(shmem.tracing.op_index_counter) == 6  # a put and an atomic of each program
        assert int(shmem.tracing.trace_counter) == 9
        columns = [shmem.tracing.trace_buffers[name].tolist() for name in ("event_id", "pid_n", "payload_size")]
        mine = [row for row in zip(*columns, strict=True) if row[0] == iris.TraceEvent().compute]
        assert sorted(mine) == [(2048, 7, 4 * size) for size in (BLOCK - 11, BLOCK, BLOCK)]
    shmem.barrier()
