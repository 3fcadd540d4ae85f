"""Synchronisation between ranks inside kernels: signal, wait, wait_any, test, put_signal, barrier.

`iris_triton.language` describes the common arguments.  A *flag* is a word of a symmetric tensor, a 32- or 64-bit
integer.  The sender stores data and signals (release); the receiver waits (acquire) and reads the data.
"""

import triton
import triton.language as tl

from iris_triton.language import flags as _flags
from iris_triton.language.address import translate
from iris_triton.language.asm import wait_stores
from iris_triton.language.memory import put

# Triton 3.6 takes no plain string for the default of a parameter of a device function.
SET, RELEASE, ACQUIRE = tl.constexpr("set"), tl.constexpr("release"), tl.constexpr("acquire")
GE, SYS = tl.constexpr("ge"), tl.constexpr("sys")

_MEMBERS = tl.constexpr(32)  # ranks that a barrier signals and awaits at a time, at least


@triton.jit
def gather_stores():
    """Order earlier loads and stores of all threads of this program before the next release of any of its threads."""
    wait_stores()
    tl.debug_barrier()


@triton.constexpr_function
def _is_order(sem, scope, order):
    return sem in (order, "relaxed") and scope in ("sys", "gpu")


@triton.jit
def signal(
    pointer, value, from_rank, to_rank, heap_bases, op: tl.constexpr = SET, sem: tl.constexpr = RELEASE,
    scope: tl.constexpr = SYS
):  # fmt: skip
    """Update a flag of to_rank after all earlier stores of this program.

    Whoever sees the new value by `wait` also sees those stores.  Synchronises the threads of the program, so it must
    not be called from divergent code; branches on scalars are fine.

    Args:
        pointer: flag in the heap of from_rank (scalar pointer to a 32- or 64-bit integer).
        value: new value (op "set") or increment (op "add"); converted to the flag's type.
        from_rank, to_rank, heap_bases: the caller, the rank whose flag is changed, int64[world_size].
        op: "set" or "add".  Several senders may add to one flag; only one may set it.
        sem: "release", or "relaxed" where there is nothing to hand over; that is half as long on the way.
        scope: "sys"; "gpu" if from_rank and to_rank are the same.
    """
    tl.static_assert(op == "set" or op == "add", 'op of signal must be "set" or "add"')
    tl.static_assert(
        _is_order(sem, scope, "release"), 'sem of signal must be "release" or "relaxed", scope "sys" or "gpu"'
    )
    tl.static_assert(not pointer.type.is_block(), "signal changes one flag: give it a pointer, not a block of pointers")
    tl.static_assert(_flags.is_flag(pointer.dtype.element_ty), "flags must be integers of 32 or 64 bits")
    target = translate(pointer, from_rank, to_rank, heap_bases)
    if sem == "release":
        gather_stores()
    if op == "set":
        _flags.set_flag(target, value, sem, scope)
    else:
        tl.atomic_add(target, value, sem=sem, scope=scope)


@triton.jit
def put_signal(
    from_ptr, to_ptr, signal_ptr, value, from_rank, to_rank, heap_bases, op: tl.constexpr = SET, mask=None,
    other=None, load_cache_modifier: tl.constexpr = None, store_cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None, sem: tl.constexpr = RELEASE, scope: tl.constexpr = SYS
):  # fmt: skip
    """Copy from the caller's own memory to to_rank's memory, then signal: `put` followed by `signal`.

    Args:
        from_ptr, to_ptr, mask, other, load_cache_modifier, store_cache_modifier, hint: as in `put`.
        signal_ptr: flag in the heap of from_rank (scalar pointer to a 32- or 64-bit integer).
        value, op, sem, scope: as in `signal`.
        from_rank, to_rank, heap_bases: the caller, the rank whose memory and flag are changed, int64[world_size].
    """
    put(
        from_ptr, to_ptr, from_rank, to_rank, heap_bases, mask, other, load_cache_modifier, store_cache_modifier, hint
    )  # fmt: skip
    signal(signal_ptr, value, from_rank, to_rank, heap_bases, op, sem, scope)


@triton.jit
def _address(pointer):
    """Convert an optional pointer to int64, 0 for None."""
    return tl.cast(0 if pointer is None else pointer, tl.int64)


