"""all_gather and all_to_all of large messages: straight into the outputs of the others, one member after the other.

Plain Triton, with the meetings of the portable algorithms: all say where their outputs lie and that they are free, and
at the end that they have pushed everything.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.collectives.elements import as_words, copy, item_nbytes
from iris_triton.collectives.meeting import last_epoch, leave, meet, members_of, row_of, tell, told
from iris_triton.collectives.pull import PER_CALL

_RUNTIME = ("me", "rank", "count", "timeout_ns", "status", "in_sizes", "in_strides")


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_direct(
    out, inp, control, bases, me, rank, count, timeout_ns, status, in_sizes, in_strides,
    SIZE: tl.constexpr, SHARDED: tl.constexpr, IN_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Push a part to every member.

    Args:
        out, inp: the tensors; the output is dense and on the heap.
        control: the team's control region (int64).
        bases: int64[SIZE], the members' heaps.
        me, rank: the caller's index in the team, and in the world.
        count: elements that go to a member.
        timeout_ns, status: bound of waits, and where they report.
        in_sizes, in_strides: of the input, IN_DIMS of them; none if it is dense.
        SIZE: number of members.
        SHARDED: the input has a part for each member; else all get the same.
        BLOCK: elements that a program moves at a time.
    """
    inp = as_words(inp)
    out = as_words(out)
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    own = tl.load(bases + me)
    nothing = members_of(SIZE).to(tl.int64) * 0
    count = tl.cast(count, tl.int64)
    tell(row, bases, me, nothing + (out.to(tl.int64) - own), nothing, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    for i in range(SIZE):
        member = (me + 1 + i) % SIZE
        there = (tl.load(bases + member) + told(row, member, SIZE) + me * count * ITEM).to(out.dtype)
        begin = count * 0
        if SHARDED:
            begin = member * count
        copy(there, 0, in_sizes, in_strides, inp, begin, in_sizes, in_strides, count, 0, IN_DIMS, BLOCK)
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)
