"""matmul_all_reduce into one sum for each tile, and round a ring: the algorithms of `iris_triton.collectives` on tiles.

"atomic" and "spinlock" (`matmul_accumulate`): every tile has an owner, who stores its own product into an accumulator
of float32; the others add theirs there, by atomics or under a lock.  Then the owner adds the bias, rounds, and stores
the result into the outputs of all.  So all members get the same bits; but products arrive in any order, so the last
bits may differ from one run to the next.  Accumulators take as much memory as one slot of `reduce_kernel` in float32.

"ring" (`matmul_ring`): a member's partial sum of a tile goes to the next member, which adds its own product; the last
one, the tile's owner, adds the bias and rounds, and the result goes round once more.  A member computes its product
before it waits for the sum that it is added to.  Everybody talks to its neighbours only.

The tile with number L of an owner is handled by program L % programs on every member: so only the programs of one
number meet, exchange messages, or use one lock.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.parts.barrier import last_epoch, leave, meet, members_of, row_of, tell, told, told_second
from iris_triton.gemm.tiles import (
    add_product,
    dense_tile,
    own_program,
    place,
    store_tile,
    whole_rows,
    wide,
    with_bias,
)
from iris_triton.language.asm import wait_stores
from iris_triton.language.flags import await_flag, set_flag

PER_CALL = ("out", "a", "b", "bias")
"""Arguments that may lie anywhere."""

RUNTIME = ("me", "rank", "per_owner", "timeout_ns", "status")
"""Arguments for whose values kernels are not compiled anew."""

LOCK_WORDS = 2
"""Words of a program's lock: the number that is drawn next, and the one that is served."""

RING_WORDS = 3
"""Words of a program in a ring: messages that have come in, that the next one has taken, and that were sent in all."""

_ARRIVED, _TAKEN, _NUMBER, _RING_WORDS = (tl.constexpr(n) for n in (0, 1, 2, RING_WORDS))


@triton.jit
def _elsewhere(pointer, bases, me, member):
    """The same place in a member's heap."""
    return (pointer.to(tl.int64) + (tl.load(bases + member) - tl.load(bases + me))).to(pointer.dtype)