@triton.jit
def _check_flags(pointer, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr):
    """Check the arguments of a wait or test at compile time."""
    tl.static_assert(_flags.is_comparison(cmp), 'cmp of wait must be "eq", "ne", "gt", "ge", "lt" or "le"')
    tl.static_assert(
        _is_order(sem, scope, "acquire"), 'sem of wait must be "acquire" or "relaxed", scope "sys" or "gpu"'
    )
    tl.static_assert(_flags.is_flag(pointer.dtype.element_ty), "flags must be integers of 32 or 64 bits")
    tl.static_assert(len(pointer.shape) <= 1, "wait takes one flag, or a block of them with one dimension")


@triton.jit
def wait(
    pointer, value, cmp: tl.constexpr = GE, sem: tl.constexpr = ACQUIRE, scope: tl.constexpr = SYS, timeout_ns=0,
    status=None, rank=-1
):  # fmt: skip
    """Wait until `flag <cmp> value` holds, for all flags if `pointer` is a block, and return the flags' last values.

    Afterwards all threads of the program see what was stored before the signal.  Synchronises the threads of the
    program, so it must not be called from divergent code; branches on scalars are fine.

    Args:
        pointer: flag or 1-D block of flags in the caller's own memory (32- or 64-bit integers).
        value: what to compare with: scalar or block; converted to the element type.
        cmp: "eq", "ne", "gt", "ge", "lt" or "le".
        sem: "acquire", or "relaxed" where nothing is handed over.
        scope: "sys"; "gpu" if the sender is on the same device.
        timeout_ns: bound in nanoseconds; 0 for none.  After the bound wait returns although the condition may not
            hold: compare the returned value, or have the host check the status words.  With a negative one it reports
            to the status words every abs(timeout_ns) and keeps waiting.
        status: pointer to the status words (int64[STATUS_WORDS], iris_core.device.context_words), to which the first
            wait that times out reports; None reports nothing.
        rank: the caller, for that report.
    """
    _check_flags(pointer, cmp, sem, scope)
    expected = tl.cast(value, pointer.dtype.element_ty)
    status_word = _address(status)
    if pointer.type.is_block():
        everyone = tl.cast(pointer, tl.int64) != 0
        _flags.await_flags(pointer, expected, everyone, cmp, sem, scope, timeout_ns, status_word, rank)
        return _flags.poll(pointer, "relaxed", scope)
    else:
        return _flags.await_flag(pointer, expected, cmp, sem, scope, timeout_ns, status_word, rank)


@triton.jit
def wait_any(
    pointer, value, cmp: tl.constexpr = GE, sem: tl.constexpr = ACQUIRE, scope: tl.constexpr = SYS, timeout_ns=0,
    status=None, rank=-1
):  # fmt: skip
    """Wait until `flag <cmp> value` holds for one of a block of flags, and return which (int32, from 0).

    If it holds for several, returns the first.  Otherwise like `wait`: afterwards all threads see what was stored
    before the signal of that flag, and of no other.

    Args:
        pointer: block of flags with one dimension, in the caller's own memory (32- or 64-bit integers).
        value, cmp, sem, scope, status, rank: as in `wait`.
        timeout_ns: as in `wait`; after the bound -1 is returned.

    Example:
        sender = iris.wait_any(arrived + tl.arange(0, W), turn)
        x = tl.load(inbox + sender * BLOCK + i)
    """
    _check_flags(pointer, cmp, sem, scope)
    tl.static_assert(pointer.type.is_block(), "wait_any takes a block of flags; wait takes one")
    expected = tl.cast(value, pointer.dtype.element_ty)
    place, _ = _flags.spin(pointer, expected, cmp, sem, scope, timeout_ns, _address(status), rank, True)
    return tl.where(place == pointer.shape[0], -1, place)


@triton.jit
def _look(pointer, sem: tl.constexpr, scope: tl.constexpr):
    """Load flags once for all threads of the program."""
    seen = _flags.poll(pointer, sem, scope)
    tl.debug_barrier()  # the compiler lets one thread look, and makes the others wait only if they need what it saw
    return seen


@triton.jit
def load_acquire(pointer, scope: tl.constexpr = SYS):
    """Return flags as they are now; all threads of the program then see what was stored before their signals.

    One look, as `wait` has many; what a plain load returns, even a volatile one, orders nothing.  All threads get the
    same values.  Synchronises the threads of the program, so it must not be called from divergent code.

    Args:
        pointer: flag or 1-D block of flags in the caller's own memory (32- or 64-bit integers).
        scope: "sys"; "gpu" if the sender is on the same device.
    """
    _check_flags(pointer, GE, ACQUIRE, scope)
    return _look(pointer, ACQUIRE, scope)


