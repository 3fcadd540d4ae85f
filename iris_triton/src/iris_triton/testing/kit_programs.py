"""Programs of the conformance kit's stack suite, for backends whose device functions Triton or Gluon kernels can call.

The device functions are arguments: they come from the backend under test (`device_api`), by the names and with the
parameters that every backend has.  So does the class DeviceContext, which offers `from_tensor(context_tensor,
world_size)` or else `initialize(context_tensor)`.  Where `initialize` is written in Gluon, the kernels are compiled as
Gluon, else as Triton.
What the kernels check with, their own loads and stores, is the language's.
"""
# mypy: ignore-errors

import functools

import triton
import triton.language as tl

from iris_triton._compat import language_of
from iris_triton.language.blocks import lanes as places
from iris_triton.testing.languages import in_gluon, open_context

BLOCK = tl.constexpr(256)
_RANKS = ["me", "peer", "far"]  # no binary of its own for rank 1


@triton.jit
def _ring(
    put: tl.constexpr, signal: tl.constexpr, wait: tl.constexpr, source, target, found, flag, value, numel, me, peer,
    bases, timeout_ns
):  # fmt: skip
    """One program: put, signal, wait, and copy what has arrived."""
    for start in range(0, numel, BLOCK):
        i = start + places(BLOCK)
        put(source + i, target + i, me, peer, bases, mask=i < numel)
    signal(flag, value, me, peer, bases)
    wait(flag, value, timeout_ns=timeout_ns)
    for start in range(0, numel, BLOCK):
        i = start + places(BLOCK)
        tl.store(found + i, tl.load(target + i, mask=i < numel), mask=i < numel)


@triton.jit
def _all_to_all(store: tl.constexpr, source, target, numel, me, bases):
    """One program per peer and block."""
    peer = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + places(BLOCK)
    data = tl.load(source + peer * numel + i, mask=i < numel)
    store(target + me * numel + i, data, me, peer, bases, mask=i < numel)