@triton.jit
def _acquire(lock, timeout_ns, status, rank):
    """Wait for a ticket lock; returns the ticket.

    Any member draws, and only the holder of a ticket sets the number that is served next: none can serve another's.
    """
    ticket = tl.atomic_add(lock, 1, sem="relaxed", scope="sys")
    await_flag(lock + 1, ticket, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    return ticket


@triton.jit
def _tell_after_stores(word, value):
    """Set a flag when everything that this program has stored and loaded is done."""
    wait_stores()
    tl.debug_barrier()
    set_flag(word, value, "release", "sys")


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def matmul_accumulate(
    out, a, b, bias, control, sums, locks, bases, me, rank, m, n, k, a_down, a_right, b_down, b_right, out_down,
    bias_step, tiles_m, tiles_n, per_owner, timeout_ns, status,
    SIZE: tl.constexpr, LOCKED: tl.constexpr, BIAS: tl.constexpr, A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Add up A @ B over the members, into one accumulator for each tile.

    Meetings: the owners' products are in the accumulators; all products are; the outputs are complete.

    Args (beside those of `iris_triton.gemm.reduce_kernel.matmul_reduce`):
        sums: symmetric memory for per_owner tiles of float32.
        locks: if LOCKED, LOCK_WORDS words for each program (int64) that only grow.
        LOCKED: whether to add under a lock; else by atomics.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    nothing = members_of(SIZE).to(tl.int64) * 0
    tell(row, bases, me, nothing + (out.to(tl.int64) - tl.load(bases + me)), nothing + out_down, SIZE)
    program = own_program(0, XCDS, CHUNK)
    programs = tl.num_programs(0)
    total = tiles_m * tiles_n
    lock = locks + program * 2
    lanes = dense_tile(BM, BN)
    for i in range(SIZE):
        owner = (me + i) % SIZE
        there = tl.multiple_of(_elsewhere(sums, bases, me, owner), 16)
        for tile in range(program, tl.minimum(per_owner, total - owner * per_owner), programs):
            down, right = place(owner * per_owner + tile, tiles_m, tiles_n, GROUP)
            acc = add_product(
                tl.zeros((BM, BN), tl.float32), wide(a, A_ALIGNED), wide(b, B_ALIGNED), down * BM, right * BN, m, n, k,
                a_down, a_right, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
            )  # fmt: skip
            at = there + tl.cast(tile, tl.int64) * (BM * BN) + lanes
            if i == 0:
                tl.store(at, acc)
            elif LOCKED:
                theirs = _elsewhere(lock, bases, me, owner)
                ticket = _acquire(theirs, timeout_ns, status, rank)
                tl.store(at, tl.load(at) + acc)
                _tell_after_stores(theirs + 1, ticket + 1)
            else:
                tl.atomic_add(at, acc, sem="relaxed", scope="sys")
        if i == 0:
            meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    for tile in range(program, tl.minimum(per_owner, total - me * per_owner), programs):
        down, right = place(me * per_owner + tile, tiles_m, tiles_n, GROUP)
        acc = tl.load(sums + tl.cast(tile, tl.int64) * (BM * BN) + lanes)
        acc = with_bias(acc, bias, down * BM, right * BN, m, n, bias_step, BIAS, BM, BN)
        for j in range(SIZE):
            peer = (me + 1 + j) % SIZE
            target = tl.multiple_of((tl.load(bases + peer) + told(row, peer, SIZE)).to(out.dtype), 16)
            stride = whole_rows(told_second(row, peer, SIZE), out)
            store_tile(target, acc, down * BM, right * BN, m, n, stride, 1, BM, BN)
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@triton.jit
def _send(value, number, box, mine, theirs, slots, timeout_ns, status, rank, BM: tl.constexpr, BN: tl.constexpr):
    """Put a tile into the next member's mailbox.

    Args:
        value: the tile, of elements no wider than float32.
        number: messages that were sent before.
        box: that member's mailbox: `slots` slots for a tile of float32.
        mine, theirs: the words of this program here, and there.
        slots: of a mailbox.
    """
    await_flag(mine + _TAKEN, number + 1 - slots, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    slot = (box + number % slots * (BM * BN)).to(tl.pointer_type(value.dtype), bitcast=True)
    tl.store(tl.multiple_of(slot, 16) + dense_tile(BM, BN), value)
    _tell_after_stores(theirs + _ARRIVED, number + 1)


@triton.jit
def _receive(like, number, box, mine, theirs, slots, timeout_ns, status, rank, BM: tl.constexpr, BN: tl.constexpr):
    """Take a tile of elements of the type to which `like` points out of the own mailbox.

    Args:
        number: messages that were taken before.
        theirs: the words of this program at the member before.
        others: as in `_send`.
    """
    await_flag(mine + _ARRIVED, number + 1, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    slot = (box + number % slots * (BM * BN)).to(like.dtype, bitcast=True)
    value = tl.load(tl.multiple_of(slot, 16) + dense_tile(BM, BN))
    _tell_after_stores(theirs + _TAKEN, number + 1)
    return value


@triton.jit
def _tile_of(owner, tile, per_owner, m, tiles_m, tiles_n, GROUP: tl.constexpr):
    """(row, column, rows of the product) of an owner's tile; no rows at all if the last owners have fewer tiles.

    Such a tile goes round like the others, so that everybody sends as many messages as it gets, in every ring.
    """
    number = owner * per_owner + tile
    total = tiles_m * tiles_n
    down, right = place(tl.minimum(number, total - 1), tiles_m, tiles_n, GROUP)
    return down, right, tl.where(number < total, m, 0)


@triton.jit(do_not_specialize=(*RUNTIME, "slots", "rings"), do_not_specialize_on_alignment=PER_CALL)
def matmul_ring(
    out, a, b, bias, control, mail, words, steps, bases, me, rank, m, n, k, a_down, a_right, b_down, b_right, out_down,
    out_right, bias_step, tiles_m, tiles_n, per_owner, slots, rings, timeout_ns, status,
    SIZE: tl.constexpr, BIAS: tl.constexpr, A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr, XCDS: tl.constexpr,
    CHUNK: tl.constexpr
):  # fmt: skip
    """Add up A @ B over the members, round a ring.

    One meeting, at the beginning: nobody writes to a mailbox whose memory serves another call.  When a launch is over,
    all messages to this member have been taken.

    Args (beside those of `iris_triton.gemm.reduce_kernel.matmul_reduce`):
        mail: symmetric memory: for each program `slots` slots for a tile of float32.
        words: RING_WORDS words for each program (int64) that only grow.
        steps: int64[rings], how many members further each ring's next neighbour is.
        slots: of a mailbox.
        rings: how many; program p belongs to ring p % rings.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    program = own_program(0, XCDS, CHUNK)
    step = tl.load(steps + program % rings).to(tl.int32)
    mine = words + program * _RING_WORDS
    before = _elsewhere(mine, bases, me, (me + SIZE - step) % SIZE)
    after = _elsewhere(mine, bases, me, (me + step) % SIZE)
    box = mail + tl.cast(program, tl.int64) * slots * (BM * BN)
    next_box = _elsewhere(box, bases, me, (me + step) % SIZE)
    sent = tl.load(mine + _NUMBER)  # what is received next is always the one with the number of the last one sent
    for tile in range(program, per_owner, tl.num_programs(0)):
        for i in range(SIZE):  # the sum of a tile begins behind its owner, and ends there
            owner = (me + (i + 1) * (SIZE - step)) % SIZE
            down, right, rows = _tile_of(owner, tile, per_owner, m, tiles_m, tiles_n, GROUP)
            acc = add_product(
                tl.zeros((BM, BN), tl.float32), wide(a, A_ALIGNED), wide(b, B_ALIGNED), down * BM, right * BN,
                rows, n, tl.where(rows > 0, k, 0), a_down, a_right, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION,
                A_CACHE, B_CACHE, STAGES,
            )  # fmt: skip
            if i > 0:
                acc += _receive(box, sent - 1, box, mine, before, slots, timeout_ns, status, rank, BM, BN)
            if i < SIZE - 1:
                _send(acc, sent, next_box, mine, after, slots, timeout_ns, status, rank, BM, BN)
            else:
                acc = with_bias(acc, bias, down * BM, right * BN, rows, n, bias_step, BIAS, BM, BN)
                result = acc.to(out.dtype.element_ty)
                store_tile(wide(out, OUT_ALIGNED), result, down * BM, right * BN, rows, n, out_down, out_right, BM, BN)
                _send(result, sent, next_box, mine, after, slots, timeout_ns, status, rank, BM, BN)
            sent += 1
        for i in range(1, SIZE):
            owner = (me + i * (SIZE - step)) % SIZE
            down, right, rows = _tile_of(owner, tile, per_owner, m, tiles_m, tiles_n, GROUP)
            result = _receive(out, sent - 1, box, mine, before, slots, timeout_ns, status, rank, BM, BN)
            store_tile(wide(out, OUT_ALIGNED), result, down * BM, right * BN, rows, n, out_down, out_right, BM, BN)
            if i < SIZE - 1:
                _send(result, sent, next_box, mine, after, slots, timeout_ns, status, rank, BM, BN)
                sent += 1
    tl.store(mine + _NUMBER, sent)
    leave(row, epoch, SIZE)