@triton.jit
def test(pointer, value, cmp: tl.constexpr = GE, sem: tl.constexpr = ACQUIRE, scope: tl.constexpr = SYS):  # noqa: PT028
    """Return whether `flag <cmp> value` holds now (int1), for all flags if `pointer` is a block; does not wait.

    If it does, all threads see what was stored before the signal, as after `wait`; all get the same result.

    Args:
        pointer, value, cmp, sem, scope: as in `wait`.
    """
    _check_flags(pointer, cmp, sem, scope)
    return _flags.missing_flags(_look(pointer, sem, scope), tl.cast(value, pointer.dtype.element_ty), cmp) == 0


@triton.jit
def _check_group(rank, start, stride, size, world_size):
    """Assert that the group of a barrier is valid; on GPUs only with debug=True."""
    start = tl.cast(start, tl.int32)
    stride = tl.cast(stride, tl.int32)
    size = tl.cast(size, tl.int32)
    last = start + (size - 1) * stride
    inside = (start >= 0) & (start < world_size) & (last >= 0) & (last < world_size)
    tl.device_assert((size >= 1) & inside, "the group of a barrier is empty or reaches outside of the world")
    tl.device_assert((stride != 0) | (size == 1), "the group of a barrier names a rank twice")
    step = tl.where(stride == 0, 1, stride)
    index = (rank - start) // step
    belongs = (start + index * stride == rank) & (index >= 0) & (index < size)
    tl.device_assert(belongs, "a rank that calls a barrier is no member of its group")


@triton.jit
def tell_members(words, index, value, rank, start, stride, size, heap_bases):
    """Store `value` in word `index` of every member of a group, start + i * stride for i < size; releases."""
    lane = _flags.lanes_for(_MEMBERS)
    for first in range(0, size, lane.shape[0]):
        member = first + lane  # those beyond the group repeat a member
        targets = translate(words + index, rank, start + member % size * stride, heap_bases)
        _flags.set_flags(targets, value, member < size, "release", "sys")


@triton.jit
def await_members(words, value, rank, start, stride, size, timeout_ns, status_word):
    """Wait until this rank's word for every member of a group has reached `value`; acquires."""
    lane = _flags.lanes_for(_MEMBERS)
    for first in range(0, size, lane.shape[0]):
        member = first + lane
        awaited = words + (start + member % size * stride)
        _flags.await_flags(awaited, value, member < size, "reached", "acquire", "sys", timeout_ns, status_word, rank)


@triton.jit
def barrier(
    flags, rank, world_size, heap_bases, rank_start=0, rank_stride=1, group_size=None, program=0, timeout_ns=0,
    status=None
):  # fmt: skip
    """Wait until every rank of a group has arrived; earlier stores of any of them are then visible to all.

    Collective: exactly one program of every rank of the group calls it, with the same `program`, and equally often.
    It covers the stores of the calling program.  It may be repeated at once; the host resets nothing.

    Args:
        flags: int32 or int64 tensor on the symmetric heap, zero at the start, world_size + 1 words for each program.
            Belongs to one group and is used for nothing else.
        rank, world_size, heap_bases: the caller, the number of ranks, int64[world_size].
        rank_start, rank_stride, group_size: the group is rank_start + i * rank_stride for i < group_size; all ranks
            by default.  A group that is empty, reaches outside of the world, names a rank twice or lacks the caller
            fires an assertion on the CPU and, on GPUs, in kernels that are compiled with debug=True.
        program: index of the caller's words in flags, where several programs have a barrier each.
        timeout_ns, status: as in `wait`.
    """
    tl.static_assert(_flags.is_counter(flags.dtype.element_ty), "flags of a barrier must be int32 or int64")
    tl.static_assert(not flags.type.is_block(), "flags of a barrier must be a pointer to the first word, not a block")
    size = world_size if group_size is None else group_size
    _check_group(rank, rank_start, rank_stride, size, world_size)
    words = flags + tl.cast(program, tl.int64) * (world_size + 1)
    counter = words + world_size
    epoch = tl.load(counter) + 1
    gather_stores()
    tell_members(words, rank, epoch, rank, rank_start, rank_stride, size, heap_bases)
    await_members(words, epoch, rank, rank_start, rank_stride, size, timeout_ns, _address(status))
    tl.store(counter, epoch)
    tl.debug_barrier()  # before the next call reads the counter
