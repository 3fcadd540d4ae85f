"""Kernels that must compile for every GPU target, and what must be in their assembly.

The cases of the language are those of iris_triton, name by name and pattern by pattern: only the kernels are written in
Gluon.  Blocks of four elements per thread and more keep their 16-byte accesses, whatever the layout's warp size.  The
cases of the collectives are the kernels of `iris_gluon.collectives`.
"""
# mypy: ignore-errors

import dataclasses

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.types import CompileCase
from iris_gluon import language
from iris_gluon.collectives import cases as _collectives
from iris_gluon.context import IrisDeviceCtx
from iris_gluon.layouts import default_layout
from iris_triton.testing import cases as _triton
from iris_triton.tiles import cases as _tiles
from iris_triton.tiles import views as _views


@gluon.constexpr_function
def _per_access(element_type):
    """Elements in 16 bytes."""
    return 128 // element_type.primitive_bitwidth


@gluon.jit
def move(
    op: gl.constexpr, method: gl.constexpr, x, y, context, me, peer, n, W: gl.constexpr, BLOCK: gl.constexpr,
    hint: gl.constexpr
):  # fmt: skip
    """One remote load, store, get, put or copy of a masked block."""
    layout: gl.constexpr = default_layout([BLOCK], vector=_per_access(x.dtype.element_ty))
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=layout)
    mask = i < n
    if method:
        ctx = IrisDeviceCtx.initialize(context)
        if op == "load":
            gl.store(y + i, ctx.load(x + i, peer, mask=mask, hint=hint), mask=mask)
        elif op == "store":
            ctx.store(y + i, gl.load(x + i, mask=mask), peer, mask=mask, hint=hint)
        elif op == "get":
            ctx.get(x + i, y + i, peer, mask=mask, hint=hint)
        elif op == "put":
            ctx.put(x + i, y + i, peer, mask=mask, hint=hint)
        else:
            ctx.copy(x + i, y + i, peer, (peer + 1) % W, mask=mask, hint=hint)
    else:
        bases = context + 2
        if op == "load":
            gl.store(y + i, language.load(x + i, me, peer, bases, mask=mask, hint=hint), mask=mask)
        elif op == "store":
            language.store(y + i, gl.load(x + i, mask=mask), me, peer, bases, mask=mask, hint=hint)
        elif op == "get":
            language.get(x + i, y + i, me, peer, bases, mask=mask, hint=hint)
        elif op == "put":
            language.put(x + i, y + i, me, peer, bases, mask=mask, hint=hint)
        else:
            language.copy(x + i, y + i, peer, (peer + 1) % W, me, bases, mask=mask, hint=hint)


@gluon.jit
def atomic(
    op: gl.constexpr, method: gl.constexpr, x, out, context, me, peer, value, W: gl.constexpr, sem: gl.constexpr,
    scope: gl.constexpr
):  # fmt: skip
    """One atomic on a peer's word; the old value is kept."""
    if method:
        ctx = IrisDeviceCtx.initialize(context)
        if op == "add":
            old = ctx.atomic_add(x, value, peer, sem=sem, scope=scope)
        elif op == "sub":
            old = ctx.atomic_sub(x, value, peer, sem=sem, scope=scope)
        elif op == "cas":
            old = ctx.atomic_cas(x, 0, value, peer, sem=sem, scope=scope)
        elif op == "xchg":
            old = ctx.atomic_xchg(x, value, peer, sem=sem, scope=scope)
        elif op == "xor":
            old = ctx.atomic_xor(x, value, peer, sem=sem, scope=scope)
        elif op == "and":
            old = ctx.atomic_and(x, value, peer, sem=sem, scope=scope)
        elif op == "or":
            old = ctx.atomic_or(x, value, peer, sem=sem, scope=scope)
        elif op == "min":
            old = ctx.atomic_min(x, value, peer, sem=sem, scope=scope)
        else:
            old = ctx.atomic_max(x, value, peer, sem=sem, scope=scope)
    else:
        bases = context + 2
        if op == "add":
            old = language.atomic_add(x, value, me, peer, bases, sem=sem, scope=scope)
        elif op == "sub":
            old = language.atomic_sub(x, value, me, peer, bases, sem=sem, scope=scope)
        elif op == "cas":
            old = language.atomic_cas(x, 0, value, me, peer, bases, sem=sem, scope=scope)
        elif op == "xchg":
            old = language.atomic_xchg(x, value, me, peer, bases, sem=sem, scope=scope)
        elif op == "xor":
            old = language.atomic_xor(x, value, me, peer, bases, sem=sem, scope=scope)
        elif op == "and":
            old = language.atomic_and(x, value, me, peer, bases, sem=sem, scope=scope)
        elif op == "or":
            old = language.atomic_or(x, value, me, peer, bases, sem=sem, scope=scope)
        elif op == "min":
            old = language.atomic_min(x, value, me, peer, bases, sem=sem, scope=scope)
        else:
            old = language.atomic_max(x, value, me, peer, bases, sem=sem, scope=scope)
    gl.store(out, old)


