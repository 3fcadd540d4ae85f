"""Flag words: set those of peers, and wait for local ones.

There are two forms of each.  On NVIDIA a flag is stored by `st` and polled by `ld` in assembly: a remote atomic costs a
way more than a store, and a scalar atomic, which one thread does for the others, twice a poll.  Every lane that polls
goes on by itself as soon as its own flag holds, so nothing has to be uniform inside the loop.  Elsewhere, and in the
CPU executor, both are atomics, and the loop is Triton's own.

A wait that is bounded ends in both forms, and describes itself in the status words
(`iris_core.device.context_words.Status`). One with a negative bound describes itself whenever that has passed
(WAITING), and waits on.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda, is_hip

from iris_core.device import context_words as _layout
from iris_triton.language.asm import wait_clock_ns
from iris_triton.language.blocks import lanes, num_threads, places_in, spread

POLLS_PER_CLOCK = tl.constexpr(64)  # polls between two looks at the clock, of those waits that are bounded
_POLLING_LANES = tl.constexpr(32)  # lanes that poll a single flag: one warp, whose loads of one address are one

TIMED_OUT, _RANK, _PROGRAM, _ADDRESS, _EXPECTED, _LAST, _COMPARISON, _SENDER = (
    tl.constexpr(int(field)) for field in _layout.Status
)
WAITING, DIFFERENCE = tl.constexpr(_layout.WAITING), tl.constexpr(int(_layout.Mismatch.CODE))
_WAIT_TIMEOUT, _CLAIMED = tl.constexpr(_layout.STATUS_WAIT_TIMEOUT), tl.constexpr(_layout.CLAIMED)
_ROW, _ALARM = tl.constexpr(_layout.ROW), tl.constexpr(_layout.ALARM)
_STAMP_CLOCK, _STAMP_RANK = tl.constexpr(_layout.STAMP_CLOCK), tl.constexpr(_layout.STAMP_RANK)
_STAMP_PART, _PART_WORDS = tl.constexpr(_layout.STAMP_PART), tl.constexpr(_layout.PART_WORDS)
_INT64_MAX, _INT64_MIN = tl.constexpr(2**63 - 1), tl.constexpr(-(2**63))


@triton.constexpr_function
def is_flag(element_type):
    """Return whether a word of this type can be a flag."""
    return element_type.is_int() and element_type.primitive_bitwidth in (32, 64)


@triton.constexpr_function
def is_counter(element_type):
    """Return whether a word of this type can be a counter that wraps around."""
    return element_type.is_int_signed() and element_type.primitive_bitwidth in (32, 64)


@triton.constexpr_function
def is_comparison(cmp):
    """Whether `await_flags` knows a comparison: one of the layout's, or "reached", >= of counters that wrap around."""
    return cmp == "reached" or cmp in _layout.COMPARISONS


@triton.constexpr_function
def _comparison_index(cmp):
    names = _layout.COMPARISONS
    return names.index("ge" if cmp == "reached" else cmp)


@triton.constexpr_function
def _lowest(element_type):
    return -(2 ** (element_type.primitive_bitwidth - 1)) if element_type.is_int_signed() else 0


@triton.jit
def lanes_for(count: tl.constexpr):
    """Return 0, 1, 2, ... for a block of at least `count` flags: on NVIDIA at least one for each thread.

    An element held by several threads would be stored, or polled, by each of them.
    """
    if is_cuda():
        return lanes(max(triton.next_power_of_2(count), num_threads()))
    else:
        return lanes(triton.next_power_of_2(count))


@triton.constexpr_function
def _store_assembly(bits, sem, scope):
    return f"{{ .reg .pred q; setp.ne.b32 q, $3, 0; @q st.{sem}.{scope}.global.b{bits} [$1], $2; mov.u32 $0, 0; }}"