# -- every device function, as a function and as a method -------------------------------------------------------------
@triton.jit(do_not_specialize=_RANKS)
def _move(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, source, target, lanes, other, context, bases,
    me, peer, far, masked: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    i = places(LANES)
    if masked:
        mask = tl.load(lanes + i) != 0
        fill = other
    else:
        mask = None
        fill = None
    if Context is None:
        if name == "load":
            tl.store(target + i, function(source + i, me, peer, bases, mask=mask, other=fill))
        elif name == "store":
            function(target + i, tl.load(source + i), me, peer, bases, mask=mask)
        elif name == "copy":
            function(source + i, target + i, peer, far, me, bases, mask=mask, other=fill)
        else:
            function(source + i, target + i, me, peer, bases, mask=mask, other=fill)
    else:
        dev = open_context(Context, context, W)
        if name == "load":
            tl.store(target + i, dev.load(source + i, peer, mask=mask, other=fill))
        elif name == "store":
            dev.store(target + i, tl.load(source + i), peer, mask=mask)
        elif name == "copy":
            dev.copy(source + i, target + i, peer, far, mask=mask, other=fill)
        else:
            getattr(Context, name)(dev, source + i, target + i, peer, mask=mask, other=fill)


@triton.jit
def _atomic(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, pointer, compare, value, context, bases, me,
    peer, mask, sem: tl.constexpr, scope: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    if Context is None:
        if name == "atomic_cas":
            old = function(pointer, compare, value, me, peer, bases, sem=sem, scope=scope)
        else:
            old = function(pointer, value, me, peer, bases, mask=mask, sem=sem, scope=scope)
    else:
        dev = open_context(Context, context, W)
        if name == "atomic_cas":
            old = dev.atomic_cas(pointer, compare, value, peer, sem=sem, scope=scope)
        else:
            old = getattr(Context, name)(dev, pointer, value, peer, mask=mask, sem=sem, scope=scope)
    return old


@triton.jit(do_not_specialize=_RANKS)
def _change(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, cells, operands, compares, found, lanes,
    context, bases, me, peer, masked: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, LANES: tl.constexpr,
    W: tl.constexpr
):  # fmt: skip
    i = places(LANES)
    if masked:
        mask = tl.load(lanes + i) != 0
    else:
        mask = None
    value, compare = tl.load(operands + i), tl.load(compares + i)
    old = _atomic(function, Context, name, cells + i, compare, value, context, bases, me, peer, mask, sem, scope, W)
    tl.store(found + i, old, mask=mask)


@triton.jit(do_not_specialize=_RANKS)
def _contend(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, cell, operands, compares, found, context, bases,
    me, W: tl.constexpr
):  # fmt: skip
    """One program per peer and operand."""
    peer, j = tl.program_id(0), tl.program_id(1)
    value, compare = tl.load(operands + j), tl.load(compares + j)
    old = _atomic(function, Context, name, cell, compare, value, context, bases, me, peer, None, None, None, W)
    tl.store(found + peer * tl.num_programs(1) + j, old)


@triton.jit(do_not_specialize=_RANKS)
def _send(
    function: tl.constexpr, wait: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, op: tl.constexpr, source,
    target, found, flag, value, awaited, context, bases, me, peer, timeout_ns, LANES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    i = places(LANES)
    if Context is None:
        if name == "signal":
            function(flag, value, me, peer, bases, op=op)
        else:
            function(source + i, target + i, flag, value, me, peer, bases, op=op)
            wait(flag, awaited, timeout_ns=timeout_ns)
    else:
        dev = open_context(Context, context, W)
        if name == "signal":
            dev.signal(flag, value, peer, op=op)
        else:
            dev.put_signal(source + i, target + i, flag, value, peer, op=op)
            dev.wait(flag, awaited)
    if name == "put_signal":
        tl.store(found + i, tl.load(target + i))


@triton.jit(do_not_specialize=_RANKS)
def _await_flag(
    signal: tl.constexpr, wait: tl.constexpr, Context: tl.constexpr, cmp: tl.constexpr, flag, sent, value, found,
    context, bases, me, peer, timeout_ns, W: tl.constexpr
):  # fmt: skip
    if Context is None:
        signal(flag, sent, me, peer, bases)
        seen = wait(flag, value, cmp=cmp, timeout_ns=timeout_ns)
    else:
        dev = open_context(Context, context, W)
        dev.signal(flag, sent, peer)
        seen = dev.wait(flag, value, cmp=cmp)
    tl.store(found, seen)


@triton.jit(do_not_specialize=_RANKS)
def _look(
    function: tl.constexpr, signal: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, cmp: tl.constexpr, flags,
    sent, value, found, context, bases, me, peer, timeout_ns, W: tl.constexpr
):  # fmt: skip
    i = places(2)
    if Context is None:
        if name == "wait_any":
            signal(flags + 1, sent, me, peer, bases)
            tl.store(found, function(flags + i, value, cmp=cmp, timeout_ns=timeout_ns))
        elif name == "test":
            tl.store(found, function(flags, value, cmp=cmp))
            tl.store(found + 1, function(flags + 1, value, cmp=cmp))
        else:
            tl.store(found + i, function(flags + i))
    else:
        dev = open_context(Context, context, W)
        if name == "wait_any":
            dev.signal(flags + 1, sent, peer)
            tl.store(found, dev.wait_any(flags + i, value, cmp=cmp))
        elif name == "test":
            tl.store(found, dev.test(flags, value, cmp=cmp))
            tl.store(found + 1, dev.test(flags + 1, value, cmp=cmp))
        else:
            tl.store(found + i, dev.load_acquire(flags + i))


@triton.jit
def _barrier(
    barrier: tl.constexpr, Context: tl.constexpr, flags, context, bases, me, timeout_ns, grouped: tl.constexpr, begin,
    stride, size, W: tl.constexpr
):  # fmt: skip
    if Context is None:
        if grouped:
            barrier(flags, me, W, bases, begin, stride, size, timeout_ns=timeout_ns)
        else:
            barrier(flags, me, W, bases, timeout_ns=timeout_ns)
    else:
        dev = open_context(Context, context, W)
        if grouped:
            dev.barrier(flags, begin, stride, size)
        else:
            dev.barrier(flags)


@triton.jit(do_not_specialize=_RANKS)
def _meet(
    store: tl.constexpr, barrier: tl.constexpr, Context: tl.constexpr, slots, found, flags, value, context, bases, me,
    timeout_ns, grouped: tl.constexpr, begin, stride, size, W: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """One program: write to all, meet, note what is there, meet again before a rank goes on."""
    for peer in range(W):
        if Context is None:
            store(slots + me, tl.cast(value, tl.int64), me, peer, bases)
        else:
            dev = open_context(Context, context, W)
            dev.store(slots + me, tl.cast(value, tl.int64), peer)
    _barrier(barrier, Context, flags, context, bases, me, timeout_ns, grouped, begin, stride, size, W)
    i = places(LANES)
    tl.store(found + i, tl.load(slots + i, mask=i < W), mask=i < W)
    _barrier(barrier, Context, flags, context, bases, me, timeout_ns, grouped, begin, stride, size, W)


# -- launching; what these do is said in iris_core.testing.conformance.stack.Programs --------------------------------
_in_gluon = functools.cache(in_gluon)


def _launcher(ctx, kernel, *grid):
    """A kernel for a grid, in the language of the backend under test."""
    initialize = getattr(ctx.backend.device_api().get("DeviceContext"), "initialize", None)
    in_triton = initialize is None or language_of(initialize) == "triton"
    return (kernel if in_triton else _in_gluon(kernel))[grid]


def _api(ctx, form, *names):
    """The functions of the backend under test, and its DeviceContext if methods are to be called."""
    api = ctx.backend.device_api()
    return *(api[name] for name in names), api["DeviceContext"] if form == "method" else None


def _where(ctx):
    """The context tensor and the heap bases."""
    return ctx.get_device_context(), ctx.get_heap_bases()


def _ns(timeout_s):
    return int(timeout_s * 1e9)


def ring(ctx, source, target, found, flag, value, timeout_s):
    """See `iris_core.testing.conformance.stack.Programs`, here and below."""
    api = ctx.backend.device_api()
    functions = api["put"], api["signal"], api["wait"]
    me, peer, bases = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks, ctx.get_heap_bases()
    _launcher(ctx, _ring, 1)(
        *functions, source, target, found, flag, value, source.numel(), me, peer, bases, _ns(timeout_s)
    )


def all_to_all(ctx, source, target):
    """Send a row to every rank."""
    store = ctx.backend.device_api()["store"]
    numel = source.shape[1]
    _launcher(ctx, _all_to_all, ctx.num_ranks, triton.cdiv(numel, BLOCK.value))(
        store, source, target, numel, ctx.cur_rank, ctx.get_heap_bases()
    )


def move(ctx, form, name, source, target, lanes, other, peer, far):
    """load, store, get, put or copy."""
    tensors = source, target, source if lanes is None else lanes, other, *_where(ctx)
    ranks = ctx.cur_rank, peer, far
    sizes = {"masked": lanes is not None, "LANES": source.numel(), "W": ctx.num_ranks}
    _launcher(ctx, _move, 1)(*_api(ctx, form, name), name, *tensors, *ranks, **sizes)


def change(ctx, form, name, cells, operands, compares, found, lanes, peer):
    """An atomic on a block."""
    masked = lanes is not None
    tensors = cells, operands, compares, found, lanes if masked else cells, *_where(ctx)
    order = {"sem": "acq_rel" if masked else None, "scope": "sys" if masked else None}
    sizes = {"masked": masked and name != "atomic_cas", "LANES": cells.numel(), "W": ctx.num_ranks}
    _launcher(ctx, _change, 1)(*_api(ctx, form, name), name, *tensors, ctx.cur_rank, peer, **order, **sizes)


def contend(ctx, form, name, cell, operands, compares, found):
    """An atomic of many programs."""
    arguments = cell, operands, compares, found, *_where(ctx), ctx.cur_rank
    _launcher(ctx, _contend, ctx.num_ranks, operands.numel())(*_api(ctx, form, name), name, *arguments, W=ctx.num_ranks)


def send(ctx, form, name, op, source, target, found, flag, value, awaited, timeout_s):
    """signal or put_signal."""
    me, peer = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
    arguments = source, target, found, flag, value, awaited, *_where(ctx), me, peer, _ns(timeout_s)
    _launcher(ctx, _send, 1)(
        *_api(ctx, form, name, "wait"), name, op, *arguments, LANES=source.numel(), W=ctx.num_ranks
    )


def await_flag(ctx, form, cmp, flag, sent, value, found, timeout_s):
    """wait."""
    me, peer = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
    arguments = flag, sent, value, found, *_where(ctx), me, peer, _ns(timeout_s)
    _launcher(ctx, _await_flag, 1)(*_api(ctx, form, "signal", "wait"), cmp, *arguments, W=ctx.num_ranks)


def look(ctx, form, name, cmp, flags, sent, value, found, timeout_s):
    """wait_any, test or load_acquire."""
    me, peer = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks
    arguments = flags, sent, value, found, *_where(ctx), me, peer, _ns(timeout_s)
    _launcher(ctx, _look, 1)(*_api(ctx, form, name, "signal"), name, cmp, *arguments, W=ctx.num_ranks)


def meet(ctx, form, slots, found, flags, value, group, timeout_s):
    """barrier."""
    world = ctx.num_ranks
    arguments = slots, found, flags, value, *_where(ctx), ctx.cur_rank, _ns(timeout_s)
    sizes = {"W": world, "LANES": triton.next_power_of_2(world)}
    _launcher(ctx, _meet, 1)(
        *_api(ctx, form, "store", "barrier"), *arguments, group is not None, *(group or (0, 1, world)), **sizes
    )
