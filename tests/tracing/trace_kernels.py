"""Kernels that record events, and the same without a context."""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton import DeviceContext, language
from iris_triton.language.blocks import lanes  # so that Gluon can compile the first kernel, too
from iris_triton.language.trace import TraceEvent

MINE = 4242
_MINE = tl.constexpr(MINE)


@triton.jit
def record(x, y, word, context, rank, WORLD: tl.constexpr, TRACING: tl.constexpr, BLOCK: tl.constexpr):
    ctx = DeviceContext.initialize(context, rank, WORLD, TRACING)
    i = tl.program_id(0) * BLOCK + lanes(BLOCK)
    peer = (rank + 1) % WORLD
    whole = ctx.tracing.record_event_start(TraceEvent().compute, rank, 7, 3, 4)
    value = ctx.load(x + i, peer, mask=i < 60)
    ctx.store(y + i, value, peer, mask=rank >= 0)
    ctx.atomic_add(word, 1, peer)
    ctx.tracing.record_event_start(_MINE, rank, x, 5, 6)
    ctx.tracing.record_event_end(whole)


@triton.jit
def everything(x, y, flags, context, rank, WORLD: tl.constexpr, TRACING: tl.constexpr):
    """Every operation of the context, once."""
    ctx = DeviceContext.initialize(context, rank, WORLD, TRACING)
    i = tl.arange(0, 16)
    peer = (rank + 1) % WORLD
    ctx.store(y + i, ctx.load(x + i, peer), peer)
    ctx.get(x + i, y + i, peer)
    ctx.put(x + i, y + i, peer)
    ctx.copy(x + i, y + i, rank, peer)
    ctx.atomic_add(y + i, 1, peer)
    ctx.atomic_sub(y + i, 1, peer)
    ctx.atomic_cas(y + i, i, i, peer)
    ctx.atomic_xchg(y + i, i, peer)
    ctx.atomic_xor(y + i, i, peer)
    ctx.atomic_and(y + i, i, peer)
    ctx.atomic_or(y + i, i, peer)
    ctx.atomic_min(y + i, i, peer)
    ctx.atomic_max(y + i, i, peer)
    ctx.signal(flags, 1, peer)
    ctx.wait(flags, 1)
    ctx.put_signal(x + i, y + i, flags + 1, 1, peer)
    ctx.wait(flags + 1, 1)
    ctx.barrier(flags + 2)


@triton.jit
def by_method(x, y, context, rank, WORLD: tl.constexpr):
    ctx = DeviceContext.initialize(context, rank, WORLD)
    i = tl.arange(0, 128)
    peer = (rank + 1) % WORLD
    ctx.store(y + i, ctx.load(x + i, peer), peer)
    ctx.atomic_add(y + i, 1, peer)
    event = ctx.tracing.record_event_start(_MINE, rank, x, 5, 6)
    ctx.tracing.record_event_end(event)


@triton.jit
def by_function(x, y, context, rank, WORLD: tl.constexpr):
    """The same by functions that know nothing of tracing."""
    bases = context + 2
    i = tl.arange(0, 128)
    peer = (rank + 1) % WORLD
    language.store(y + i, language.load(x + i, rank, peer, bases), rank, peer, bases)
    language.atomic_add(y + i, 1, rank, peer, bases)
