"""send and recv through mailboxes: what is sent lies in the receiver's memory until it comes for it.

Every rank has an inbox for each other one, divided among programs.  A program's part holds two pieces.  The sender
fills them in turn, and waits before it overwrites one that was not taken out; so up to two pieces per program can be
sent before anybody receives.  Words of a rank, for each peer and program:

    0   pieces that the peer has put into the inbox here (the peer counts)
    1   pieces that the peer has taken out of its own inbox (the peer counts)
    2   pieces that this rank has sent to the peer
    3   pieces that this rank has received from the peer

They only grow, so a captured send can be replayed.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.elements import as_words, copy_part
from iris_triton.flags import await_flag, set_flag
from iris_triton.intrinsics import wait_stores

ARRIVED, TAKEN, SENT, RECEIVED = (tl.constexpr(n) for n in range(4))
WORDS = 4
"""Words for each peer and program."""

RUNTIME = ("me", "peer", "apart", "count", "piece", "timeout_ns", "status", "sizes", "strides")
"""Arguments for whose values kernels are not compiled anew."""


@triton.jit
def _share(count):
    """(begin, end) of the elements that this program handles."""
    each = (tl.cast(count, tl.int64) + tl.num_programs(0) - 1) // tl.num_programs(0)
    each = (each + 15) // 16 * 16  # so that shares begin at multiples of 16 bytes if the tensor does
    begin = tl.minimum(tl.program_id(0) * each, count)
    return begin, tl.minimum(begin + each, count)


@triton.jit
def _elsewhere(pointer, distance):
    """The same place in a heap that lies so many bytes further on."""
    return (pointer.to(tl.int64) + distance).to(pointer.dtype)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("inp",))
def send(
    inp, words, boxes, bases, me, peer, apart, count, piece, timeout_ns, status, sizes, strides,
    PROGRAMS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Put a tensor into the inbox of a peer.

    Args:
        inp: the tensor.
        words: this rank's words (int64).
        boxes: this rank's inboxes, of PROGRAMS parts each.
        bases: int64, heap of every rank.
        me, peer: ranks of the world.
        apart: bytes of an inbox's part.
        count: number of elements.
        piece: elements of a piece; two fit into a part.
        timeout_ns, status: bound of waits, and where they report.
        sizes, strides: of the tensor, DIMS of them; none if it is dense.
        PROGRAMS: parts of an inbox; at least the number of programs.
        BLOCK: elements that a program moves at a time.
    """
    inp = as_words(inp)
    program = tl.program_id(0)
    distance = tl.load(bases + peer) - tl.load(bases + me)
    mine = words + (peer * PROGRAMS + program) * 4
    theirs = _elsewhere(words + (me * PROGRAMS + program) * 4, distance)
    box = _elsewhere(boxes + (tl.cast(me, tl.int64) * PROGRAMS + program) * apart, distance)
    box = box.to(inp.dtype, bitcast=True)
    number = tl.load(mine + SENT)
    at, end = _share(count)
    one = at * 0 + 1
    while at < end:
        await_flag(mine + TAKEN, number - 1, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), me)
        size = tl.minimum(end - at, piece)
        copy_part(box, number % 2 * piece, sizes, strides, inp, at, sizes, strides, size, one * 0, one, 0, DIMS, BLOCK)
        number += 1
        wait_stores()
        tl.debug_barrier()
        set_flag(theirs + ARRIVED, number, "release", "sys")
        at += piece
    tl.store(mine + SENT, number)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=("out",))
def receive(
    out, words, boxes, bases, me, peer, apart, count, piece, timeout_ns, status, sizes, strides,
    PROGRAMS: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Take a tensor out of the inbox for a peer; the arguments are those of `send`."""
    out = as_words(out)
    program = tl.program_id(0)
    distance = tl.load(bases + peer) - tl.load(bases + me)
    mine = words + (peer * PROGRAMS + program) * 4
    theirs = _elsewhere(words + (me * PROGRAMS + program) * 4, distance)
    box = (boxes + (tl.cast(peer, tl.int64) * PROGRAMS + program) * apart).to(out.dtype, bitcast=True)
    number = tl.load(mine + RECEIVED)
    at, end = _share(count)
    one = at * 0 + 1
    while at < end:
        await_flag(mine + ARRIVED, number + 1, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), me)
        size = tl.minimum(end - at, piece)
        copy_part(out, at, sizes, strides, box, number % 2 * piece, sizes, strides, size, one * 0, one, DIMS, 0, BLOCK)
        number += 1
        wait_stores()
        tl.debug_barrier()
        set_flag(theirs + TAKEN, number, "release", "sys")
        at += piece
    tl.store(mine + RECEIVED, number)
