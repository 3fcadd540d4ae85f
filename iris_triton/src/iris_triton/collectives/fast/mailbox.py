"""Collectives through mailboxes: one hop (`exchange`) or two (`two_shot`), and no barrier.

A mailbox has two halves, and each half has room for `cap` packets from every member.  A message goes in pieces of `cap`
packets; each piece is an epoch, and the epochs use the halves in turn.  That is enough: whoever sends the packets of an
epoch has received all those of the epoch before from everybody, so all have read what the half had two epochs ago.
For that, every thread must send and receive as many packets in each piece of a launch, and packets without data fill
the last one.

Sentinel packets are cleared when they have been read.  That a peer's later store comes after the clearing is sure only
because a kernel has ended in between, so in that encoding every piece is a launch of its own.

The epoch is counted in device memory, by a counter for each program: whatever the grid of a call, all of them advance.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.fast.data import load_data, store_data
from iris_triton.collectives.fast.packets import alignment, clear, data_words, decode, encode, poll, push, spot
from iris_triton.collectives.fast.words import reduced

MAX_PROGRAMS = 1024
"""Counters of a mailbox: no launch has more programs."""

RUNTIME = (
    "peers", "me", "rank", "nbytes", "part", "first", "cap", "pieces", "box", "half", "timeout_ns", "status",
    "in_sizes", "in_strides", "out_sizes", "out_strides",
)  # fmt: skip
"""Arguments for whose values kernels are not compiled anew."""

PER_CALL = ("out", "inp")
"""Arguments that may lie anywhere."""

_COUNTERS = tl.constexpr(MAX_PROGRAMS)


@triton.jit
def advance(counters, epoch, count):
    """Add `count` to all counters, which are at `epoch`: a program to its own, program 0 to those of no program.

    Every warp reads the counter for itself, hence the barrier: all have read before any thread writes.
    """
    program = tl.program_id(0)
    tl.debug_barrier()
    counter = tl.arange(0, _COUNTERS)
    mine = (counter == program) | ((counter >= tl.num_programs(0)) & (program == 0))
    tl.store(counters + counter, counter * 0 + (epoch + count), mask=mine)


@triton.jit
def push_to_all(peers, offset, raw, mask, flags, N: tl.constexpr, ENC: tl.constexpr, STEP: tl.constexpr):
    """A packet of each thread to the same place at every member; STEP: the warps go from one to the next together."""
    for i in tl.static_range(N):
        push(peers[i] + offset, raw, mask, flags, ENC)
        if STEP and i + 1 < N:
            tl.debug_barrier()


@triton.jit
def _limit(total, part, member):
    """Bytes of a member's part, where parts are equal but the last ones may be short."""
    return tl.maximum(tl.minimum(total - member * part, part), 0)


