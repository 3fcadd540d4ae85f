"""Planted mistakes in what memory a kernel touches; see `corpus`."""
# mypy: ignore-errors

import triton
import triton.language as tl
from corpus import N, launch, out, registry

import iris_triton as iris

CASES, case = registry()


@triton.jit
def read(context, data, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + i))  # B unwritten partly_written


@case(ranks=1, kind="uninitialised")
def unwritten(ctx, bug):
    """A kernel reads what nobody has written."""
    launch(ctx, read, ctx.empty(N) if bug else ctx.zeros(N), out(ctx), N=N)


@case(kind="uninitialised")
def partly_written(ctx, bug):
    """A kernel reads one element more than was written."""
    data = ctx.empty(N)
    data[: N - 1 if bug else N].fill_(1)
    launch(ctx, read, data, out(ctx), N=N)
    ctx.barrier()


@case(kind="freed")
def freed_block(ctx, bug):
    """A tensor is used whose block belongs to another one by now."""
    data = ctx.zeros(N)
    if bug:
        ctx.free(data)
        ctx.barrier()
    other = ctx.zeros(N)
    rank = ctx.cur_rank
    read[(1,)](ctx.get_device_context(), data, out(ctx), RANK=rank, WORLD=2, N=N)  # B freed_block
    ctx.barrier()
    del other


@case(kind="freed")
def freed_on_the_host(ctx, bug):
    """The host uses a tensor that it has freed."""
    data = ctx.zeros(N)
    if bug:
        ctx.free(data)
    data.add_(1)  # B freed_on_the_host
    ctx.barrier()


@triton.jit
def beyond(
    context, data, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr, PEER: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    first = 1 if BUG else 0
    if PEER:
        ctx.store(data + first + i, i.to(tl.float32), 1 - RANK)  # B off_by_one_remote
    else:
        tl.store(data + first + i, i.to(tl.float32))  # B off_by_one


@case(ranks=1, kind="bounds")
def off_by_one(ctx, bug):
    """One element too far: another tensor begins there."""
    data, other = ctx.zeros(N), ctx.zeros(N)
    launch(ctx, beyond, data, N=N, BUG=bug, PEER=False)
    del other


@case(kind="bounds")
def off_by_one_remote(ctx, bug):
    """The same in a peer's memory."""
    data, other = ctx.zeros(N), ctx.zeros(N)
    ctx.barrier()
    launch(ctx, beyond, data, N=N, BUG=bug, PEER=True)
    ctx.barrier()
    del other
