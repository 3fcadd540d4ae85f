"""Programs of the same number on all members of a team meet: they arrive, and go on when all have.

A program's row of the team's control region (`iris_core.ccl.team`) has, for SIZE members,

    words 0 .. SIZE - 1            epoch at which each member has arrived
    words SIZE .. 2 SIZE - 1       a word from each member, told before it arrived
    words 2 SIZE .. 3 SIZE - 1     another one
    word 3 SIZE                    this rank's epoch, between launches

Epochs only grow, so nothing has to be reset, and a captured launch can be replayed.  A member can be one epoch ahead,
never two: the next one needs everybody.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from iris_triton.flags import await_flags, lanes_for, set_flags
from iris_triton.intrinsics import wait_stores


@triton.jit
def row_of(control, SIZE: tl.constexpr):
    """This program's row: pointer to int64."""
    return control + tl.program_id(0) * (3 * SIZE + 1)


@triton.jit
def last_epoch(row, SIZE: tl.constexpr):
    """The epoch at which the launch before has ended (scalar)."""
    return tl.load(row + 3 * SIZE)


@triton.jit
def leave(row, epoch, SIZE: tl.constexpr):
    """Keep the epoch for the next launch."""
    tl.store(row + 3 * SIZE, epoch)


@triton.jit
def members_of(SIZE: tl.constexpr):
    """Indices of the members as a block; lanes beyond SIZE repeat them."""
    return lanes_for(SIZE) % SIZE


@triton.jit
def _at_peers(pointer, bases, me, SIZE: tl.constexpr):
    """Where a word of the own heap lies on every member (block of pointers)."""
    distance = tl.load(bases + members_of(SIZE)) - tl.load(bases + me)
    return (pointer.to(tl.int64) + distance).to(pointer.dtype)


@triton.jit
def tell(row, bases, me, first, second, SIZE: tl.constexpr):
    """Tell each member two words (blocks over `members_of`); they are there when the next meeting is over."""
    lanes = lanes_for(SIZE)
    tl.store(_at_peers(row + SIZE + me, bases, me, SIZE), first, mask=lanes < SIZE)
    tl.store(_at_peers(row + 2 * SIZE + me, bases, me, SIZE), second, mask=lanes < SIZE)


@triton.jit
def told(row, member, SIZE: tl.constexpr):
    """The first word that a member has told (scalar or block)."""
    return tl.load(row + SIZE + member)


@triton.jit
def told_second(row, member, SIZE: tl.constexpr):
    """The second word that a member has told."""
    return tl.load(row + 2 * SIZE + member)


@triton.jit
def meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE: tl.constexpr):
    """Arrive at an epoch, and wait until all members have.

    What any thread of the members' programs of this number stored before is visible to all threads afterwards.

    Args:
        row: see `row_of`.
        bases: int64[SIZE], the members' heaps.
        me: the caller's index among the members.
        epoch: one more than at the last meeting.
        timeout_ns, status, rank: see `iris_triton.flags.await_flag`; `rank` is the caller's in the world.
        SIZE: number of members.
    """
    lanes = lanes_for(SIZE)
    wait_stores()
    tl.debug_barrier()
    set_flags(_at_peers(row + me, bases, me, SIZE), epoch, lanes < SIZE, "release", "sys")
    await_flags(
        row + lanes % SIZE,
        epoch,
        lanes < SIZE,
        "reached",
        "acquire",
        "sys",
        timeout_ns,
        tl.cast(status, tl.int64),
        rank,
    )


@triton.jit(do_not_specialize=("me", "rank", "timeout_ns", "status"))
def meet_alone(control, bases, me, rank, timeout_ns, status, SIZE: tl.constexpr):
    """A kernel of one program that does nothing but meet, between operations of the stream that are no kernels.

    Args:
        control: the team's control region (int64).
        bases, me, timeout_ns, status, rank, SIZE: see `meet`.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)
