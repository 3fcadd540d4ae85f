"""Programs of the stack suite in Triton, for every backend whose device functions Triton kernels can call.

The device functions are arguments: they come from the backend under test (`device_api`), by the names and with the
parameters that every backend has.  What the kernels check with, their own loads and stores, is plain Triton.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

BLOCK = tl.constexpr(256)


@triton.jit
def _ring(
    put: tl.constexpr,
    signal: tl.constexpr,
    wait: tl.constexpr,
    source,
    target,
    found,
    flag,
    value,
    numel,
    me,
    peer,
    bases,
    timeout_ns,
):
    """One program: put, signal, wait, and copy what has arrived."""
    for start in range(0, numel, BLOCK):
        i = start + tl.arange(0, BLOCK)
        put(source + i, target + i, me, peer, bases, mask=i < numel)
    signal(flag, value, me, peer, bases)
    wait(flag, value, timeout_ns=timeout_ns)
    for start in range(0, numel, BLOCK):
        i = start + tl.arange(0, BLOCK)
        tl.store(found + i, tl.load(target + i, mask=i < numel), mask=i < numel)


@triton.jit
def _all_to_all(store: tl.constexpr, source, target, numel, me, bases):
    """One program per peer and block."""
    peer = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    data = tl.load(source + peer * numel + i, mask=i < numel)
    store(target + me * numel + i, data, me, peer, bases, mask=i < numel)


@triton.jit
def _add(atomic_add: tl.constexpr, counter, me, bases):
    """One program per peer and addition."""
    atomic_add(counter, tl.cast(me + 1, tl.int64), me, tl.program_id(0), bases)


@triton.jit
def _meet(
    store: tl.constexpr,
    barrier: tl.constexpr,
    slots,
    found,
    flags,
    value,
    me,
    bases,
    timeout_ns,
    W: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program: write to all, meet, note what is there, meet again before anybody goes on."""
    for peer in range(W):
        store(slots + me, tl.cast(value, tl.int64), me, peer, bases)
    barrier(flags, me, W, bases, timeout_ns=timeout_ns)
    i = tl.arange(0, LANES)
    tl.store(found + i, tl.load(slots + i, mask=i < W), mask=i < W)
    barrier(flags, me, W, bases, timeout_ns=timeout_ns)


def ring(ctx, source, target, found, flag, value, timeout_s):
    """See `iris_core.testing.conformance.stack.Programs`."""
    api = ctx.backend.device_api()
    functions = api["put"], api["signal"], api["wait"]
    me, peer, bases = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks, ctx.get_heap_bases()
    timeout_ns = int(timeout_s * 1e9)
    _ring[(1,)](*functions, source, target, found, flag, value, source.numel(), me, peer, bases, timeout_ns)


def all_to_all(ctx, source, target):
    """See `iris_core.testing.conformance.stack.Programs`."""
    store = ctx.backend.device_api()["store"]
    numel = source.shape[1]
    grid = (ctx.num_ranks, triton.cdiv(numel, BLOCK.value))
    _all_to_all[grid](store, source, target, numel, ctx.cur_rank, ctx.get_heap_bases())


def add(ctx, counter, num_programs):
    """See `iris_core.testing.conformance.stack.Programs`."""
    atomic_add = ctx.backend.device_api()["atomic_add"]
    _add[(ctx.num_ranks, num_programs)](atomic_add, counter, ctx.cur_rank, ctx.get_heap_bases())


def meet(ctx, slots, found, flags, value, timeout_s):
    """See `iris_core.testing.conformance.stack.Programs`."""
    api = ctx.backend.device_api()
    functions = api["store"], api["barrier"]
    me, bases, timeout_ns = ctx.cur_rank, ctx.get_heap_bases(), int(timeout_s * 1e9)
    world, lanes = ctx.num_ranks, triton.next_power_of_2(ctx.num_ranks)
    _meet[(1,)](*functions, slots, found, flags, value, me, bases, timeout_ns, W=world, LANES=lanes)
