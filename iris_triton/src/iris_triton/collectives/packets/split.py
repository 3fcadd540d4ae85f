"""all_reduce and reduce_scatter of large messages: some programs only push, others only reduce.

Programs come in pairs.  The even one pushes the parts of the input into the mailboxes, a stretch to one member and then
to the next, so that the traffic of all members stays close to a permutation.  The odd one polls, reduces, and frees the
places.  In an all_reduce it hands every chunk of results to the even one by a flag of this rank, which pushes them
straight into the outputs of the others.

Nobody waits before the first push: results go only to members whose data of this call has come.  Where their outputs
lie they say when they begin, by the words of the portable algorithms' meetings, and those are awaited before the first
result; another meeting ends the call.

The pushing program holds several packets in each thread, so that loads and stores overlap; the reducing one takes one
packet of a thread at a time, from all members.

A message has one epoch: the mailbox has room for all of it, and what is larger goes in several launches.  So the places
of sentinel packets are free again because a kernel has ended, not because of the order of stores within one.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.packets.arithmetic import reduced
from iris_triton.collectives.packets.data import load_data, store_data
from iris_triton.collectives.packets.mailbox import (
    PER_CALL,
    RUNTIME,
    _limit,
    advance,
    confirm,
    end,
    look,
    mark_of,
)
from iris_triton.collectives.packets.packet import alignment, clear, data_words, decode, encode, poll, push, spot
from iris_triton.collectives.parts.barrier import (
    arrive,
    await_all,
    claim,
    last_epoch,
    leave,
    members_of,
    row_words,
    tell,
    told,
)
from iris_triton.language.flags import await_flag, set_flag

_RUNTIME = (*RUNTIME, "slots")


@triton.jit
def _row_of(control, SIZE: tl.constexpr):
    """The pair's row of the team's control region: pairs are numbered like the programs of other kernels."""
    return control + (tl.program_id(0) // 2) * row_words(SIZE)


@triton.jit
def _pick(peers, i, N: tl.constexpr):
    """Element i of a tuple of numbers, without a table in memory."""
    found = peers[0]
    for k in tl.static_range(1, N):
        found = tl.where(i == k, peers[k], found)
    return found


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def split(
    out, inp, counters, control, local, bases, peers, me, rank, kind, nbytes, part, first, cap, slots, box, half,
    timeout_ns, status, in_sizes, in_strides, out_sizes, out_strides,
    N: tl.constexpr, ENC: tl.constexpr, GATHERS: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr, ITEM: tl.constexpr,
    IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr, IN_WHOLE: tl.constexpr, OUT_WHOLE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, ITER: tl.constexpr, NAP_NS: tl.constexpr, FIRST_NAP_NS: tl.constexpr,
    LOOKS: tl.constexpr
):  # fmt: skip
    """Reduce the own part of all inputs.

    Args (beside those of `iris_triton.collectives.packets.mailbox.two_shot`):
        control: the team's control region (int64).
        local: int32, a word of this rank for each pair; 0 between launches.
        bases: int64[N], the members' heaps.
        first: packet of each part with which this launch begins.
        cap: packets of each part in this launch.
        slots: packets between what comes from two members in the mailbox.
        N: number of members, two at least.
        GATHERS: the results go to all outputs, which are dense and on the heap; else the own part is all of the output.
        BLOCK: packets that a pushing program handles at a time.
        SUB: packets that a reducing program handles at a time; BLOCK is a multiple of it.
        ITER: blocks of a chunk.
        NAP_NS: between two looks at packets of all members.
        FIRST_NAP_NS: between two looks at those of the member that comes last, before looking at all; 0 for not at all.
    """
    program = tl.program_id(0)
    pair = program // 2
    step = (tl.num_programs(0) // 2) * BLOCK
    epoch, found = look(counters, 1, me, N, LOOKS)
    claimed = advance(found, counters, epoch, 1, kind, peers, me, status, rank, N)
    mark = mark_of(epoch)
    to, origin = out.to(tl.int64), inp.to(tl.int64)
    part = tl.cast(part, tl.int64)
    total = tl.cast(nbytes, tl.int64)
    slot = tl.cast(slots, tl.int64) * 16
    own = peers[N - 1]
    at = tl.cast(box, tl.int64) + (epoch & 1).to(tl.int64) * half
    chunk = step * ITER
    chunks = (cap + chunk - 1) // chunk
    limit = _limit(total, part, me, EVEN)
    begin = part * 0
    if GATHERS:
        begin = me * part
    row = _row_of(control, N)
    if program % 2 == 0:
        if GATHERS:
            meeting = last_epoch(row, N)
            nothing = members_of(N).to(tl.int64) * 0
            tell(row, bases, me, nothing + (to - own), nothing, N)
            meeting += 1
            arrive(row, bases, me, meeting, N)
            claim(row, me, meeting, status, rank, N)
        for c in range(chunks + 1):
            if c < chunks:
                for i in tl.range(0, N - 1, loop_unroll_factor=1):  # unrolled, it would need three times the registers
                    member = (me + 1 + i) % N
                    there = _pick(peers, i, N) + (at + i * slot)
                    length = _limit(total, part, member, EVEN)
                    for s in range(c * chunk + pair * BLOCK, min(c * chunk + chunk, cap), step):
                        packet = s + tl.arange(0, BLOCK)
                        offset, flags = spot(first + packet, ENC)
                        words = load_data(
                            origin, member * part, offset, length, flags, in_sizes, in_strides, ENC, IN_WHOLE, ITEM,
                            IN_DIMS
                        )  # fmt: skip
                        mask = (packet < cap).to(tl.int32)
                        push(packet.to(tl.int64) * 16 + there, encode(words, mark, flags, ENC), mask, flags, ENC)
            if GATHERS:
                if c == 1:
                    await_all(row, meeting, timeout_ns, status, rank, N)
                if c > 0:
                    await_flag(local + pair, c, "ge", "acquire", "gpu", timeout_ns, tl.cast(status, tl.int64), rank)
                    for i in tl.range(0, N - 1, loop_unroll_factor=1):
                        there = _pick(peers, i, N) + told(row, (me + 1 + i) % N, N)
                        whole = there % alignment(ENC) == 0
                        for s in range(c * chunk - chunk + pair * BLOCK, min(c * chunk, cap), step):
                            packet = s + tl.arange(0, BLOCK)
                            offset, flags = spot(first + packet, ENC)
                            length = tl.where(packet < cap, limit, 0)
                            words = load_data(
                                to, begin, offset, length, flags, out_sizes, out_strides, ENC, OUT_WHOLE, ITEM,
                                OUT_DIMS
                            )  # fmt: skip
                            if OUT_WHOLE & whole:  # this rank's output, and that of the other one
                                store_data(
                                    there, begin, offset, length, flags, out_sizes, out_strides, words, ENC, True,
                                    ITEM, 0
                                )  # fmt: skip
                            else:
                                store_data(
                                    there, begin, offset, length, flags, out_sizes, out_strides, words, ENC, False,
                                    ITEM, 0
                                )  # fmt: skip
        if GATHERS:
            tl.debug_barrier()
            tl.store(local + pair, 0)
            meeting += 1
            arrive(row, bases, me, meeting, N)
            await_all(row, meeting, timeout_ns, status, rank, N)
            leave(row, meeting, N)
    else:
        for c in range(chunks):
            for s in range(c * chunk + pair * BLOCK, min(c * chunk + chunk, cap), step):
                for part_of_block in range(0, BLOCK, SUB):
                    packet = s + part_of_block + tl.arange(0, SUB)
                    mask = (packet < cap).to(tl.int32)
                    offset, flags = spot(first + packet, ENC)
                    mine = packet.to(tl.int64) * 16 + (own + at)
                    words = load_data(
                        origin, me * part, offset, limit, flags, in_sizes, in_strides, ENC, IN_WHOLE, ITEM, IN_DIMS
                    )
                    if FIRST_NAP_NS > 0:
                        last = mine + (N - 2) * slot
                        poll(last, slot, mark, mask, flags, timeout_ns, status, rank, 1, ENC, FIRST_NAP_NS, N - 2, True)
                    raw = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N - 1, ENC, NAP_NS, 0, True)
                    result = reduced(words + decode(raw, N - 1, ENC), N, data_words(ENC), DT, OP)
                    length = tl.where(packet < cap, limit, 0)
                    store_data(
                        to, begin, offset, length, flags, out_sizes, out_strides, result, ENC, OUT_WHOLE, ITEM,
                        OUT_DIMS
                    )  # fmt: skip
                    if ENC == "sentinel":
                        clear(mine, slot, mask, N - 1)
            if GATHERS:
                tl.debug_barrier()
                set_flag(local + pair, c + 1, "release", "gpu")
    end(counters, epoch + 1)
    confirm(counters, claimed, epoch, me, status, rank)
