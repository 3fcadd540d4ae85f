"""`<encoding>_one_shot`, `_two_shot`: all_reduce; `_mailbox`: reduce_scatter, all_gather, all_to_all.  No barrier.

Chosen on NVIDIA GPUs up to some MiB, as tables and models say: a call costs a launch and one hop (`exchange`) or two.

A mailbox (`iris_triton.collectives.packets.mailbox`) has two halves, and each half has room for `cap` packets from
every member.  A message goes in pieces of `cap` packets; each piece is an epoch, and the epochs use the halves in turn.
That is enough: whoever sends the packets of an epoch has received all those of the epoch before from everybody, so all
have read what the half had two epochs ago.  For that, every thread must send and receive as many packets in each piece
of a launch, and packets without data fill the last one.

Sentinel packets are cleared when they have been read.  That a peer's later store comes after the clearing is sure only
because a kernel has ended in between, so in that encoding every piece is a launch of its own.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.packets.arithmetic import reduced
from iris_triton.collectives.packets.data import _limit, load_data, store_data
from iris_triton.collectives.packets.mailbox import PER_CALL, RUNTIME, advance, confirm, end, look, mark_of
from iris_triton.collectives.packets.packet import clear, data_words, decode, encode, poll, push, spot
from iris_triton.language.asm import follow, let_next_start


@triton.jit
def _packet_of(words, k: tl.constexpr, W: tl.constexpr):
    """The words of packet k."""
    if W == 4:
        return words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]
    else:
        return words[2 * k], words[2 * k + 1]


@triton.jit
def _load_part(
    base, k: tl.constexpr, me, offset, total, part, flags, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """The data for the member that is k + 1 places behind."""
    member = (me + 1 + k) % N
    limit = _limit(total, part, member, EVEN)
    return load_data(base, member * part, offset, limit, flags, sizes, strides, ENC, WHOLE, ITEM, DIMS)


@triton.jit
def gather_parts(
    base, me, offset, total, part, flags, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, SHARDED: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Load the data of a packet for every member, in the order of `peers`; of one packet, if all get the same."""
    if SHARDED:
        words = _load_part(
            base, 0, me, offset, total, part, flags, sizes, strides, N, ENC, EVEN, WHOLE, ITEM, DIMS
        )  # fmt: skip
        for k in tl.static_range(1, N):
            words = words + _load_part(
                base, k, me, offset, total, part, flags, sizes, strides, N, ENC, EVEN, WHOLE, ITEM, DIMS
            )  # fmt: skip
        return words
    else:
        return load_data(base, part * 0, offset, part, flags, sizes, strides, ENC, WHOLE, ITEM, DIMS)


