"""Programs of the conformance kit's stack suite in Gluon; see `iris_core.testing.conformance.stack.Programs`.

The device functions are arguments: they come from the backend under test (`device_api`).
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon import default_layout

BLOCK = gl.constexpr(256)


@gluon.jit
def _ring(
    put: gl.constexpr, signal: gl.constexpr, wait: gl.constexpr, source, target, found, flag, value, numel, me, peer,
    bases, timeout_ns,
):  # fmt: skip
    """One program: put, signal, wait, and copy what has arrived."""
    lanes = gl.arange(0, BLOCK, layout=default_layout([BLOCK]))
    for start in range(0, numel, BLOCK):
        i = start + lanes
        put(source + i, target + i, me, peer, bases, mask=i < numel)
    signal(flag, value, me, peer, bases)
    wait(flag, value, timeout_ns=timeout_ns)
    for start in range(0, numel, BLOCK):
        i = start + lanes
        gl.store(found + i, gl.load(target + i, mask=i < numel), mask=i < numel)


@gluon.jit
def _all_to_all(store: gl.constexpr, source, target, numel, me, bases):
    """One program per peer and block."""
    peer = gl.program_id(0)
    i = gl.program_id(1) * BLOCK + gl.arange(0, BLOCK, layout=default_layout([BLOCK]))
    data = gl.load(source + peer * numel + i, mask=i < numel)
    store(target + me * numel + i, data, me, peer, bases, mask=i < numel)


@gluon.jit
def _add(atomic_add: gl.constexpr, counter, me, bases):
    """One program per peer and addition."""
    atomic_add(counter, gl.cast(me + 1, gl.int64), me, gl.program_id(0), bases)


@gluon.jit
def _meet(
    store: gl.constexpr, barrier: gl.constexpr, slots, found, flags, value, me, bases, timeout_ns, W: gl.constexpr,
    LANES: gl.constexpr,
):  # fmt: skip
    """One program: write to all, meet, note what is there, meet again before anybody goes on."""
    for peer in range(W):
        store(slots + me, gl.cast(value, gl.int64), me, peer, bases)
    barrier(flags, me, W, bases, timeout_ns=timeout_ns)
    i = gl.arange(0, LANES, layout=default_layout([LANES]))
    gl.store(found + i, gl.load(slots + i, mask=i < W), mask=i < W)
    barrier(flags, me, W, bases, timeout_ns=timeout_ns)


def ring(ctx, source, target, found, flag, value, timeout_s):
    api = ctx.backend.device_api()
    functions = api["put"], api["signal"], api["wait"]
    me, peer, bases = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks, ctx.get_heap_bases()
    timeout_ns = int(timeout_s * 1e9)
    _ring[(1,)](*functions, source, target, found, flag, value, source.numel(), me, peer, bases, timeout_ns)


def all_to_all(ctx, source, target):
    numel = source.shape[1]
    grid = (ctx.num_ranks, triton.cdiv(numel, BLOCK.value))
    store = ctx.backend.device_api()["store"]
    _all_to_all[grid](store, source, target, numel, ctx.cur_rank, ctx.get_heap_bases())


def add(ctx, counter, num_programs):
    atomic_add = ctx.backend.device_api()["atomic_add"]
    _add[(ctx.num_ranks, num_programs)](atomic_add, counter, ctx.cur_rank, ctx.get_heap_bases())


def meet(ctx, slots, found, flags, value, timeout_s):
    api = ctx.backend.device_api()
    me, bases, timeout_ns = ctx.cur_rank, ctx.get_heap_bases(), int(timeout_s * 1e9)
    world, lanes = ctx.num_ranks, triton.next_power_of_2(ctx.num_ranks)
    functions = api["store"], api["barrier"]
    _meet[(1,)](*functions, slots, found, flags, value, me, bases, timeout_ns, W=world, LANES=lanes)