@triton.jit
def _raw_part(
    base, k: tl.constexpr, me, offset, total, part, flags, epoch, whole, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """A packet of the part for the member that is k + 1 places behind."""
    member = (me + 1 + k) % N
    limit = _limit(total, part, member)
    words = load_data(base, member * part, offset, limit, flags, whole, sizes, strides, ENC, ITEM, DIMS)
    return encode(words, epoch, flags, ENC)


@triton.jit
def push_parts(
    base, peers, me, to, offset, total, part, mask, flags, epoch, whole, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """A packet of its own part to every member; all loads are under way before the first store."""
    raw = _raw_part(base, 0, me, offset, total, part, flags, epoch, whole, sizes, strides, N, ENC, ITEM, DIMS)
    for k in tl.static_range(1, N):
        raw = raw + _raw_part(base, k, me, offset, total, part, flags, epoch, whole, sizes, strides, N, ENC, ITEM, DIMS)
    for k in tl.static_range(N):
        packet = (raw[4 * k], raw[4 * k + 1], raw[4 * k + 2], raw[4 * k + 3])
        push(peers[k] + to, packet, mask, flags, ENC)
        if STEP and k + 1 < N:
            tl.debug_barrier()


@triton.jit
def store_parts(
    base, words, offset, total, part, flags, whole, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """What came from each member to its own part of the output."""
    W: tl.constexpr = data_words(ENC)
    for i in tl.static_range(N):
        if W == 4:
            packet = (words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3])
        else:
            packet = (words[2 * i], words[2 * i + 1])
        limit = _limit(total, part, i)
        store_data(base, i * part, offset, limit, flags, whole, sizes, strides, packet, ENC, ITEM, DIMS)


@triton.jit
def _is_whole(out, inp, total, part, ENC: tl.constexpr):
    return ((out | inp | total | part) % alignment(ENC)) == 0


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def exchange(
    out, inp, counters, peers, me, rank, part, first, cap, pieces, box, half, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    N: tl.constexpr, ENC: tl.constexpr, SHARDED: tl.constexpr, REDUCES: tl.constexpr, DT: tl.constexpr,
    OP: tl.constexpr, ITEM: tl.constexpr, IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, NAP_NS: tl.constexpr
):  # fmt: skip
    """One hop: a part to every member, and what came from all is reduced, or kept part by part.

    Without SHARDED and REDUCES it is an all_gather, with SHARDED an all_to_all, with REDUCES an all_reduce in one shot
    (bitwise equal on all members: each reduces the same in the same order), with both a reduce_scatter.

    Args:
        out, inp: the tensors, dense or strided.
        counters: int32[MAX_PROGRAMS], the mailbox's.
        peers: addresses of the members' heaps, beginning with the next member and ending with the own one.
        me, rank: the caller's index in the team, and in the world.
        part: bytes that go to a member.
        first: packet with which this launch begins.
        cap: packets of a piece; of whole lines.
        pieces: how many pieces this launch has; one, if the encoding is "sentinel".
        box: byte of the heap at which the mailbox begins.
        half: bytes of a half of it.
        timeout_ns, status: bound of waits, and where they report.
        in_sizes, in_strides, out_sizes, out_strides: of strided tensors, in elements.
        N: number of members.
        ENC: the encoding, see `iris_triton.collectives.fast.packets`.
        SHARDED: the input has a part for each member; else all get the same.
        REDUCES: whether what came is reduced.
        DT, OP: elements and reduction, if REDUCES.
        ITEM: bytes of an element.
        IN_DIMS, OUT_DIMS: dimensions of strided tensors; 0 if dense.
        BLOCK: packets that a program handles at a time: at least one for each thread.
        STEP: the warps of a program go from peer to peer together.
        NAP_NS: see `poll`.
    """
    program = tl.program_id(0)
    step = tl.num_programs(0) * BLOCK
    epoch = tl.load(counters + program)
    to, origin = out.to(tl.int64), inp.to(tl.int64)
    part = tl.cast(part, tl.int64)
    slot = tl.cast(cap, tl.int64) * 16
    total = part * N
    whole = _is_whole(to, origin, total, part, ENC)
    for piece in range(pieces):
        at = tl.cast(box, tl.int64) + ((epoch + piece) & 1).to(tl.int64) * half
        mark = epoch + piece + 1
        for s in range(program * BLOCK, cap, step):
            packet = s + tl.arange(0, BLOCK)
            mask = (packet < cap).to(tl.int32)
            offset, flags = spot(first + piece * cap + packet, ENC)
            there = packet.to(tl.int64) * 16 + (at + me * slot)
            if SHARDED:
                push_parts(
                    origin, peers, me, there, offset, total, part, mask, flags, mark, whole, in_sizes, in_strides,
                    N, ENC, ITEM, IN_DIMS, STEP
                )  # fmt: skip
            else:
                words = load_data(
                    origin, part * 0, offset, part, flags, whole, in_sizes, in_strides, ENC, ITEM, IN_DIMS
                )
                push_to_all(peers, there, encode(words, mark, flags, ENC), mask, flags, N, ENC, STEP)
        if piece == 0:
            advance(counters, epoch, pieces)
        for s in range(program * BLOCK, cap, step):
            packet = s + tl.arange(0, BLOCK)
            mask = (packet < cap).to(tl.int32)
            offset, flags = spot(first + piece * cap + packet, ENC)
            mine = packet.to(tl.int64) * 16 + (peers[N - 1] + at)
            raw = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
            if ENC == "sentinel":
                clear(mine, slot, mask, N)
            words = decode(raw, N, ENC)
            if REDUCES:
                result = reduced(words, N, data_words(ENC), DT, OP)
                store_data(
                    to, part * 0, offset, part, flags, whole, out_sizes, out_strides, result, ENC, ITEM, OUT_DIMS
                )
            else:
                store_parts(
                    to, words, offset, total, part, flags, whole, out_sizes, out_strides, N, ENC, ITEM, OUT_DIMS
                )


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot(
    out, inp, counters, peers, me, rank, nbytes, part, first, cap, pieces, box, half, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    N: tl.constexpr, ENC: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr, ITEM: tl.constexpr, IN_DIMS: tl.constexpr,
    OUT_DIMS: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, NAP_NS: tl.constexpr
):  # fmt: skip
    """all_reduce in two hops: each member reduces its part of all inputs and sends the result to all.

    Every thread takes its own packets through both hops, so no program waits for another one of its rank.

    Args (beside those of `exchange`):
        nbytes: bytes of the whole.
        part: bytes of a member's part; the last parts may be shorter, or empty.
    """
    program = tl.program_id(0)
    step = tl.num_programs(0) * BLOCK
    epoch = tl.load(counters + program)
    to, origin = out.to(tl.int64), inp.to(tl.int64)
    part = tl.cast(part, tl.int64)
    total = tl.cast(nbytes, tl.int64)
    slot = tl.cast(cap, tl.int64) * 16
    whole = _is_whole(to, origin, total, part, ENC)
    for piece in range(pieces):
        at = tl.cast(box, tl.int64) + ((epoch + piece) & 1).to(tl.int64) * half
        mark = epoch + piece + 1
        for s in range(program * BLOCK, cap, step):
            packet = s + tl.arange(0, BLOCK)
            mask = (packet < cap).to(tl.int32)
            offset, flags = spot(first + piece * cap + packet, ENC)
            push_parts(
                origin, peers, me, packet.to(tl.int64) * 16 + (at + me * slot), offset, total, part, mask, flags, mark,
                whole, in_sizes, in_strides, N, ENC, ITEM, IN_DIMS, STEP
            )  # fmt: skip
        if piece == 0:
            advance(counters, epoch, pieces)
        for s in range(program * BLOCK, cap, step):
            packet = s + tl.arange(0, BLOCK)
            mask = (packet < cap).to(tl.int32)
            _, flags = spot(packet, ENC)
            here = packet.to(tl.int64) * 16 + at
            mine = peers[N - 1] + here
            raw = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
            result = reduced(decode(raw, N, ENC), N, data_words(ENC), DT, OP)
            there = here + (N + me) * slot
            push_to_all(peers, there, encode(result, mark, flags, ENC), mask, flags, N, ENC, STEP)
            if ENC == "sentinel":
                clear(mine, slot, mask, N)
        for s in range(program * BLOCK, cap, step):
            packet = s + tl.arange(0, BLOCK)
            mask = (packet < cap).to(tl.int32)
            offset, flags = spot(first + piece * cap + packet, ENC)
            mine = packet.to(tl.int64) * 16 + (peers[N - 1] + at + N * slot)
            raw = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
            if ENC == "sentinel":
                clear(mine, slot, mask, N)
            words = decode(raw, N, ENC)
            store_parts(to, words, offset, total, part, flags, whole, out_sizes, out_strides, N, ENC, ITEM, OUT_DIMS)
