"""Planted mistakes between programs of one rank, in small elements, and between hosts and kernels; see `corpus`."""
# mypy: ignore-errors

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from corpus import N, flags, heap, launch, out, registry

import iris_triton as iris

CASES, case, planted = registry()


# -- programs of one rank ---------------------------------------------------------------------------------------------
def words(ctx):
    """A flag that is no memory of the heap."""
    return torch.zeros(1, dtype=torch.int32)


@triton.jit
def neighbours(data, flag, out, N: tl.constexpr, HOW: tl.constexpr):
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


NEIGHBOURS = neighbours, heap(N), words, out
planted(
    "programs_without_flag", "One program reads what another one writes.", *NEIGHBOURS, ranks=1, programs=2,
    HOW=("right", "none"),
)  # fmt: skip
planted(
    "ticket_relaxed", "The last program is found by a relaxed counter.", *NEIGHBOURS, ranks=1, programs=2,
    HOW=("right", "relaxed"),
)  # fmt: skip


@triton.jit
def locked(context, data, lock, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr, SEM: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    for _ in range(3):
        while ctx.atomic_cas(lock, 0, 1, 0, sem=SEM) != 0:
            pass
        x = ctx.load(data + i, 0)  # A B lock_relaxed
        ctx.store(data + i, x + 1, 0)  # A B lock_relaxed
        ctx.atomic_xchg(lock, 0, 0, sem="release")


planted("lock_relaxed", "A lock that is taken without acquiring.", locked, heap(N), flags(), SEM=("acquire", "relaxed"))


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


planted(
    "barrier_of_one_program", "A barrier inside the kernel that only one of two programs calls.", half_covered,
    heap(2 * N), flags(6), out, programs=2,
)  # fmt: skip


# -- small elements ---------------------------------------------------------------------------------------------------
@triton.jit
def bytes_of(context, data, RANK: tl.constexpr, WORLD: tl.constexpr, FIRST: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, 16)
    ctx.store(data + FIRST * RANK + i, i.to(tl.int8), 0, mask=i < 13)  # A B overlapping_byte


planted("overlapping_byte", "Ranges that overlap in one byte.", bytes_of, heap(64, dtype=torch.int8), FIRST=(13, 12))


# -- host and device --------------------------------------------------------------------------------------------------
@triton.jit
def copy_to(context, source, data, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    ctx.store(data + i, tl.load(source + i), 1 - RANK)  # A kernels_without_barrier B entry_barrier exit_barrier


@triton.jit
def copy_from(context, data, out, RANK: tl.constexpr, WORLD: tl.constexpr, N: tl.constexpr):
    ctx = iris.DeviceContext.initialize(context, RANK, WORLD)
    i = tl.arange(0, N)
    x = ctx.load(data + i, 1 - RANK)  # A host_overwrites relaxed_overwrites B relaxed_barrier host_fills torch_barrier
    tl.store(out + i, x)


@triton.jit
def own(data, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(data + i))  # A exit_barrier B kernels_without_barrier put_without_wait


def changes(ctx, data):
    data.add_(3)  # A entry_barrier host_fills torch_barrier relaxed_barrier B host_overwrites relaxed_overwrites


def stores(ctx, data):
    launch(ctx, copy_to, torch.ones(N), data)


def loads(ctx, data):
    launch(ctx, copy_from, data, out(ctx))


def reads(ctx, data):
    launch(ctx, own, data, out(ctx))


def in_turn(name, about, first, barrier, second, wrong=lambda ctx: None):
    """Enter two steps of the host or of kernels, with a barrier between them, or what is wrong in its place."""

    def run(ctx, bug):
        data = ctx.zeros(N)
        ctx.barrier()
        first(ctx, data)
        (wrong if bug else barrier)(ctx)
        second(ctx, data)
        ctx.barrier()

    run.__name__, run.__doc__ = name, about
    case()(run)


def exchanged(ctx):
    ctx.barrier()


def device(ctx):
    ctx.device_barrier()


def relaxed(ctx):
    ctx.device_barrier(sem="relaxed")


in_turn("kernels_without_barrier", "A kernel stores to the peer, the next one reads there.", stores, device, reads)
in_turn("entry_barrier", "The host's own change comes after the peer's store.", changes, exchanged, stores)
in_turn("exit_barrier", "A rank stores what its peer still reads of the turn before.", reads, relaxed, stores)
in_turn("host_overwrites", "The host overwrites what the peer's kernel still reads.", loads, exchanged, changes)
in_turn("host_fills", "A peer's kernel reads what the host has just written.", changes, exchanged, loads)
in_turn("torch_barrier", "As before; the barrier is torch's.", changes, lambda ctx: dist.barrier(), loads)
in_turn("relaxed_barrier", "A barrier between a store and a load of it is relaxed.", changes, device, loads, relaxed)
in_turn("relaxed_overwrites", "Behind reads a relaxed barrier is enough.", loads, relaxed, changes)


@case()
def put_without_wait(ctx, bug):
    """The host puts data and a signal, and the peer does not wait for it."""
    data, flag = heap(N)(ctx), flags()(ctx)
    ctx.barrier()
    if ctx.cur_rank == 0:
        ctx.put(data, 1, torch.ones(N), signal=flag)  # A put_without_wait
    else:
        if not bug:
            ctx.signal_wait(flag, 1)
        reads(ctx, data)
    ctx.barrier()
