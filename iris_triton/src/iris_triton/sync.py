"""Synchronisation between ranks from inside kernels: signal, wait, put_signal, barrier.

`iris_triton.language` describes the common arguments.  A *flag* is a word of a symmetric tensor, a 32- or 64-bit
integer.  The sender stores data and signals (release); the receiver waits (acquire) and reads the data.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_core import device_context as _layout
from iris_triton.intrinsics import uniform_clock_ns, wait_stores
from iris_triton.memory import put
from iris_triton.translation import translate

_POLLS_PER_CLOCK = tl.constexpr(64)
"""Polls between two looks at the clock, of those waits that are bounded."""

# Triton 3.6 takes no plain string for the default of a parameter of a device function.
SET, RELEASE, ACQUIRE = tl.constexpr("set"), tl.constexpr("release"), tl.constexpr("acquire")
GE, SYS = tl.constexpr("ge"), tl.constexpr("sys")

_CODE = tl.constexpr(int(_layout.Status.CODE))
_RANK = tl.constexpr(int(_layout.Status.RANK))
_PROGRAM = tl.constexpr(int(_layout.Status.PROGRAM))
_ADDRESS = tl.constexpr(int(_layout.Status.ADDRESS))
_EXPECTED = tl.constexpr(int(_layout.Status.EXPECTED))
_LAST = tl.constexpr(int(_layout.Status.LAST))
_COMPARISON = tl.constexpr(int(_layout.Status.COMPARISON))
_WAIT_TIMEOUT = tl.constexpr(_layout.STATUS_WAIT_TIMEOUT)
_INT64_MAX = tl.constexpr(2**63 - 1)
_INT64_MIN = tl.constexpr(-(2**63))


# -- sending ----------------------------------------------------------------------------------------------------------
@triton.jit
def _gather_stores():
    """Bring the earlier stores of all threads of this program before what any of its threads releases next."""
    wait_stores()
    tl.debug_barrier()


@triton.constexpr_function
def _is_op(op):
    return op in ("set", "add")


@triton.jit
def signal(
    pointer,
    value,
    from_rank,
    to_rank,
    heap_bases,
    op: tl.constexpr = SET,
    sem: tl.constexpr = RELEASE,
    scope: tl.constexpr = SYS,
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
    tl.static_assert(_is_op(op), 'op of signal must be "set" or "add"')
    target = translate(pointer, from_rank, to_rank, heap_bases)
    _gather_stores()
    if op == "set":
        tl.atomic_xchg(target, value, sem=sem, scope=scope)
    else:
        tl.atomic_add(target, value, sem=sem, scope=scope)


@triton.jit
def put_signal(
    from_ptr,
    to_ptr,
    signal_ptr,
    value,
    from_rank,
    to_rank,
    heap_bases,
    op: tl.constexpr = SET,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
    sem: tl.constexpr = RELEASE,
    scope: tl.constexpr = SYS,
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
    put(
        from_ptr,
        to_ptr,
        from_rank,
        to_rank,
        heap_bases,
        mask,
        other,
        load_cache_modifier,
        store_cache_modifier,
        hint,
    )
    signal(signal_ptr, value, from_rank, to_rank, heap_bases, op, sem, scope)


# -- receiving --------------------------------------------------------------------------------------------------------
@triton.constexpr_function
def _is_comparison(cmp):
    return cmp == "reached" or cmp in _layout.COMPARISONS


@triton.constexpr_function
def _is_flag(element_type):
    return element_type.is_int() and element_type.primitive_bitwidth >= 32


@triton.constexpr_function
def _comparison_index(cmp):
    names = _layout.COMPARISONS
    return names.index("ge" if cmp == "reached" else cmp)


@triton.constexpr_function
def _is_counter(element_type):
    return element_type.is_int_signed() and element_type.primitive_bitwidth >= 32


@triton.jit
def _holds(seen, expected, cmp: tl.constexpr):
    if cmp == "eq":
        return seen == expected
    elif cmp == "ne":
        return seen != expected
    elif cmp == "gt":
        return seen > expected
    elif cmp == "ge":
        return seen >= expected
    elif cmp == "lt":
        return seen < expected
    elif cmp == "le":
        return seen <= expected
    else:  # "reached": >= of counters that may have wrapped around
        return (seen - expected) >= 0


@triton.jit
def _poll(pointer, sem: tl.constexpr, scope: tl.constexpr):
    """Look at the flags once.

    Adding nothing is the form that is uniform: one thread looks and tells the others, so no two of them disagree on
    whether to look again.  Triton compiles it to an acquire load where the target has one.
    """
    return tl.atomic_add(pointer, 0, sem=sem, scope=scope)


@triton.jit
def _missing(seen, expected, cmp: tl.constexpr):
    """Number of flags (scalar) for which the comparison does not hold."""
    missing = 1 - _holds(seen, expected, cmp).to(tl.int32)
    if missing.type.is_block():
        missing = tl.sum(missing, axis=0)
    return missing


@triton.jit
def _given_up(status_word):
    """Whether a wait of this rank has timed out before: the results are lost, so nobody waits that long again."""
    given_up = status_word != 0
    if given_up:
        code = tl.atomic_add(status_word.to(tl.pointer_type(tl.int64)) + _CODE, 0, sem="relaxed", scope="sys")
        given_up = code != 0
    return given_up


@triton.jit
def _report(status_word, rank, pointer, expected, seen, cmp: tl.constexpr):
    """Describe a wait that timed out in the status words, unless another one was first."""
    address = pointer.to(tl.int64)
    wanted = expected.to(tl.int64)
    last = seen.to(tl.int64)
    if pointer.type.is_block():  # of the flags that are missing, the one with the lowest address
        holds = _holds(seen, expected, cmp)
        lowest = tl.min(tl.where(holds, _INT64_MAX, address), axis=0)
        lowest = tl.where(lowest == _INT64_MAX, tl.min(address, axis=0), lowest)  # the last one came just now
        here = address == lowest
        address = lowest
        last = tl.max(tl.where(here, last, _INT64_MIN), axis=0)
        wanted = tl.max(tl.where(here, wanted, _INT64_MIN), axis=0)
    if status_word != 0:
        status = status_word.to(tl.pointer_type(tl.int64))
        nobody = tl.cast(0, tl.int64)
        if tl.atomic_cas(status + _CODE, nobody, nobody + _WAIT_TIMEOUT, sem="relaxed", scope="sys") == 0:
            row = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
            tl.store(status + _RANK, rank)
            tl.store(status + _PROGRAM, tl.program_id(0) + row * tl.num_programs(0))
            tl.store(status + _ADDRESS, address)
            tl.store(status + _EXPECTED, wanted)
            tl.store(status + _LAST, last)
            tl.store(status + _COMPARISON, _comparison_index(cmp))


@triton.jit
def _look_at_clock(start, timeout_ns, status_word):
    """Return whether to give up, and when the wait began as far as known (0: this is the first look)."""
    now = uniform_clock_ns()
    if start == 0:
        start = now
    return (now - start > timeout_ns) | _given_up(status_word), start


@triton.jit
def _spin(pointer, expected, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, timeout_ns, status_word, rank):
    """Wait for one flag; returns the last value seen."""
    polls = 0
    late = polls != 0
    start = tl.cast(0, tl.int64)
    seen = _poll(pointer, sem, scope)
    while (_missing(seen, expected, cmp) > 0) & ~late:
        polls += 1
        if timeout_ns > 0:  # noqa: SIM102 - decided at compile time where it is a constexpr
            if polls % _POLLS_PER_CLOCK == 0:
                late, start = _look_at_clock(start, timeout_ns, status_word)
        seen = _poll(pointer, sem, scope)
    if timeout_ns > 0:  # noqa: SIM102
        if late:
            _report(status_word, rank, pointer, expected, seen, cmp)
    return seen


@triton.jit
def _spin_all(
    pointer, expected, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, timeout_ns, status_word, rank
):
    """Wait for a block of flags.

    Returns nothing: some versions of the compiler cannot carry a block round a `while`, so the last values would have
    to be read once more.
    """
    polls = 0
    late = polls != 0
    start = tl.cast(0, tl.int64)
    while (_missing(_poll(pointer, sem, scope), expected, cmp) > 0) & ~late:
        polls += 1
        if timeout_ns > 0:  # noqa: SIM102
            if polls % _POLLS_PER_CLOCK == 0:
                late, start = _look_at_clock(start, timeout_ns, status_word)
    if timeout_ns > 0:  # noqa: SIM102
        if late:
            _report(status_word, rank, pointer, expected, _poll(pointer, sem, scope), cmp)


@triton.jit
def _address(pointer):
    """An optional pointer as int64, 0 for None."""
    if pointer is None:
        return tl.cast(0, tl.int64)
    else:
        return tl.cast(pointer, tl.int64)


@triton.jit
def wait(
    pointer,
    value,
    cmp: tl.constexpr = GE,
    sem: tl.constexpr = ACQUIRE,
    scope: tl.constexpr = SYS,
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
    tl.static_assert(_is_comparison(cmp), 'cmp of wait must be "eq", "ne", "gt", "ge", "lt" or "le"')
    element: tl.constexpr = pointer.dtype.element_ty
    tl.static_assert(_is_flag(element), "flags must be integers of 32 or 64 bits")
    expected = tl.cast(value, element)
    status_word = _address(status)
    if pointer.type.is_block():
        _spin_all(pointer, expected, cmp, sem, scope, timeout_ns, status_word, rank)
        return _poll(pointer, sem, scope)
    else:
        return _spin(pointer, expected, cmp, sem, scope, timeout_ns, status_word, rank)


@triton.jit
def barrier(
    flags,
    rank,
    world_size: tl.constexpr,
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
        world_size: number of ranks in heap_bases (constexpr).
        heap_bases: int64[world_size].
        rank_start, rank_stride, group_size: the group is rank_start + i * rank_stride for i < group_size; all ranks
            by default.
        program: index of the caller's words in flags, where several programs have a barrier each.
        timeout_ns, status: as in `wait`.
    """
    tl.static_assert(_is_counter(flags.dtype.element_ty), "flags of a barrier must be int32 or int64")
    lanes = tl.arange(0, triton.next_power_of_2(world_size))
    if group_size is None:
        size = world_size
    else:
        size = group_size
    members = rank_start + lanes % size * rank_stride  # lanes beyond the group repeat a member
    words = flags + tl.cast(program, tl.int64) * (world_size + 1)
    counter = words + world_size
    epoch = tl.load(counter) + 1
    _gather_stores()
    targets = translate(words + rank, rank, members, heap_bases)
    tl.atomic_xchg(targets, epoch, mask=lanes < size, sem="release", scope="sys")
    _spin_all(words + members, epoch, "reached", "acquire", "sys", timeout_ns, _address(status), rank)
    tl.store(counter, epoch)
    tl.debug_barrier()  # before the next call reads the counter
