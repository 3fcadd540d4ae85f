"""Programs of the conformance kit's stack suite, for backends whose device functions Triton or Gluon kernels can call.

The device functions are arguments: they come from the backend under test (`device_api`), by the names and with the
parameters that every backend has.  So does the class DeviceContext, which offers `from_tensor(context_tensor,
world_size)` or else `initialize(context_tensor)`.  Where `initialize` is written in Gluon, the kernels are compiled as
Gluon, else as Triton.
Which of both is called, a function or the method, `languages.invoke` decides: it gets the arguments of each.  What the
kernels check with, their own loads and stores, is the language's.
"""

import functools

import triton
import triton.language as tl

from iris_triton._compat import language_of
from iris_triton.language.blocks import lanes as places
from iris_triton.testing.languages import in_gluon, invoke, open_context

_RANKS = ["me", "peer", "far"]  # no binary of its own for rank 1


# -- every device function, as a function and as a method -------------------------------------------------------------
@triton.jit(do_not_specialize=_RANKS)
def _move(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, source, target, lanes, other, context, bases,
    me, peer, far, masked: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    api: tl.constexpr = (function, Context, name)
    i = places(LANES)
    if masked:
        mask, fill = tl.load(lanes + i) != 0, other
    else:
        mask: tl.constexpr = None
        fill: tl.constexpr = None
    src, dst, ranks = source + i, target + i, (me, peer, bases)
    if name == "load":
        tl.store(dst, invoke(api, context, W, (src,), ranks, (peer,), (mask, fill)))
    elif name == "store":
        invoke(api, context, W, (dst, tl.load(src)), ranks, (peer,), (mask,))
    elif name == "copy":
        invoke(api, context, W, (src, dst, peer, far), (me, bases), (), (mask, fill))
    else:
        invoke(api, context, W, (src, dst), ranks, (peer,), (mask, fill))


@triton.jit
def _atomic(api: tl.constexpr, pointer, compare, value, context, bases, me, peer, options, W: tl.constexpr):
    if api[2] == "atomic_cas":
        words = (pointer, compare, value)
    else:
        words = (pointer, value)
    return invoke(api, context, W, words, (me, peer, bases), (peer,), options)


@triton.jit(do_not_specialize=_RANKS)
def _change(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, cells, operands, compares, found, lanes,
    context, bases, me, peer, masked: tl.constexpr, LANES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    api: tl.constexpr = (function, Context, name)
    i = places(LANES)
    value, compare = tl.load(operands + i), tl.load(compares + i)
    if not masked:
        tl.store(found + i, _atomic(api, cells + i, compare, value, context, bases, me, peer, (), W))
    elif name == "atomic_cas":
        old = _atomic(api, cells + i, compare, value, context, bases, me, peer, ("acq_rel", "sys"), W)
        tl.store(found + i, old)
    else:
        mask = tl.load(lanes + i) != 0
        old = _atomic(api, cells + i, compare, value, context, bases, me, peer, (mask, "acq_rel", "sys"), W)
        tl.store(found + i, old, mask=mask)


@triton.jit(do_not_specialize=_RANKS)
def _contend(
    function: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, cell, operands, compares, found, context, bases,
    me, W: tl.constexpr
):  # fmt: skip
    """One program per peer and operand."""
    api: tl.constexpr = (function, Context, name)
    peer, j = tl.program_id(0), tl.program_id(1)
    value, compare = tl.load(operands + j), tl.load(compares + j)
    old = _atomic(api, cell, compare, value, context, bases, me, peer, (), W)
    tl.store(found + peer * tl.num_programs(1) + j, old)


@triton.jit
def _wait(api: tl.constexpr, context, W: tl.constexpr, pointer, value, cmp: tl.constexpr, timeout_ns):
    """Call wait or wait_any: a function takes its bound as an argument, a method from the context."""
    if api[1] is None:
        return api[0](pointer, value, cmp, timeout_ns=timeout_ns)
    else:
        return invoke(api, context, W, (pointer, value, cmp), (), (), ())


@triton.jit(do_not_specialize=_RANKS)
def _send(
    function: tl.constexpr, put: tl.constexpr, wait: tl.constexpr, Context: tl.constexpr, name: tl.constexpr,
    op: tl.constexpr, source, target, found, flag, value, awaited, context, bases, me, peer, timeout_ns,
    LANES: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """One program: put, signal, wait, and copy what has arrived."""
    api: tl.constexpr = (function, Context, name)
    i = places(LANES)
    if name == "signal":
        invoke((put, Context, "put"), context, W, (source + i, target + i), (me, peer, bases), (peer,), ())
        invoke(api, context, W, (flag, value), (me, peer, bases), (peer,), (op,))
    else:
        invoke(api, context, W, (source + i, target + i, flag, value), (me, peer, bases), (peer,), (op,))
    _wait((wait, Context, "wait"), context, W, flag, awaited, "ge", timeout_ns)
    tl.store(found + i, tl.load(target + i))


@triton.jit(do_not_specialize=_RANKS)
def _await_flag(
    signal: tl.constexpr, wait: tl.constexpr, Context: tl.constexpr, cmp: tl.constexpr, flag, sent, value, found,
    context, bases, me, peer, timeout_ns, W: tl.constexpr
):  # fmt: skip
    invoke((signal, Context, "signal"), context, W, (flag, sent), (me, peer, bases), (peer,), ())
    tl.store(found, _wait((wait, Context, "wait"), context, W, flag, value, cmp, timeout_ns))


@triton.jit(do_not_specialize=_RANKS)
def _look(
    function: tl.constexpr, signal: tl.constexpr, Context: tl.constexpr, name: tl.constexpr, cmp: tl.constexpr, flags,
    sent, value, found, context, bases, me, peer, timeout_ns, W: tl.constexpr
):  # fmt: skip
    api: tl.constexpr = (function, Context, name)
    i = places(2)
    if name == "wait_any":
        invoke((signal, Context, "signal"), context, W, (flags + 1, sent), (me, peer, bases), (peer,), ())
        tl.store(found, _wait(api, context, W, flags + i, value, cmp, timeout_ns))
    elif name == "test":
        for each in tl.static_range(2):
            tl.store(found + each, invoke(api, context, W, (flags + each, value, cmp), (), (), ()))
    else:
        tl.store(found + i, invoke(api, context, W, (flags + i,), (), (), ()))


@triton.jit(do_not_specialize=_RANKS)
def _meet(
    store: tl.constexpr, barrier: tl.constexpr, Context: tl.constexpr, slots, found, flags, value, context, bases, me,
    timeout_ns, grouped: tl.constexpr, begin, stride, size, W: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """One program: write to all ranks, barrier, record the slots, barrier."""
    data = (slots + me, tl.cast(value, tl.int64))
    for peer in range(W):
        invoke((store, Context, "store"), context, W, data, (me, peer, bases), (peer,), ())
    if grouped:
        group = (begin, stride, size)
    else:
        group = ()
    for turn in tl.static_range(2):
        if Context is None:
            barrier(flags, me, W, bases, *group, timeout_ns=timeout_ns)
        else:
            open_context(Context, context, W).barrier(flags, *group)
        if turn == 0:
            i = places(LANES)
            tl.store(found + i, tl.load(slots + i, mask=i < W), mask=i < W)


# -- launching; what these do is said in docs/conformance_kit.md ------------------------------------------------------
_in_gluon = functools.cache(in_gluon)


def _launch(ctx, kernel, grid, form, names, *arguments, **sizes):
    """Launch a kernel in the language of the backend under test, with functions of it, or its DeviceContext as well."""
    api = ctx.backend.device_api()
    initialize = getattr(api.get("DeviceContext"), "initialize", None)
    in_triton = initialize is None or language_of(initialize) == "triton"
    given = *(api[name] for name in names.split()), api["DeviceContext"] if form == "method" else None, *arguments
    (kernel if in_triton else _in_gluon(kernel))[grid](*given, W=ctx.num_ranks, **sizes)


def _where(ctx, *peers):
    """Return the context tensor, the heap bases, this rank and others: the next one unless they are given."""
    others = peers or [(ctx.cur_rank + 1) % ctx.num_ranks]
    return ctx.get_device_context(), ctx.get_heap_bases(), ctx.cur_rank, *others


def move(ctx, form, name, source, target, lanes, other, peer, far):
    """load, store, get, put or copy."""
    arguments = name, source, target, source if lanes is None else lanes, other, *_where(ctx, peer, far)
    _launch(ctx, _move, (1,), form, name, *arguments, masked=lanes is not None, LANES=source.numel())


def change(ctx, form, name, cells, operands, compares, found, lanes, peer):
    """Call an atomic on a block."""
    arguments = name, cells, operands, compares, found, cells if lanes is None else lanes, *_where(ctx, peer)
    _launch(ctx, _change, (1,), form, name, *arguments, masked=lanes is not None, LANES=cells.numel())


def contend(ctx, form, name, cell, operands, compares, found):
    """Call an atomic from many programs."""
    arguments = name, cell, operands, compares, found, *_where(ctx)[:3]
    _launch(ctx, _contend, (ctx.num_ranks, operands.numel()), form, name, *arguments)


def send(ctx, form, name, op, source, target, found, flag, value, awaited, timeout_s, *peer):
    """Call put with signal, or put_signal; to the next rank, or to `peer`."""
    arguments = name, op, source, target, found, flag, value, awaited, *_where(ctx, *peer), int(timeout_s * 1e9)
    _launch(ctx, _send, (1,), form, f"{name} put wait", *arguments, LANES=source.numel())


def await_flag(ctx, form, cmp, flag, sent, value, found, timeout_s):
    """Call wait."""
    arguments = cmp, flag, sent, value, found, *_where(ctx), int(timeout_s * 1e9)
    _launch(ctx, _await_flag, (1,), form, "signal wait", *arguments)


def look(ctx, form, name, cmp, flags, sent, value, found, timeout_s):
    """wait_any, test or load_acquire."""
    arguments = name, cmp, flags, sent, value, found, *_where(ctx), int(timeout_s * 1e9)
    _launch(ctx, _look, (1,), form, f"{name} signal", *arguments)


def meet(ctx, form, slots, found, flags, value, group, timeout_s):
    """Call barrier."""
    world, where = ctx.num_ranks, _where(ctx)[:3]
    arguments = slots, found, flags, value, *where, int(timeout_s * 1e9), group is not None, *(group or (0, 1, world))
    _launch(ctx, _meet, (1,), form, "store barrier", *arguments, LANES=triton.next_power_of_2(world))
