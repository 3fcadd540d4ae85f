"""Planted mistakes in Gluon; see `corpus`."""
# mypy: ignore-errors

import torch
from corpus import registry
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon import IrisDeviceCtx, default_layout

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