@gluon.jit
def synchronise(
    op: gl.constexpr, method: gl.constexpr, x, flags, context, me, peer, value, timeout_ns, status, W: gl.constexpr,
    BLOCK: gl.constexpr
):  # fmt: skip
    """One signal, wait, put_signal or barrier; data is stored before and loaded behind it."""
    i = gl.arange(0, BLOCK, layout=default_layout([BLOCK], vector=_per_access(x.dtype.element_ty)))
    bases = context + 2
    ctx = IrisDeviceCtx.initialize(context)
    if op == "signal":
        ctx.store(x + i, value.to(x.dtype.element_ty), peer)
        if method:
            ctx.signal(flags, value, peer)
        else:
            language.signal(flags, value, me, peer, bases)
    elif op == "signal_add":
        if method:
            ctx.signal(flags, value, peer, op="add")
        else:
            language.signal(flags, value, me, peer, bases, op="add")
    elif op == "wait":
        if method:
            seen = ctx.wait(flags, value)
        else:
            seen = language.wait(flags, value, timeout_ns=timeout_ns, status=status, rank=me)
        gl.store(flags + W, seen)
    elif op == "wait_unbounded":
        gl.store(flags + W, language.wait(flags, value, cmp="eq"))
    elif op == "wait_block":
        each = gl.arange(0, W, layout=default_layout([W]))
        if method:
            seen = ctx.wait(flags + each, value)
        else:
            seen = language.wait(flags + each, value, timeout_ns=timeout_ns, status=status, rank=me)
        gl.store(flags + W + each, seen)
    elif op == "wait_any":
        each = gl.arange(0, W, layout=default_layout([W]))
        if method:
            place = ctx.wait_any(flags + each, value)
        else:
            place = language.wait_any(flags + each, value, timeout_ns=timeout_ns, status=status, rank=me)
        gl.store(flags + W, place)
    elif op == "test":
        if method:
            holds = ctx.test(flags, value)
        else:
            holds = language.test(flags, value)
        gl.store(flags + W, holds)
    elif op == "load_acquire":  # each thread has flags of its own, of which the compiler tells no other
        if method:
            seen = ctx.load_acquire(flags + i)
        else:
            seen = language.load_acquire(flags + i)
        gl.store(flags + BLOCK + i, seen)
    elif op == "put_signal":
        if method:
            ctx.put_signal(x + i, x + BLOCK + i, flags, value, peer)
        else:
            language.put_signal(x + i, x + BLOCK + i, flags, value, me, peer, bases)
    elif op == "barrier":
        if method:
            ctx.barrier(flags)
        else:
            language.barrier(flags, me, W, bases, timeout_ns=timeout_ns, status=status)
    else:
        gl.static_assert(op == "barrier_group", "synchronise knows no such operation")
        if method:
            ctx.barrier(flags, 1, 2, 3, program=gl.program_id(0))
        else:
            language.barrier(flags, me, W, bases, 1, 2, 3, gl.program_id(0))