@triton.jit
def push_all(
    peers, place, words, epoch, mask, flags,
    N: tl.constexpr, ENC: tl.constexpr, SHARDED: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Push a packet to the same place at every member; STEP: the warps go from one member to the next together."""
    W: tl.constexpr = data_words(ENC)
    raw = encode(_packet_of(words, 0, W), epoch, flags, ENC)
    for k in tl.static_range(N):
        if SHARDED and k > 0:
            raw = encode(_packet_of(words, k, W), epoch, flags, ENC)
        push(peers[k] + place, raw, mask, flags, ENC)
        if STEP and k + 1 < N:
            tl.debug_barrier()


@triton.jit
def _store_parts(
    base, words, offset, total, part, flags, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """What came from each member to its own part of the output."""
    W: tl.constexpr = data_words(ENC)
    for i in tl.static_range(N):
        limit = _limit(total, part, i, EVEN)
        store_data(
            base, i * part, offset, limit, flags, sizes, strides, _packet_of(words, i, W), ENC, WHOLE, ITEM, DIMS
        )  # fmt: skip


@triton.jit
def _take(
    mine, slot, mark, mask, flags, timeout_ns, status, rank, N: tl.constexpr, ENC: tl.constexpr, NAP_NS: tl.constexpr
):
    """Await the packets of all members, and return their data."""
    return decode(poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS), N, ENC)


@triton.jit
def _leave(mine, slot, mask, N: tl.constexpr, ENC: tl.constexpr):
    """Free the places of packets: last, as nobody waits for it, and the data needs its registers no more."""
    if ENC == "sentinel":
        clear(mine, slot, mask, N)


@triton.jit
def _end_waits(counters, epoch, EARLY: tl.constexpr):
    """All packets have come: a launch of one piece has only to store its results, and to free places (`_leave`)."""
    end(counters, epoch)
    let_next_start(EARLY)


@triton.jit
def _deliver(
    to, words, offset, part, flags, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, REDUCES: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr,
    WHOLE: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Store what came in one hop, reduced or part by part."""
    if REDUCES:
        result = reduced(words, N, data_words(ENC), DT, OP)
        store_data(to, part * 0, offset, part, flags, sizes, strides, result, ENC, WHOLE, ITEM, DIMS)
    else:
        _store_parts(to, words, offset, part * N, part, flags, sizes, strides, N, ENC, True, WHOLE, ITEM, DIMS)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def exchange(
    out, inp, counters, peers, me, rank, kind, part, first, cap, pieces, box, half, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    N: tl.constexpr, ENC: tl.constexpr, SHARDED: tl.constexpr, REDUCES: tl.constexpr, DT: tl.constexpr,
    OP: tl.constexpr, ITEM: tl.constexpr, IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr, IN_WHOLE: tl.constexpr,
    OUT_WHOLE: tl.constexpr, ONCE: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, NAP_NS: tl.constexpr,
    EARLY: tl.constexpr, LOOKS: tl.constexpr
):  # fmt: skip
    """One hop: a part to every member, and what came from all is reduced, or kept part by part.

    Without SHARDED and REDUCES it is an all_gather, with SHARDED an all_to_all, with REDUCES an all_reduce in one shot
    (bitwise equal on all members: each reduces the same in the same order), with both a reduce_scatter.

    Args:
        out, inp: the tensors, dense or strided.
        counters: int32[WORDS], the mailbox's.
        peers: addresses of the members' heaps, beginning with the next member and ending with the own one.
        me, rank: the caller's index in the team, and in the world.
        kind: number of the kind of call, on which the members have agreed.
        part: bytes that go to a member.
        first: packet with which this launch begins.
        cap: packets of a piece; of whole lines.
        pieces: how many pieces this launch has; one, if the encoding is "sentinel".
        box: byte of the heap at which the mailbox begins.
        half: bytes of a half of it.
        timeout_ns, status: bound of waits, and where they report.
        in_sizes, in_strides, out_sizes, out_strides: of strided tensors, in elements.
        N: number of members.
        ENC: the encoding, see `iris_triton.collectives.packets.packet`.
        SHARDED: the input has a part for each member; else all get the same.
        REDUCES: whether what came is reduced.
        DT, OP: elements and reduction, if REDUCES.
        ITEM: bytes of an element.
        IN_DIMS, OUT_DIMS: dimensions of strided tensors; 0 if dense.
        IN_WHOLE, OUT_WHOLE: the tensor is dense, and its address and `part` are aligned (`packets.alignment`).
        ONCE: there is one piece, and the grid covers it, a packet for a thread: then nothing is a loop, and the data
            is loaded at the same time as the epoch.
        BLOCK: packets that a program handles at a time: at least one for each thread.
        STEP: the warps of a program go from peer to peer together.
        NAP_NS: see `poll`.
        EARLY: see `iris_triton.language.asm.follow`.
        LOOKS: four counters so many times for each thread of the launch are all; a power of two.
    """
    follow(EARLY)
    program = tl.program_id(0)
    to, origin = out.to(tl.int64), inp.to(tl.int64)
    part = tl.cast(part, tl.int64)
    slot = tl.cast(cap, tl.int64) * 16
    total = part * N
    if ONCE:
        packet = program * BLOCK + tl.arange(0, BLOCK)
        mask = (packet < cap).to(tl.int32)
        offset, flags = spot(first + packet, ENC)
        words = gather_parts(
            origin, me, offset, total, part, flags, in_sizes, in_strides, N, ENC, SHARDED, True, IN_WHOLE, ITEM, IN_DIMS
        )  # fmt: skip
        epoch, found = look(counters, 1, me, N, LOOKS)
        mark = mark_of(epoch)
        place = packet.to(tl.int64) * 16 + (tl.cast(box, tl.int64) + (epoch & 1).to(tl.int64) * half)
        push_all(peers, place + me * slot, words, mark, mask, flags, N, ENC, SHARDED, STEP)
        claimed = advance(found, counters, epoch, 1, kind, peers, me, status, rank, N)
        mine = peers[N - 1] + place
        came = _take(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
        _end_waits(counters, epoch + 1, EARLY)
        _deliver(
            to, came, offset, part, flags, out_sizes, out_strides, N, ENC, REDUCES, DT, OP, OUT_WHOLE, ITEM, OUT_DIMS
        )  # fmt: skip
        _leave(mine, slot, mask, N, ENC)
        confirm(counters, claimed, epoch, me, status, rank)
    else:
        step = tl.num_programs(0) * BLOCK
        epoch, found = look(counters, pieces, me, N, LOOKS)
        claimed = advance(found, counters, epoch, pieces, kind, peers, me, status, rank, N)
        for piece in range(pieces):
            at = tl.cast(box, tl.int64) + ((epoch + piece) & 1).to(tl.int64) * half
            mark = mark_of(epoch + piece)
            for s in range(program * BLOCK, cap, step):
                packet = s + tl.arange(0, BLOCK)
                mask = (packet < cap).to(tl.int32)
                offset, flags = spot(first + piece * cap + packet, ENC)
                words = gather_parts(
                    origin, me, offset, total, part, flags, in_sizes, in_strides, N, ENC, SHARDED, True, IN_WHOLE,
                    ITEM, IN_DIMS
                )  # fmt: skip
                place = packet.to(tl.int64) * 16 + (at + me * slot)
                push_all(peers, place, words, mark, mask, flags, N, ENC, SHARDED, STEP)
            for s in range(program * BLOCK, cap, step):
                packet = s + tl.arange(0, BLOCK)
                mask = (packet < cap).to(tl.int32)
                offset, flags = spot(first + piece * cap + packet, ENC)
                mine = packet.to(tl.int64) * 16 + (peers[N - 1] + at)
                came = _take(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
                _deliver(
                    to, came, offset, part, flags, out_sizes, out_strides, N, ENC, REDUCES, DT, OP, OUT_WHOLE, ITEM,
                    OUT_DIMS
                )  # fmt: skip
                _leave(mine, slot, mask, N, ENC)
        end(counters, epoch + pieces)
        confirm(counters, claimed, epoch, me, status, rank)


@triton.jit
def _forward(
    peers, place, me, slot, mark, mask, flags, timeout_ns, status, rank,
    N: tl.constexpr, ENC: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr, STEP: tl.constexpr, NAP_NS: tl.constexpr
):  # fmt: skip
    """Between the hops: reduce what came from all members, and push the result to all."""
    mine = peers[N - 1] + place
    raw = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
    result = reduced(decode(raw, N, ENC), N, data_words(ENC), DT, OP)
    push_all(peers, place + (N + me) * slot, result, mark, mask, flags, N, ENC, False, STEP)
    _leave(mine, slot, mask, N, ENC)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot(
    out, inp, counters, peers, me, rank, kind, nbytes, part, first, cap, pieces, box, half, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    N: tl.constexpr, ENC: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr, ITEM: tl.constexpr, IN_DIMS: tl.constexpr,
    OUT_DIMS: tl.constexpr, IN_WHOLE: tl.constexpr, OUT_WHOLE: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, NAP_NS: tl.constexpr, EARLY: tl.constexpr,
    LOOKS: tl.constexpr
):  # fmt: skip
    """all_reduce in two hops: each member reduces its part of all inputs and sends the result to all.

    Every thread takes its own packets through both hops, so no program waits for another one of its rank.

    Args (beside those of `exchange`):
        nbytes: bytes of the whole.
        part: bytes of a member's part; the last parts may be shorter, or empty.
        IN_WHOLE, OUT_WHOLE: the tensor is dense, and its address, `part` and `nbytes` are aligned.
        EVEN: all parts have `part` bytes.
    """
    follow(EARLY)
    program = tl.program_id(0)
    to, origin = out.to(tl.int64), inp.to(tl.int64)
    part = tl.cast(part, tl.int64)
    total = tl.cast(nbytes, tl.int64)
    slot = tl.cast(cap, tl.int64) * 16
    if ONCE:
        packet = program * BLOCK + tl.arange(0, BLOCK)
        mask = (packet < cap).to(tl.int32)
        offset, flags = spot(first + packet, ENC)
        words = gather_parts(
            origin, me, offset, total, part, flags, in_sizes, in_strides, N, ENC, True, EVEN, IN_WHOLE, ITEM, IN_DIMS
        )  # fmt: skip
        epoch, found = look(counters, 1, me, N, LOOKS)
        mark = mark_of(epoch)
        place = packet.to(tl.int64) * 16 + (tl.cast(box, tl.int64) + (epoch & 1).to(tl.int64) * half)
        push_all(peers, place + me * slot, words, mark, mask, flags, N, ENC, True, STEP)
        claimed = advance(found, counters, epoch, 1, kind, peers, me, status, rank, N)
        _forward(
            peers, place, me, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, DT, OP, STEP, NAP_NS
        )  # fmt: skip
        mine = peers[N - 1] + (place + N * slot)
        came = _take(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
        _end_waits(counters, epoch + 1, EARLY)
        _store_parts(
            to, came, offset, total, part, flags, out_sizes, out_strides, N, ENC, EVEN, OUT_WHOLE, ITEM, OUT_DIMS
        )  # fmt: skip
        _leave(mine, slot, mask, N, ENC)
        confirm(counters, claimed, epoch, me, status, rank)
    else:
        step = tl.num_programs(0) * BLOCK
        epoch, found = look(counters, pieces, me, N, LOOKS)
        claimed = advance(found, counters, epoch, pieces, kind, peers, me, status, rank, N)
        for piece in range(pieces):
            at = tl.cast(box, tl.int64) + ((epoch + piece) & 1).to(tl.int64) * half
            mark = mark_of(epoch + piece)
            for s in range(program * BLOCK, cap, step):
                packet = s + tl.arange(0, BLOCK)
                mask = (packet < cap).to(tl.int32)
                offset, flags = spot(first + piece * cap + packet, ENC)
                words = gather_parts(
                    origin, me, offset, total, part, flags, in_sizes, in_strides, N, ENC, True, EVEN, IN_WHOLE, ITEM,
                    IN_DIMS
                )  # fmt: skip
                place = packet.to(tl.int64) * 16 + (at + me * slot)
                push_all(peers, place, words, mark, mask, flags, N, ENC, True, STEP)
            for s in range(program * BLOCK, cap, step):
                packet = s + tl.arange(0, BLOCK)
                mask = (packet < cap).to(tl.int32)
                _, flags = spot(packet, ENC)
                place = packet.to(tl.int64) * 16 + at
                _forward(
                    peers, place, me, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, DT, OP, STEP, NAP_NS
                )  # fmt: skip
            for s in range(program * BLOCK, cap, step):
                packet = s + tl.arange(0, BLOCK)
                mask = (packet < cap).to(tl.int32)
                offset, flags = spot(first + piece * cap + packet, ENC)
                mine = packet.to(tl.int64) * 16 + (peers[N - 1] + at + N * slot)
                came = _take(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
                _store_parts(
                    to, came, offset, total, part, flags, out_sizes, out_strides, N, ENC, EVEN, OUT_WHOLE, ITEM,
                    OUT_DIMS
                )  # fmt: skip
                _leave(mine, slot, mask, N, ENC)
        end(counters, epoch + pieces)
        confirm(counters, claimed, epoch, me, status, rank)
