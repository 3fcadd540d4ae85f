"""Planted mistakes between programs of one rank, in small elements, and between hosts and kernels; see `corpus`."""
# mypy: ignore-errors

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from corpus import N, flags, launch, out, registry

import iris_triton as iris

CASES, case = registry()


# -- programs of one rank ---------------------------------------------------------------------------------------------
@triton.jit
def neighbours(context, data, flag, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr):
    i = tl.arange(0, N)
    if tl.program_id(0) == 0:
        tl.store(data + i, i.to(tl.float32))  # A programs_without_flag ticket_relaxed
        if HOW == "relaxed":
            tl.atomic_add(flag, 1, sem="relaxed")
        else:
            tl.atomic_add(flag, 1)
    else:
        if HOW == "relaxed":
            while tl.atomic_add(flag, 0, sem="relaxed") == 0:
                pass
        elif HOW == "right":
            while tl.atomic_add(flag, 0) == 0:
                pass
        tl.store(out + i, tl.load(data + i))  # B programs_without_flag ticket_relaxed


def _neighbours(ctx, how):
    data = ctx.zeros(N)
    launch(ctx, neighbours, data, torch.zeros(1, dtype=torch.int32), out(ctx), N=N, HOW=how, programs=2)
    ctx.barrier()


@case(ranks=1)
def programs_without_flag(ctx, bug):
    """One program reads what another one writes, without a flag."""
    _neighbours(ctx, "none" if bug else "right")


@case(ranks=1)
def ticket_relaxed(ctx, bug):
    """The last program is found by a relaxed counter; the flag is no memory of the heap."""
    _neighbours(ctx, "relaxed" if bug else "right")


