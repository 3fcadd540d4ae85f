"""The kernels of tests/multirank in Gluon: names, parameters and meaning are the same, so the same jobs launch them."""

from jobs_atomics import MAX_TRIES
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon import IrisDeviceCtx, _compat, default_layout, language

_barrier = _compat.barrier


@gluon.jit(do_not_specialize=["rank", "peer", "far", "n"])
def rma(
    op: gl.constexpr, form: gl.constexpr, x, y, out, bases, context, rank, world: gl.constexpr,
    peer, far, n, masked: gl.constexpr, hint: gl.constexpr, BLOCK: gl.constexpr,
    load_cache: gl.constexpr = None, store_cache: gl.constexpr = None, volatile: gl.constexpr = False,
):  # fmt: skip
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=default_layout([BLOCK], vector=2))
    if masked:
        mask = i < n
        other = 7
    else:
        mask = None
        other = None
    if form == "functional":
        if op == "load":
            value = language.load(x + i, rank, peer, bases, mask, other, load_cache, volatile, hint)
            gl.store(out + i, value)
        elif op == "store":
            language.store(y + i, gl.load(x + i), rank, peer, bases, mask=mask, hint=hint, cache_modifier=store_cache)
        elif op == "get":
            language.get(x + i, y + i, rank, peer, bases, mask, other, load_cache, store_cache, hint)
        elif op == "put":
            language.put(x + i, y + i, rank, peer, bases, mask, other, load_cache, store_cache, hint)
        elif op == "copy":
            language.copy(x + i, y + i, peer, far, rank, bases, mask, other, load_cache, store_cache, hint)
    else:
        ctx = IrisDeviceCtx.initialize(context)
        if op == "load":
            value = ctx.load(x + i, peer, mask, other, load_cache, volatile, hint)
            gl.store(out + i, value)
        elif op == "store":
            ctx.store(y + i, gl.load(x + i), peer, mask, store_cache, hint)
        elif op == "get":
            ctx.get(x + i, y + i, peer, mask, other, load_cache, store_cache, hint)
        elif op == "put":
            ctx.put(x + i, y + i, peer, mask, other, load_cache, store_cache, hint)
        elif op == "copy":
            ctx.copy(x + i, y + i, peer, far, mask, other, load_cache, store_cache, hint)


