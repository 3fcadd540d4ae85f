"""Synchronisation between ranks from inside Gluon kernels: signal, wait, put_signal, barrier.

`iris_gluon.language` describes the common arguments, `iris_triton.flags` the two forms that flags have on NVIDIA and
elsewhere.  Functions that make no blocks of their own are those of iris_triton.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.target_info import is_cuda

from iris_gluon import _compat
from iris_gluon.lanes import lanes, spread, threads, warp_size
from iris_triton import flags as _flags
from iris_triton import intrinsics
from iris_triton import sync as _sync
from iris_triton.memory import put
from iris_triton.sync import ACQUIRE, GE, RELEASE, SET, SYS
from iris_triton.translation import translate

_POLLS_PER_CLOCK = gl.constexpr(64)
"""Polls between two looks at the clock, of those waits that are bounded."""

_EVERY_THREAD = gl.constexpr(1024)
"""No program has more threads, so a block of this size has an element in every thread."""

_MEMBERS = gl.constexpr(64)
"""Ranks that a barrier signals and awaits at a time, at least."""

_barrier = _compat.barrier


# -- sending ----------------------------------------------------------------------------------------------------------
@gluon.jit
def signal(
    pointer,
    value,
    from_rank,
    to_rank,
    heap_bases,
    op: gl.constexpr = SET,
    sem: gl.constexpr = RELEASE,
    scope: gl.constexpr = SYS,
):
    """Change a flag of to_rank after everything that this program has stored so far.

    Whoever sees the new value by `wait` also sees those stores.  Synchronises the threads of the program, so it must
    not be called from divergent code; branches on scalars are fine.

    Args:
        pointer: flag in the heap of from_rank (scalar pointer to a 32- or 64-bit integer).
        value: new value (op "set") or increment (op "add").
        from_rank: the caller.
        to_rank: rank whose flag is changed.
        heap_bases: int64[world_size].
        op: "set" or "add".  Several senders may add to one flag; only one may set it.
        sem: "release", or "relaxed" where there is nothing to hand over.
        scope: "sys"; "gpu" if from_rank and to_rank are the same.
    """
    if is_cuda() and op == "set":
        gl.static_assert(
            _sync._is_order(sem, scope, "release"), 'sem of signal must be "release" or "relaxed", scope "sys" or "gpu"'
        )
        target = translate(pointer, from_rank, to_rank, heap_bases)
        if sem == "release":
            _barrier()
        thread = threads()
        _flags.set_flags(target + thread * 0, value, thread == 0, sem, scope)
    else:
        _sync.signal(pointer, value, from_rank, to_rank, heap_bases, op, sem, scope)


@gluon.jit
def put_signal(
    from_ptr,
    to_ptr,
    signal_ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    op: gl.constexpr = SET,
    mask=None,
    other=None,
    load_cache_modifier: gl.constexpr = None,
    store_cache_modifier: gl.constexpr = None,
    hint: gl.constexpr = None,
    sem: gl.constexpr = RELEASE,
    scope: gl.constexpr = SYS,
):
    """Copy from the caller's own memory to to_rank's memory, then signal: `put` followed by `signal`.

    Args:
        from_ptr: any addresses that the caller may read.
        to_ptr: addresses in the heap of from_rank.
        signal_ptr: flag in the heap of from_rank.
        value: new value or increment of the flag.
        from_rank: the caller.
        to_rank: rank whose memory and flag are changed.
        heap_bases: int64[world_size].
        op, sem, scope: as in `signal`.
        mask, other, load_cache_modifier, store_cache_modifier, hint: as in `put`.
    """
    put(from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask, other, load_cache_modifier, store_cache_modifier, hint)
    signal(signal_ptr, value, from_rank, to_rank, heap_bases, op, sem, scope)


# -- receiving --------------------------------------------------------------------------------------------------------
@gluon.jit
def _poll(pointer, sem: gl.constexpr, scope: gl.constexpr):
    """Look at the flags once, uniformly: see `iris_triton.flags`."""
    nothing = gl.cast(0, pointer.dtype.element_ty)
    return gl.atomic_add(pointer, spread(nothing, pointer), sem=sem, scope=scope)


@gluon.jit
def _look_at_clock(start, timeout_ns, status_word):
    """Return whether to give up, and when the wait began as far as known (0: this is the first look)."""
    # Every thread reads the clock for itself; the largest of what they have read is the same for all of them.  The
    # number of the lane is part of it, so that the compiler does not take the clock for the same in all threads.
    now = gl.max(lanes(_EVERY_THREAD) + intrinsics.clock_ns(), axis=0)
    if start == 0:
        start = now
    return (now - start > timeout_ns) | _flags._given_up(status_word), start


@gluon.jit
def _spin(pointer, expected, cmp: gl.constexpr, sem: gl.constexpr, scope: gl.constexpr, timeout_ns, status_word, rank):
    """Wait for one flag or a block of them; returns their last values."""
    polls = 0
    late = polls != 0
    start = gl.cast(0, gl.int64)
    while (_flags._missing(_poll(pointer, sem, scope), expected, cmp) > 0) & ~late:
        polls += 1
        if timeout_ns > 0:  # noqa: SIM102 - decided at compile time where it is a constexpr
            if polls % _POLLS_PER_CLOCK == 0:
                late, start = _look_at_clock(start, timeout_ns, status_word)
    seen = _poll(pointer, sem, scope)
    if timeout_ns > 0:  # noqa: SIM102
        if late:
            _flags._report(status_word, rank, pointer, expected, seen, cmp)
    return seen


@gluon.jit
def _await_flags(
    pointers, expected, mask, cmp: gl.constexpr, sem: gl.constexpr, scope: gl.constexpr, timeout_ns, status_word, rank
):
    """Wait for those flags of a block where `mask` holds, see `iris_triton.flags.await_flags`."""
    if is_cuda():
        _flags.await_flags(pointers, expected, mask, cmp, sem, scope, timeout_ns, status_word, rank)
    else:
        _spin(pointers, expected, cmp, sem, scope, timeout_ns, status_word, rank)


@gluon.jit
def wait(
    pointer,
    value,
    cmp: gl.constexpr = GE,
    sem: gl.constexpr = ACQUIRE,
    scope: gl.constexpr = SYS,
    timeout_ns=0,
    status=None,
    rank=-1,
):
    """Wait until `flag <cmp> value` holds, for all flags if `pointer` is a block, and return the flags' last values.

    Afterwards all threads of the program see what was stored before the signal.  Synchronises the threads of the
    program, so it must not be called from divergent code; branches on scalars are fine.

    Args:
        pointer: flag or 1-D block of flags in the caller's own memory (32- or 64-bit integers).
        value: what to compare with: scalar or block; converted to the element type.
        cmp: "eq", "ne", "gt", "ge", "lt" or "le".
        sem: "acquire", or "relaxed" where nothing is handed over.
        scope: "sys"; "gpu" if the sender is on the same device.
        timeout_ns: bound in nanoseconds; 0 waits for ever.  After the bound wait returns all the same, so what was
            awaited may not be there: compare the returned value, or have the host look at the status words.
        status: pointer to the int64 status words (iris_core.device_context.Status), to which the first wait that times
            out reports; None reports nothing.
        rank: the caller, for that report.
    """
    gl.static_assert(_flags.is_comparison(cmp), 'cmp of wait must be "eq", "ne", "gt", "ge", "lt" or "le"')
    gl.static_assert(
        _sync._is_order(sem, scope, "acquire"), 'sem of wait must be "acquire" or "relaxed", scope "sys" or "gpu"'
    )
    element: gl.constexpr = pointer.dtype.element_ty
    gl.static_assert(_flags.is_flag(element), "flags must be integers of 32 or 64 bits")
    expected = gl.cast(value, element)
    status_word = _sync._address(status)
    if pointer.type.is_block():
        everyone = gl.cast(pointer, gl.int64) != 0
        _await_flags(pointer, expected, everyone, cmp, sem, scope, timeout_ns, status_word, rank)
        return _poll(pointer, "relaxed", scope)
    else:
        if is_cuda():
            thread = threads()
            polling = thread < warp_size()
            seen = _flags._await_each(
                pointer + thread * 0, expected, polling, cmp, sem, scope, timeout_ns, status_word, rank
            )
            _barrier()
            return gl.max(gl.where(polling, seen, _flags._lowest(element)), axis=0)
        else:
            return _spin(pointer, expected, cmp, sem, scope, timeout_ns, status_word, rank)


@gluon.jit
def barrier(
    flags,
    rank,
    world_size,
    heap_bases,
    rank_start=0,
    rank_stride=1,
    group_size=None,
    program=0,
    timeout_ns=0,
    status=None,
):
    """Wait until every rank of a group has come here; what any of them stored before is then visible to all.

    Collective: exactly one program of every rank of the group calls it, with the same `program`, and equally often.
    It covers the stores of the calling program.  It may be repeated at once and for ever; the host resets nothing.

    Args:
        flags: int32 or int64 tensor on the symmetric heap, zero at the start, world_size + 1 words for each program.
            Belongs to one group and is used for nothing else.
        rank: the caller.
        world_size: number of ranks in heap_bases; unlike in Triton's form it may be a run-time value.
        heap_bases: int64[world_size].
        rank_start, rank_stride, group_size: the group is rank_start + i * rank_stride for i < group_size; all ranks
            by default.
        program: index of the caller's words in flags, where several programs have a barrier each.
        timeout_ns, status: as in `wait`.
    """
    gl.static_assert(_flags.is_counter(flags.dtype.element_ty), "flags of a barrier must be int32 or int64")
    if group_size is None:
        size = world_size
    else:
        size = group_size
    words = flags + gl.cast(program, gl.int64) * (world_size + 1)
    counter = words + world_size
    epoch = gl.load(counter) + 1
    _sync._gather_stores()
    if is_cuda():  # an element that several threads hold would be polled by each of them
        lane = lanes(max(_MEMBERS, warp_size() * gl.num_warps()))
    else:
        lane = lanes(_MEMBERS)
    for first in range(0, size, lane.shape[0]):
        member = first + lane
        targets = translate(words + rank, rank, rank_start + member % size * rank_stride, heap_bases)
        if is_cuda():
            _flags.set_flags(targets, epoch, member < size, "release", "sys")
        else:
            gl.atomic_xchg(targets, spread(epoch, targets), mask=member < size, sem="release", scope="sys")
    for first in range(0, size, lane.shape[0]):
        member = first + lane  # those beyond the group repeat a member
        awaited = words + (rank_start + member % size * rank_stride)
        _await_flags(
            awaited, epoch, member < size, "reached", "acquire", "sys", timeout_ns, _sync._address(status), rank
        )
    gl.store(counter, epoch)
    _barrier()  # before the next call reads the counter