@gluon.jit
def order(
    op: gl.constexpr, method: gl.constexpr, x, flags, context, me, peer, value, sem: gl.constexpr,
    scope: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """One signal, wait or put_signal with an order and a scope."""
    i = gl.arange(0, BLOCK, layout=default_layout([BLOCK], vector=_per_access(x.dtype.element_ty)))
    ctx = IrisDeviceCtx.initialize(context)
    bases = context + 2
    if op == "signal":
        if method:
            ctx.signal(flags, value, peer, sem=sem, scope=scope)
        else:
            language.signal(flags, value, me, peer, bases, sem=sem, scope=scope)
    elif op == "signal_add":
        if method:
            ctx.signal(flags, value, peer, "add", sem, scope)
        else:
            language.signal(flags, value, me, peer, bases, "add", sem, scope)
    elif op == "put_signal":
        if method:
            ctx.put_signal(x + i, x + BLOCK + i, flags, value, peer, sem=sem, scope=scope)
        else:
            language.put_signal(x + i, x + BLOCK + i, flags, value, me, peer, bases, sem=sem, scope=scope)
    elif op == "wait":
        if method:
            seen = ctx.wait(flags, value, "ge", sem, scope)
        else:
            seen = language.wait(flags, value, "ge", sem, scope)
        gl.store(flags + W, seen)
    else:
        gl.static_assert(op == "wait_block", "order knows no such operation")
        each = gl.arange(0, W, layout=default_layout([W]))
        if method:
            seen = ctx.wait(flags + each, value, "ge", sem, scope)
        else:
            seen = language.wait(flags + each, value, "ge", sem, scope)
        gl.store(flags + W + each, seen)


@gluon.jit
def from_argument(IrisDeviceCtx: gl.constexpr, context, x):
    """The form of the reference system: the class is an argument."""
    ctx = IrisDeviceCtx.initialize(context)
    i = gl.arange(0, 1024, layout=default_layout([1024], vector=4))
    ctx.store(x + i, 1.0, (ctx.cur_rank + 1) % ctx.num_ranks)


@gluon.jit
def tile_collective(
    op: gl.constexpr, x, src, dst, locks, context, peer, M, N, stride_m, stride_n, n_per_rank, W: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """Each program takes the tile of its number."""
    ctx = IrisDeviceCtx.initialize(context)
    layout: gl.constexpr = default_layout([BLOCK_M, BLOCK_N], vector=_per_access(x.dtype.element_ty))
    x_view = _views.make_tensor_view(x, M, N, stride_m, stride_n)
    tiles_n = gl.cdiv(N, BLOCK_N)
    place = _views.TileView(gl.program_id(0) // tiles_n, gl.program_id(0) % tiles_n, BLOCK_M, BLOCK_N, layout)
    tile = _views.Tile(place.pid_m, place.pid_n, BLOCK_M, BLOCK_N, place.partial(x_view))
    src_view = _views.make_tensor_view(src, M, N, stride_m, stride_n)
    dst_view = _views.make_tensor_view(dst, M, N, stride_m, stride_n)
    _tiles.collective(ctx, op, tile, place, src_view, dst_view, locks, ctx.cur_rank, peer, n_per_rank)


_KERNELS = {
    _triton.move: move,
    _triton.atomic: atomic,
    _triton.synchronise: synchronise,
    _triton.order: order,
    _tiles.tile_collective: tile_collective,
}


def compile_cases() -> list[CompileCase]:
    """Return a case for every device function in representative element types, and for every tile-level collective."""
    shared = _triton.compile_cases()
    cases = [dataclasses.replace(case, kernel=_KERNELS[case.kernel]) for case in shared if case.kernel in _KERNELS]
    (stores,) = (case for case in shared if case.name == "initialize")
    cases.append(
        dataclasses.replace(stores, kernel=from_argument, args=(IrisDeviceCtx, torch.int64, torch.float32), kwargs={})
    )
    return [*cases, *_collectives.compile_cases()]