@gluon.jit(do_not_specialize=["rank", "peer", "n"])
def atomic(
    op: gl.constexpr, form: gl.constexpr, cells, operands, old, bases, context, rank, world: gl.constexpr,
    peer, n, masked: gl.constexpr, sem: gl.constexpr, scope: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    i = gl.arange(0, LANES, layout=default_layout([LANES]))
    v = gl.load(operands + i)
    p = cells + i
    if masked:
        mask = i < n
    else:
        mask = None
    if form == "functional":
        if op == "add":
            r = language.atomic_add(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "sub":
            r = language.atomic_sub(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "xchg":
            r = language.atomic_xchg(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "xor":
            r = language.atomic_xor(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "and":
            r = language.atomic_and(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "or":
            r = language.atomic_or(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "min":
            r = language.atomic_min(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "max":
            r = language.atomic_max(p, v, rank, peer, bases, mask, sem, scope)
        elif op == "cas":
            r = language.atomic_cas(p, gl.load(old + i), v, rank, peer, bases, sem, scope)
    else:
        ctx = IrisDeviceCtx.initialize(context)
        if op == "add":
            r = ctx.atomic_add(p, v, peer, mask, sem, scope)
        elif op == "sub":
            r = ctx.atomic_sub(p, v, peer, mask, sem, scope)
        elif op == "xchg":
            r = ctx.atomic_xchg(p, v, peer, mask, sem, scope)
        elif op == "xor":
            r = ctx.atomic_xor(p, v, peer, mask, sem, scope)
        elif op == "and":
            r = ctx.atomic_and(p, v, peer, mask, sem, scope)
        elif op == "or":
            r = ctx.atomic_or(p, v, peer, mask, sem, scope)
        elif op == "min":
            r = ctx.atomic_min(p, v, peer, mask, sem, scope)
        elif op == "max":
            r = ctx.atomic_max(p, v, peer, mask, sem, scope)
        elif op == "cas":
            r = ctx.atomic_cas(p, gl.load(old + i), v, peer, sem, scope)
    if masked:
        gl.store(old + i, r, mask=mask)
    else:
        gl.store(old + i, r)


@gluon.jit
def hammer(cells, bases, rank: gl.constexpr, world: gl.constexpr, rounds):
    for _ in range(rounds):
        language.atomic_add(cells, 1, rank, 0, bases, sem="relaxed", scope="sys")
        language.atomic_sub(cells + 1, 1, rank, 0, bases, sem="relaxed", scope="sys")


@gluon.jit
def locked_increment(lock, counter, bases, rank: gl.constexpr, world: gl.constexpr, rounds):
    for _ in range(rounds):
        holder = language.atomic_cas(lock, 0, 1, rank, 0, bases, sem="acquire", scope="sys")
        tries = 0
        while (holder != 0) & (tries < MAX_TRIES):
            holder = language.atomic_cas(lock, 0, 1, rank, 0, bases, sem="acquire", scope="sys")
            tries += 1
        if holder == 0:
            value = language.load(counter, rank, 0, bases, volatile=True)
            language.store(counter, value + 1, rank, 0, bases)
            language.atomic_xchg(lock, 0, rank, 0, bases, sem="release", scope="sys")


@gluon.jit
def ring(
    data, flag, out, context, rank: gl.constexpr, world: gl.constexpr, rounds, form: gl.constexpr, BLOCK: gl.constexpr
):
    ctx = IrisDeviceCtx.initialize(context)
    layout: gl.constexpr = default_layout([BLOCK])
    i = gl.arange(0, BLOCK, layout=layout)
    succ = (rank + 1) % world
    for r in range(rounds):
        if rank == 0:
            value = gl.zeros([BLOCK], gl.int32, layout=layout) + r
        else:
            ctx.wait(flag, r + 1)
            value = gl.load(data + i)
        if form == "store":
            if rank < world - 1:
                ctx.store(data + i, value + 1, succ)
                ctx.signal(flag, r + 1, succ)
        else:
            gl.store(out + i, value + 1)
            _barrier()
            if rank < world - 1:
                ctx.put_signal(out + i, data + i, flag, r + 1, succ)
        if rank == world - 1:
            gl.store(out + i, value + 1)
            ctx.signal(flag, r + 1, 0)
        if rank == 0:
            ctx.wait(flag, r + 1)


@gluon.jit
def count_signals(flag, context, rank: gl.constexpr, world: gl.constexpr, rounds):
    ctx = IrisDeviceCtx.initialize(context)
    for _ in range(rounds):
        ctx.signal(flag, 1, 0, op="add")
    if rank == 0:
        ctx.wait(flag, rounds * world, cmp="eq")


@gluon.jit
def serve(
    inbox, arrived, granted, out, context, rank: gl.constexpr, world: gl.constexpr, rounds, LANES: gl.constexpr,
    BLOCK: gl.constexpr
):  # fmt: skip
    ctx = IrisDeviceCtx.initialize(context)
    i = gl.arange(0, BLOCK, layout=default_layout([BLOCK]))
    if rank > 0:
        for r in range(rounds):
            ctx.store(inbox + rank * BLOCK + i, 1000 * (r + 1) + rank, 0)
            ctx.signal(arrived + rank, r + 1, 0)
            ctx.wait(granted, r + 1)
    else:
        for taken in range(rounds * (world - 1)):
            sender = ctx.wait_any(arrived + gl.arange(0, LANES, layout=default_layout([LANES])), 0, "gt")
            turn = ctx.load_acquire(arrived + sender)
            holds = ctx.test(arrived + sender, turn, "eq") & ~ctx.test(arrived + sender, turn + 1)
            gl.store(out + taken * BLOCK + i, gl.load(inbox + sender * BLOCK + i) * holds.to(gl.int32))
            gl.store(arrived + sender, 0)
            ctx.signal(granted, turn, sender)


@gluon.jit
def compare(flag, value, out, timeout_ns, cmp: gl.constexpr):
    gl.store(out, language.wait(flag, value, cmp=cmp, timeout_ns=timeout_ns))


@gluon.jit(do_not_specialize=["rank", "peer", "n"])
def handshake(
    x, y, flags, meeting, out, bases, context, rank, peer, world: gl.constexpr, n, form: gl.constexpr,
    method: gl.constexpr, op: gl.constexpr, sem: gl.constexpr, wait_sem: gl.constexpr, scope: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    i = gl.arange(0, BLOCK, layout=default_layout([BLOCK]))
    ctx = IrisDeviceCtx.initialize(context)
    if form == "signal":
        language.put(x + i, y + i, rank, peer, bases, i < n)
        if method:
            ctx.signal(flags, 3, peer, op, sem, scope)
        else:
            language.signal(flags, 3, rank, peer, bases, op, sem, scope)
    else:
        if method:
            ctx.put_signal(x + i, y + i, flags, 3, peer, op, i < n, sem=sem, scope=scope)
        else:
            language.put_signal(x + i, y + i, flags, 3, rank, peer, bases, op, i < n, sem=sem, scope=scope)
    if method:
        seen = ctx.wait(flags, 3, "ge", wait_sem, scope)
        ctx.barrier(meeting)
    else:
        seen = language.wait(flags, 3, "ge", wait_sem, scope)
        language.barrier(meeting, rank, world, bases)
    gl.store(out, seen)
    gl.store(out + 1 + i, gl.load(y + i))


@gluon.jit
def barriers(
    flags, data, bad, context, rank: gl.constexpr, world: gl.constexpr, rounds,
    start: gl.constexpr, stride: gl.constexpr, size: gl.constexpr
):  # fmt: skip
    ctx = IrisDeviceCtx.initialize(context)
    for r in range(rounds):
        for m in range(size):
            ctx.store(data + rank, r + 1, start + m * stride)
        ctx.barrier(flags, start, stride, size)
        for m in range(size):
            if gl.load(data + start + m * stride, volatile=True) != r + 1:
                gl.store(bad, r + 1)
        ctx.barrier(flags, start, stride, size)


@gluon.jit
def wait_for_nothing(flag, context, rank: gl.constexpr, world: gl.constexpr):
    ctx = IrisDeviceCtx.initialize(context)
    ctx.wait(flag, 42)