@triton.jit
def locked(context, data, lock, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for _ in range(3):
        if BUG:
            while ctx.atomic_cas(lock, 0, 1, 0, sem="relaxed") != 0:
                pass
        else:
            while ctx.atomic_cas(lock, 0, 1, 0, sem="acquire") != 0:
                pass
        x = ctx.load(data + i, 0)  # A B lock_relaxed
        ctx.store(data + i, x + 1, 0)  # A B lock_relaxed
        ctx.atomic_xchg(lock, 0, 0, sem="release")


@case()
def lock_relaxed(ctx, bug):
    """A lock that is taken without acquiring."""
    data, lock = ctx.zeros(N), flags(ctx)
    ctx.barrier()
    launch(ctx, locked, data, lock, N=N, BUG=bug)


@triton.jit
def half_covered(
    context, data, words, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    pid = tl.program_id(0)
    peer = 1 - RANK
    ctx.store(data + pid * N + i, i.to(tl.float32), peer)  # A barrier_of_one_program
    if pid == 0 or not BUG:
        ctx.barrier(words, program=pid)
    tl.store(out + i, tl.load(data + pid * N + i))  # B barrier_of_one_program


@case()
def barrier_of_one_program(ctx, bug):
    """A barrier inside the kernel that only one of two programs calls."""
    data, words = ctx.zeros(2 * N), flags(ctx, 2 * (ctx.num_ranks + 1))
    ctx.barrier()
    launch(ctx, half_covered, data, words, out(ctx), N=N, BUG=bug, programs=2)


@triton.jit
def summed(context, total, RANK: tl.constexpr, WORLD: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    if BUG and RANK == 1:
        ctx.store(total, ctx.load(total, 0) + 1, 0)  # A B atomic_and_plain
    else:
        ctx.atomic_add(total, 1.0, 0, sem="relaxed", scope="sys")  # A B atomic_and_plain


@case()
def atomic_and_plain(ctx, bug):
    """One rank adds atomically, the other one by a load and a store."""
    total = ctx.zeros(1)
    ctx.barrier()
    launch(ctx, summed, total, BUG=bug)


# -- small elements ---------------------------------------------------------------------------------------------------
@triton.jit
def halves(context, data, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    shift = 0 if BUG else RANK
    ctx.store(data + 2 * i + shift, i.to(tl.float16), 0)  # A B same_half


@case()
def same_half(ctx, bug):
    """Two ranks store to 16-bit elements: to the same ones, or to both halves of the same words."""
    data = ctx.zeros(2 * N, dtype=torch.float16)
    ctx.barrier()
    launch(ctx, halves, data, N=N, BUG=bug)


@triton.jit
def bytes_of(context, data, RANK: tl.constexpr, WORLD: tl.constexpr, BUG: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, 16)
    first = 13 * RANK
    if BUG:
        first = 12 * RANK
    ctx.store(data + first + i, i.to(tl.int8), 0, mask=i < 13)  # A B overlapping_byte


@case()
def overlapping_byte(ctx, bug):
    """Two ranges of bytes that overlap in one byte."""
    data = ctx.zeros(64, dtype=torch.int8)
    ctx.barrier()
    launch(ctx, bytes_of, data, BUG=bug)


# -- host and device --------------------------------------------------------------------------------------------------
@triton.jit
def copy_to(context, source, data, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    ctx.store(data + i, tl.load(source + i), 1 - RANK)  # A kernels_without_barrier entry_barrier B exit_barrier


@triton.jit
def copy_from(context, data, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    x = ctx.load(data + i, 1 - RANK)  # A host_overwrites relaxed_overwrites B relaxed_barrier host_fills torch_barrier
    tl.store(out + i, x)


@triton.jit
def own(context, data, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + i))  # B kernels_without_barrier put_without_wait A exit_barrier


@case()
def kernels_without_barrier(ctx, bug):
    """A kernel stores to the peer, the next one reads there, without a barrier between them."""
    data, source = ctx.zeros(N), torch.ones(N)
    ctx.barrier()
    launch(ctx, copy_to, source, data, N=N)
    if not bug:
        ctx.device_barrier()
    launch(ctx, own, data, out(ctx), N=N)
    ctx.barrier()


@case()
def entry_barrier(ctx, bug):
    """The tensor's zeros come after the peer's store."""
    source, data = torch.ones(N), ctx.empty(N)
    ctx.barrier()
    data.zero_()  # B entry_barrier
    if not bug:
        ctx.barrier()
    launch(ctx, copy_to, source, data, N=N)
    ctx.barrier()


@case()
def exit_barrier(ctx, bug):
    """A rank stores what its peer still reads of the turn before."""
    data, source = ctx.zeros(N), torch.ones(N)
    ctx.barrier()
    launch(ctx, own, data, out(ctx), N=N)
    if not bug:
        ctx.device_barrier(sem="relaxed")
    launch(ctx, copy_to, source, data, N=N)
    ctx.barrier()


@case()
def host_overwrites(ctx, bug):
    """The host overwrites what the peer's kernel still reads."""
    data = ctx.zeros(N)
    ctx.barrier()
    launch(ctx, copy_from, data, out(ctx), N=N)
    if not bug:
        ctx.barrier()
    data.fill_(3)  # B host_overwrites
    ctx.barrier()


@case()
def host_fills(ctx, bug):
    """A peer's kernel reads what the host has just written."""
    data = ctx.zeros(N)
    ctx.barrier()
    data.add_(3)  # A host_fills
    if not bug:
        ctx.barrier()
    launch(ctx, copy_from, data, out(ctx), N=N)
    ctx.barrier()


@case()
def torch_barrier(ctx, bug):
    """As before; the barrier is torch's."""
    data = ctx.zeros(N)
    ctx.barrier()
    data.add_(3)  # A torch_barrier
    if not bug:
        dist.barrier()
    launch(ctx, copy_from, data, out(ctx), N=N)
    ctx.barrier()


@case()
def put_without_wait(ctx, bug):
    """The host puts data and a signal, and the peer does not wait for it."""
    data, flag = ctx.zeros(N), flags(ctx)
    ctx.barrier()
    if ctx.cur_rank == 0:
        ctx.put(data, 1, torch.ones(N), signal=flag)  # A put_without_wait
    else:
        if not bug:
            ctx.signal_wait(flag, 1)
        launch(ctx, own, data, out(ctx), N=N)
    ctx.barrier()


@case()
def relaxed_barrier(ctx, bug):
    """A relaxed barrier of the device between a store and a load of it."""
    data = ctx.zeros(N)
    ctx.barrier()
    data.add_(3)  # A relaxed_barrier
    ctx.device_barrier(sem="relaxed" if bug else "release")
    launch(ctx, copy_from, data, out(ctx), N=N)
    ctx.barrier()


@case()
def relaxed_overwrites(ctx, bug):
    """Behind reads a relaxed barrier is enough; without any, it is not."""
    data = ctx.zeros(N)
    ctx.barrier()
    launch(ctx, copy_from, data, out(ctx), N=N)
    if not bug:
        ctx.device_barrier(sem="relaxed")
    data.fill_(2)  # B relaxed_overwrites
    ctx.barrier()