@triton.constexpr_function
def _constraints(bits, text):
    """Return the constraints of inline assembly; "w" stands for the register of a flag."""
    return text.replace("w", "l" if bits == 64 else "r")


@triton.jit
def set_flags(targets, value, mask, sem: tl.constexpr, scope: tl.constexpr):
    """Store `value`, a scalar or block of the flags' type, in the flags at a block of addresses, where `mask` holds.

    `sem` is "release" for what the calling thread has stored or acquired, or "relaxed"; `scope` is "sys" or "gpu".
    """
    if is_cuda():
        bits: tl.constexpr = targets.dtype.element_ty.primitive_bitwidth
        text: tl.constexpr = _store_assembly(bits, sem, scope)
        operands = [targets, tl.cast(value, targets.dtype.element_ty), mask.to(tl.int32)]
        registers: tl.constexpr = _constraints(bits, "=r,l,w,r")
        tl.inline_asm_elementwise(text, registers, operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_xchg(targets, spread(value, targets), mask=mask, sem=sem, scope=scope)


@triton.jit
def set_flag(target, value, sem: tl.constexpr, scope: tl.constexpr):
    """Store `value` in one flag; see `set_flags`."""
    if is_cuda():
        thread = lanes(num_threads())
        set_flags(target + thread * 0, value, thread == 0, sem, scope)
    else:
        tl.atomic_xchg(target, value, sem=sem, scope=scope)


# -- waiting, on NVIDIA -----------------------------------------------------------------------------------------------
@triton.constexpr_function
def describe_assembly(status, timeout, rank, words, taken):
    """Describe a wait whose time is over: one with a bound in `_layout.Status`, another one at WAITING.

    Branches to the label `taken` if another wait is described there.  `words` are, for fields of `Status`, text that
    leaves the word in x, or an operand.  The block declares the predicate p, and now, x and row of 64 bits.  It is
    ordered by fences, so that loads that acquire and stores that release are the kernel's own.
    """
    ended, waiting = _layout.Status.CODE, _layout.WAITING
    part = f"setp.lt.s64 p, {timeout}, 0; selp.b64 now, {8 * waiting}, {8 * ended}, p;"
    codes = [
        code // _layout.PART_WORDS << _layout.STAMP_PART | _layout.STATUS_WAIT_TIMEOUT for code in (waiting, ended)
    ]
    stores = ""
    for field, word in words:
        text, operand = (word, "x") if ";" in word else ("", word)
        stores += f"{text} st.global.b64 [row+{8 * field}], {operand};\n"
    return f"""{part} add.u64 row, {status}, now;
atom.relaxed.sys.global.cas.b64 x, [row], 0, {_layout.CLAIMED}; setp.ne.u64 p, x, 0; @p bra {taken};
ld.global.b64 x, [{status}+{8 * _layout.ROW}]; setp.eq.u64 p, x, 0; @p bra HERE;
{part} add.u64 row, x, now; st.relaxed.sys.global.b64 [row], {_layout.CLAIMED}; fence.acq_rel.sys;
HERE:
{stores}cvt.s64.s32 x, {rank}; st.global.b64 [row+{8 * _layout.Status.RANK}], x;
and.b64 x, x, 1023; shl.b64 x, x, {_layout.STAMP_RANK};
setp.lt.s64 p, {timeout}, 0; selp.b64 now, {codes[0]}, {codes[1]}, p; or.b64 x, x, now;
mov.u64 now, %globaltimer; shl.b64 now, now, {_layout.STAMP_CLOCK}; or.b64 x, x, now;
fence.acq_rel.sys; st.relaxed.sys.global.b64 [row], x; fence.acq_rel.sys; @p bra FREE;
ld.global.b64 row, [{status}+{8 * _layout.ALARM}]; setp.eq.u64 p, row, 0; @p bra SAID;
st.relaxed.sys.global.b64 [row], x; bra SAID;
FREE:
ld.global.b64 x, [{status}+{8 * _layout.ROW}]; setp.eq.u64 p, x, 0; @p bra SAID;
st.relaxed.sys.global.b64 [{status}+{8 * waiting}], 0;
SAID:
"""


@triton.constexpr_function
def _await_assembly(cmp, signed, bits, sem, scope):
    """Poll until the condition holds, the wait times out, or another wait of this rank has reported a timeout.

    A wait with a negative bound ends only when the condition holds.

    Operands: 0 the value seen last; 1 address of the flag; 2 what to compare with; 3 whether to poll at all; 4 bound in
    nanoseconds, 0 for none; 5 address of the status words, 0 for none; 6 rank; 7 program.
    """
    field = _layout.Status
    kind = f"{'s' if signed else 'u'}{bits}"
    if cmp == "reached":
        holds = f"sub.s{bits} d, $0, $2; setp.ge.s{bits} p, d, 0;"
    else:
        holds = f"setp.{cmp}.{kind} p, $0, $2;"
    look = f"ld.{sem}.{scope}.global.b{bits} $0, [$1]; {holds}"
    widen = "mov.b64" if bits == 64 else f"cvt.{'s' if signed else 'u'}64.{kind}"
    words = (
        (field.PROGRAM, "cvt.s64.s32 x, $7;"),
        (field.ADDRESS, "$1"),
        (field.EXPECTED, f"{widen} x, $2;"),
        (field.LAST, f"{widen} x, $0;"),
        (field.COMPARISON, f"mov.b64 x, {_comparison_index(cmp)};"),
        (field.SENDER, "mov.b64 x, 0;"),
    )
    return f"""{{
.reg .pred p; .reg .u32 n, m; .reg .u64 now, end, x, row; .reg .b{bits} d;
mov.b{bits} $0, $2; setp.eq.b32 p, $3, 0; @p bra DONE;
mov.u32 n, 0; mov.u64 end, 0;
AGAIN:
{look} @p bra DONE;
add.u32 n, n, 1; and.b32 m, n, {POLLS_PER_CLOCK.value - 1}; setp.ne.u32 p, m, 0; @p bra AGAIN;
setp.eq.u64 p, $4, 0; @p bra AGAIN;
mov.u64 now, %globaltimer; setp.ne.u64 p, end, 0; @p bra CLOCK;
abs.s64 end, $4; add.u64 end, now, end;
CLOCK:
setp.gt.u64 p, now, end; @p bra LATE;
setp.eq.u64 p, $5, 0; @p bra AGAIN;
ld.relaxed.sys.global.u64 x, [$5+{8 * field.CODE}]; setp.eq.u64 p, x, 0; @p bra AGAIN;
setp.gt.s64 p, $4, 0; @p bra DONE; bra ON;
LATE:
setp.eq.u64 p, $5, 0; @p bra TAKEN;
{describe_assembly("$5", "$4", "$6", words, "TAKEN")}
TAKEN:
setp.gt.s64 p, $4, 0; @p bra DONE;
ON:
mov.u32 n, 0; mov.u64 now, %globaltimer; sub.u64 end, now, $4;
BESIDE:
{look} @p bra DONE;
add.u32 n, n, 1; and.b32 m, n, {POLLS_PER_CLOCK.value - 1}; setp.ne.u32 p, m, 0; @p bra BESIDE;
mov.u64 now, %globaltimer; setp.gt.u64 p, now, end; @p bra LATE; bra BESIDE;
DONE:
}}"""


@triton.jit
def _program():
    """Return the linear ID of this program."""
    row = tl.program_id(1) + tl.program_id(2) * tl.num_programs(1)
    return tl.program_id(0) + row * tl.num_programs(0)


@triton.jit
def await_each(
    pointers, expected, mask, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, timeout_ns, status_word, rank
):
    """Wait in every thread for its flags of a block; return the last values seen."""
    element: tl.constexpr = pointers.dtype.element_ty
    bits: tl.constexpr = element.primitive_bitwidth
    text: tl.constexpr = _await_assembly(cmp, element.is_int_signed(), bits, sem, scope)
    registers: tl.constexpr = _constraints(bits, "=&w,l,w,r,l,l,r,r")
    active, bound = mask.to(tl.int32), tl.cast(timeout_ns, tl.int64)
    operands = [pointers, expected, active, bound, tl.cast(status_word, tl.int64), tl.cast(rank, tl.int32), _program()]
    return tl.inline_asm_elementwise(text, registers, operands, dtype=pointers.dtype.element_ty, is_pure=False, pack=1)


# -- waiting, in Triton's language ------------------------------------------------------------------------------------
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


@triton.constexpr_function
def _scope_that_acquires(pointer, sem, scope, on_amd):
    """Return the scope, or a larger one where the compiler would drop the acquire.

    For AMD, Triton makes an atomic at device scope on a block of a kernel's own tensor one that addresses a buffer, and
    emits a release in place of the acquire (3.6 and 3.7).
    """
    return "sys" if on_amd and sem == "acquire" and pointer.type.is_block() else scope


@triton.jit
def poll(pointer, sem: tl.constexpr, scope: tl.constexpr):
    """Load the flags once.

    An atomic add of 0 is uniform: one thread loads and broadcasts, so all threads agree on whether to poll again.
    """
    where: tl.constexpr = _scope_that_acquires(pointer, sem, scope, is_hip())
    return tl.atomic_add(pointer, spread(0, pointer), sem=sem, scope=where)


@triton.jit
def missing_flags(seen, expected, cmp: tl.constexpr):
    """Return the number of flags (scalar) for which the comparison does not hold."""
    missing = 1 - _holds(seen, expected, cmp).to(tl.int32)
    if missing.type.is_block():
        missing = tl.sum(missing, axis=0)
    return missing


@triton.jit
def _order_stores(word):
    """Order earlier stores of this program before later ones, for all devices; `word`, a local int64, is unchanged."""
    if is_cuda():
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:  # a release waits for the stores before it; an acquire would only discard what is cached
        tl.atomic_add(word, tl.cast(0, tl.int64), sem="release", scope="sys")


@triton.jit
def begin_report(status_word, PART: tl.constexpr):
    """Claim the part of the status words that begins at word PART; return its address, 0 if it is taken."""
    row = tl.cast(0, tl.int64)
    if status_word != 0:
        status = status_word.to(tl.pointer_type(tl.int64))
        free = tl.cast(0, tl.int64)
        if tl.atomic_cas(status + PART, free, free + _CLAIMED, sem="relaxed", scope="sys") == 0:
            row = tl.load(status + _ROW)
            row = tl.where(row == 0, status_word, row) + 8 * PART
            tl.store(row.to(tl.pointer_type(tl.int64)), free + _CLAIMED)
            _order_stores(status + PART)  # readers see that it is incomplete
    return row.to(tl.pointer_type(tl.int64))


@triton.jit
def publish_report(status_word, row, rank, code, PART: tl.constexpr):
    """Complete the part in `row` of `begin_report`, and raise the alarm; WAITING is free again instead.

    `rank` is the caller in the world, `code` as in `iris_core.device.context_words.stamp`.
    """
    stamp = (wait_clock_ns(tl.cast(0, tl.int64)) << _STAMP_CLOCK) | ((tl.cast(rank, tl.int64) & 1023) << _STAMP_RANK)
    stamp = stamp | (PART // _PART_WORDS << _STAMP_PART) | code
    status = status_word.to(tl.pointer_type(tl.int64))
    _order_stores(status + PART)
    set_flag(row, stamp, "relaxed", "sys")
    _order_stores(status + PART)
    if PART == WAITING:
        if tl.load(status + _ROW) != 0:
            set_flag(status + PART, tl.cast(0, tl.int64), "relaxed", "sys")
    else:
        alarm = tl.load(status + _ALARM)
        if alarm != 0:
            set_flag(alarm.to(tl.pointer_type(tl.int64)), stamp, "relaxed", "sys")


@triton.jit
def report_wait(
    status_word, rank, pointer, expected, seen, cmp: tl.constexpr, PART: tl.constexpr, SENDER: tl.constexpr
):
    """Report a wait in the status words, unless they already hold a report."""
    address = pointer.to(tl.int64)
    wanted = expected.to(tl.int64)
    last = seen.to(tl.int64)
    if pointer.type.is_block():  # of the flags that are missing, the one with the lowest address
        holds = _holds(seen, expected, cmp)
        lowest = tl.min(tl.where(holds, _INT64_MAX, address), axis=0)
        if PART == WAITING:  # the last one came just now: nothing is waited for
            status_word = tl.where(lowest == _INT64_MAX, tl.cast(0, tl.int64), tl.cast(status_word, tl.int64))
        lowest = tl.where(lowest == _INT64_MAX, tl.min(address, axis=0), lowest)
        here = address == lowest
        address = lowest
        last = tl.max(tl.where(here, last, _INT64_MIN), axis=0)
        wanted = tl.max(tl.where(here, wanted, _INT64_MIN), axis=0)
    row = begin_report(status_word, PART)
    if row.to(tl.int64) != 0:
        tl.store(row + _RANK, rank)
        tl.store(row + _PROGRAM, _program())
        tl.store(row + _ADDRESS, address)
        tl.store(row + _EXPECTED, wanted)
        tl.store(row + _LAST, last)
        tl.store(row + _COMPARISON, _comparison_index(cmp))
        tl.store(row + _SENDER, SENDER)
        publish_report(status_word, row, rank, _WAIT_TIMEOUT, PART)


@triton.jit
def report_difference(status, rank, address, peer, ours, theirs, our_kind, their_kind, CODE: tl.constexpr):
    """Report a difference or a refusal in the status words, at `status` if that is not 0, unless they hold a report.

    `rank` is the caller in the world, `address` of a word of the team; `iris_core.device.context_words.Mismatch` says
    what the others are.
    """
    status_word = tl.cast(status, tl.int64)
    row = begin_report(status_word, DIFFERENCE)
    if row.to(tl.int64) != 0:
        words = (rank, peer, address, ours, theirs, our_kind, their_kind)
        for word in tl.static_range(len(words)):
            tl.store(row + 1 + word, words[word])
        publish_report(status_word, row, rank, CODE, DIFFERENCE)


@triton.jit
def look_at_clock(start, timeout_ns, status_word):
    """Return whether the wait has timed out, and its start time (pass 0 at the first call)."""
    bound = tl.cast(timeout_ns, tl.int64)
    now = wait_clock_ns(bound)
    if start == 0:
        start = now
    late = now - start > tl.abs(bound)
    if (bound > 0) & (status_word != 0):
        # A wait of this rank may have timed out before: results are invalid then, so later waits end early.
        status = status_word.to(tl.pointer_type(tl.int64))
        late = late | (tl.atomic_add(status + TIMED_OUT, 0, sem="relaxed", scope="sys") != 0)
    return late, start


@triton.constexpr_function
def _count(pointer):
    return int(pointer.type.shape[0]) if pointer.type.is_block() else 1


@triton.jit
def _place(seen, expected, cmp: tl.constexpr, ANY: tl.constexpr):
    """Return the index of the first flag that holds (ANY), or 0 if all hold; otherwise the number of flags."""
    if ANY:
        return tl.min(tl.where(_holds(seen, expected, cmp), places_in(seen), _count(seen)), axis=0)
    else:
        return tl.where(missing_flags(seen, expected, cmp) > 0, _count(seen), 0)


@triton.jit
def _last(pointer, seen, scope: tl.constexpr):
    """Return the last value seen of a flag, or the current values of a block."""
    return poll(pointer, "relaxed", scope) if pointer.type.is_block() else seen


@triton.jit
def spin(
    pointer, expected, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, timeout_ns, status_word, rank,
    ANY: tl.constexpr = False, SENDER: tl.constexpr = 0
):  # fmt: skip
    """Wait for one flag, all of a block, or any; returns `_place`, and of one flag the last value seen.

    Of a block the first values: some versions of the compiler cannot carry a block round a `while`.  A report names
    SENDER, as `iris_core.device.context_words.Status` says.
    """
    POLLS: tl.constexpr = POLLS_PER_CLOCK if is_cuda() or is_hip() else 8  # the CPU executor polls up to 20 ms apart
    polls = 0
    late = polls != 0
    start = tl.cast(0, tl.int64)
    seen = poll(pointer, sem, scope)
    place = _place(seen, expected, cmp, ANY)
    while (place == _count(pointer)) & ~late:
        polls += 1
        if timeout_ns != 0:  # noqa: SIM102 - decided at compile time where it is a constexpr
            if polls % POLLS == 0:
                late, start = look_at_clock(start, timeout_ns, status_word)
                if late & (timeout_ns < 0):  # again after each interval: the host sees that the wait continues
                    report_wait(status_word, rank, pointer, expected, _last(pointer, seen, scope), cmp, WAITING, SENDER)
                    late, start = late & False, start * 0
        now = poll(pointer, sem, scope)
        place = _place(now, expected, cmp, ANY)
        if not pointer.type.is_block():
            seen = now
    if timeout_ns != 0:  # noqa: SIM102
        if late:
            report_wait(status_word, rank, pointer, expected, _last(pointer, seen, scope), cmp, TIMED_OUT, SENDER)
    return place, seen


@triton.jit
def await_flag(
    pointer, expected, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, timeout_ns, status_word, rank
):
    """Wait for one flag; returns the last value seen, the same in all threads.

    Synchronises the threads of the program: when any of them goes on, all have seen the flag.

    The arguments are those of `iris_triton.language.wait`, but `expected` has the flag's type, and `status_word` is
    an address as int64, 0 for none.
    """
    if is_cuda():
        thread = lanes(num_threads())
        polling = thread < _POLLING_LANES
        seen = await_each(pointer + thread * 0, expected, polling, cmp, sem, scope, timeout_ns, status_word, rank)
        tl.debug_barrier()
        return tl.max(tl.where(polling, seen, _lowest(pointer.dtype.element_ty)), axis=0)
    else:
        _, seen = spin(pointer, expected, cmp, sem, scope, timeout_ns, status_word, rank)
        return seen


@triton.jit
def await_own_flag(
    pointer, expected, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, timeout_ns, status_word, rank
):
    """Let every thread wait for one flag by itself, also in a partition of one warp; as `await_flag` else.

    Nothing is synchronised: a thread that goes on knows of its own wait only.
    """
    if is_cuda():
        await_each(pointer, expected, pointer.to(tl.int64) != 0, cmp, sem, scope, timeout_ns, status_word, rank)
    else:
        spin(pointer, expected, cmp, sem, scope, timeout_ns, status_word, rank)


@triton.jit
def await_flags(
    pointers, expected, mask, cmp: tl.constexpr, sem: tl.constexpr, scope: tl.constexpr, timeout_ns, status_word, rank
):
    """Wait for those flags of a block where `mask` holds; as `await_flag`, but returns nothing.

    Where several flags are missing at the end of the time, one of them is reported.  Pointers where the mask does not
    hold must repeat one where it does.
    """
    if is_cuda():
        await_each(pointers, expected, mask, cmp, sem, scope, timeout_ns, status_word, rank)
        tl.debug_barrier()
    else:
        spin(pointers, expected, cmp, sem, scope, timeout_ns, status_word, rank)
