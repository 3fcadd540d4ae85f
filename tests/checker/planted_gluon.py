"""Planted mistakes in Gluon; see `corpus`."""
# mypy: ignore-errors

import torch
from corpus import registry
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris_gluon import IrisDeviceCtx, default_layout
from iris_gluon._compat import tma_load, tma_store

CASES, case = registry()
N = 128


@gluon.jit
def message(
    IrisDeviceCtx: gl.constexpr, context, data, flag, out, N: gl.constexpr, WAITS: gl.constexpr,
    RELEASES: gl.constexpr, SEND: gl.constexpr, ACQUIRES: gl.constexpr, RECEIVE: gl.constexpr
):  # fmt: skip
    ctx = IrisDeviceCtx.initialize(context)
    i = gl.arange(0, N, layout=default_layout([N]))
    if ctx.cur_rank == 0:
        ctx.store(data + i, i.to(gl.float32), 1)  # A missing_wait missing_release missing_acquire gpu_signal gpu_wait
        ctx.signal(flag, 1, 1, sem=RELEASES, scope=SEND)  # A gpu_signal gpu_wait
    else:
        if WAITS:
            ctx.wait(flag, 1, sem=ACQUIRES, scope=RECEIVE)  # B gpu_signal gpu_wait
        gl.store(out + i, gl.load(data + i))  # B missing_wait missing_release missing_acquire gpu_signal gpu_wait


def _message(ctx, waits=True, releases="release", send="sys", acquires="acquire", receive="sys"):
    data, flag = ctx.zeros(N), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    said = {"WAITS": waits, "RELEASES": releases, "SEND": send, "ACQUIRES": acquires, "RECEIVE": receive}
    message[(1,)](IrisDeviceCtx, ctx.get_device_context(), data, flag, torch.zeros(N), N=N, **said)
    ctx.barrier()


@case()
def missing_wait(ctx, bug):
    """The receiver does not wait."""
    _message(ctx, waits=not bug)


@case()
def missing_release(ctx, bug):
    """The signal is relaxed."""
    _message(ctx, releases="relaxed" if bug else "release")


@case()
def missing_acquire(ctx, bug):
    """The wait is relaxed."""
    _message(ctx, acquires="relaxed" if bug else "acquire")


@case()
def gpu_signal(ctx, bug):
    """The signal has the scope of one GPU."""
    _message(ctx, send="gpu" if bug else "sys")


@case()
def gpu_wait(ctx, bug):
    """The wait has the scope of one GPU."""
    _message(ctx, receive="gpu" if bug else "sys")


@gluon.jit
def stream(IrisDeviceCtx: gl.constexpr, context, data, full, empty, out, turns, N: gl.constexpr, ACK: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context)
    i = gl.arange(0, N, layout=default_layout([N]))
    for turn in range(1, turns + 1):
        if ctx.cur_rank == 0:
            if ACK:
                ctx.wait(empty, turn - 1)
            ctx.store(data + i, (i + turn).to(gl.float32), 1)  # A reused_early
            ctx.signal(full, turn, 1)
        else:
            ctx.wait(full, turn)
            gl.store(out + i, gl.load(data + i))  # B reused_early
            ctx.signal(empty, turn, 0)


@case()
def reused_early(ctx, bug):
    """The sender overwrites its message before the receiver has said that it was read."""
    data, full, empty = ctx.zeros(N), ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
    ctx.barrier()
    stream[(1,)](IrisDeviceCtx, ctx.get_device_context(), data, full, empty, torch.zeros(N), 4, N=N, ACK=not bug)
    ctx.barrier()


@gluon.jit
def boxes(source, target, FROM: gl.constexpr, TO: gl.constexpr, layout: gl.constexpr):
    inside = tma.make_tensor_descriptor(source, [FROM, 32], [32, 1], [8, 32], layout)
    outside = tma.make_tensor_descriptor(target, [TO, 32], [32, 1], [8, 32], layout)
    memory = gl.allocate_shared_memory(gl.float32, [8, 32], layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    mbarrier.expect(ready, inside.block_type.nbytes)
    tma_load(inside, [0, 0], ready, memory)  # B tma_load_beyond_a_view
    mbarrier.wait(ready, 0)
    tma_store(outside, [0, 0], memory)  # B tma_store_beyond_a_view
    tma.store_wait(0)


def _boxes(ctx, source, target):
    layout = gl.NVMMASharedLayout.get_default_for([8, 32], gl.float32)
    data = ctx.zeros((4, 8, 32))
    boxes[(1,)](data[0, :4], data[2, :4], source, target, layout)
    ctx.barrier()


@case(ranks=1, kind="bounds")
def tma_load_beyond_a_view(ctx, bug):
    """A descriptor has more rows than the tensor, and the rest of its block lies there."""
    _boxes(ctx, 8 if bug else 4, 4)


@case(ranks=1, kind="bounds")
def tma_store_beyond_a_view(ctx, bug):
    """The same of a store, which is looked at where it is issued."""
    _boxes(ctx, 4, 8 if bug else 4)
