"""Planted mistakes in Gluon; see `corpus`."""
# mypy: ignore-errors

import torch
from corpus import registry
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from iris_gluon import IrisDeviceCtx, default_layout
from iris_gluon._compat import tma_load, tma_store

CASES, case, _ = registry()
N = 128


@gluon.jit
def message(
    IrisDeviceCtx: gl.constexpr, context, data, flag, out, N: gl.constexpr, WAITS: gl.constexpr = True,
    RELEASES: gl.constexpr = "release", SEND: gl.constexpr = "sys", ACQUIRES: gl.constexpr = "acquire",
    RECEIVE: gl.constexpr = "sys"
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


def _message(name, about, **mistake):
    """Enter the message with one constant that is wrong."""

    def run(ctx, bug):
        data, flag = ctx.zeros(N), ctx.zeros(1, dtype=torch.int32)
        ctx.barrier()
        message[(1,)](
            IrisDeviceCtx, ctx.get_device_context(), data, flag, torch.zeros(N), N=N, **(mistake if bug else {})
        )
        ctx.barrier()

    run.__name__, run.__doc__ = name, about
    case()(run)


_message("missing_wait", "The receiver does not wait.", WAITS=False)
_message("missing_release", "The signal is relaxed.", RELEASES="relaxed")
_message("missing_acquire", "The wait is relaxed.", ACQUIRES="relaxed")
_message("gpu_signal", "The signal has the scope of one GPU.", SEND="gpu")
_message("gpu_wait", "The wait has the scope of one GPU.", RECEIVE="gpu")


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
