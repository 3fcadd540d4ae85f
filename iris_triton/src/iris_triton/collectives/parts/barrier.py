"""Barriers between the programs with the same number on all members of a team.

A program's row of the team's control region (`iris_core.dispatch.team`) has, for SIZE members,

    words 0 .. SIZE - 1            epoch at which each member has arrived
    words SIZE .. 2 SIZE - 1       first word published by each member, before it arrives
    words 2 SIZE .. 3 SIZE - 1     second word published by each member
    words 3 SIZE .. 4 SIZE - 1     first program's row only: ID of each member's call signature
    word 4 SIZE                    this rank's epoch (48 bits); above it, the number of launches that use the row

Epochs only grow, so nothing is reset and a captured launch can be replayed.  A member is at most one epoch ahead.  If
two launches overlap on a device, as those of two graphs may, the second one reports it.
"""

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from iris_core.device.context_words import KIND_BITS, MismatchCode
from iris_triton.language.flags import await_each, lanes_for, poll, report_difference, set_flag, set_flags, spin
from iris_triton.language.sync import gather_stores

_KIND = tl.constexpr(int(MismatchCode.KIND))
_OVERLAP = tl.constexpr(int(MismatchCode.OVERLAP))
_COUNT_BITS = tl.constexpr(48)
_KIND_BITS = tl.constexpr(KIND_BITS)


@triton.constexpr_function
def row_words(size):
    """Return the number of words in a program's row; equals `iris_core.dispatch.team.control_words`."""
    return 4 * size + 1


@triton.jit
def row_of(control, SIZE: tl.constexpr):
    """Return a pointer to this program's row (int64)."""
    return control + tl.program_id(0) * row_words(SIZE)


@triton.jit
def count_of(word):
    """Extract the counter from a word that also holds the number of launches that use it."""
    return word & ((1 << _COUNT_BITS) - 1)


@triton.jit
def last_epoch(row, SIZE: tl.constexpr):
    """Return the epoch at which the previous launch ended (scalar)."""
    return count_of(tl.load(row + 4 * SIZE))


@triton.jit
def leave(row, epoch, SIZE: tl.constexpr):
    """Store the epoch for the next launch and mark the row as unused."""
    tl.store(row + 4 * SIZE, epoch)


@triton.jit
def members_of(SIZE: tl.constexpr):
    """Return the members' indices as a block; lanes beyond SIZE repeat them."""
    return lanes_for(SIZE) % SIZE


@triton.jit
def elsewhere(pointer, distance):
    """Return the same offset in a heap that is `distance` bytes away (scalar or block)."""
    return (pointer.to(tl.int64) + distance).to(pointer.dtype)


@triton.jit
def at_member(pointer, bases, me, member):
    """Translate a pointer to the heap of a member, or of a block of members."""
    return elsewhere(pointer, tl.load(bases + member) - tl.load(bases + me))


@triton.jit
def send(row, bases, me, first, second, SIZE: tl.constexpr):
    """Send two words to each member, scalars or blocks over `members_of`; visible after the next barrier."""
    lanes, members = lanes_for(SIZE), members_of(SIZE)
    place = at_member(row + SIZE + me, bases, me, members)
    nothing = members.to(tl.int64) * 0
    tl.store(place, nothing + first, mask=lanes < SIZE)
    tl.store(place + SIZE, nothing + second, mask=lanes < SIZE)


@triton.jit
def sent(row, member, SIZE: tl.constexpr):
    """Load the first word that a member sent (scalar or block)."""
    return tl.load(row + SIZE + member)


@triton.jit
def sent_second(row, member, SIZE: tl.constexpr):
    """Load the second word that a member sent (scalar or block)."""
    return tl.load(row + 2 * SIZE + member)


@triton.jit
def enter(control, bases, me, kind, SIZE: tl.constexpr):
    """Begin a call; return this program's row and the epoch of the last barrier.  The first one sends the signature."""
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE)
    if tl.program_id(0) == 0:
        number = members_of(SIZE).to(tl.int64) * 0 + kind
        place = at_member(row + 3 * SIZE + me, bases, me, members_of(SIZE))
        tl.store(place, number, mask=lanes_for(SIZE) < SIZE)
    return row, epoch


@triton.jit
def differing(ours, theirs, row, SIZE: tl.constexpr):
    """Return a member that has come to this call with another word than ours (scalar); -1 if there is none."""
    members = members_of(SIZE)
    peer = tl.max(tl.where(theirs == ours, -1, members), axis=0)
    if peer >= 0:  # its word may be of an earlier call, where the wait for it has ended without it
        has_come = poll(row + members, "acquire", "sys") > last_epoch(row, SIZE)
        peer = tl.max(tl.where((theirs != ours) & has_come, members, -1), axis=0)
    return peer


@triton.jit
def compare_kinds(row, kind, status, rank, SIZE: tl.constexpr, words=None):
    """Report if a member's `kind` (of int64[SIZE], if not in the row) differs; between the barriers of a call."""
    if tl.program_id(0) == 0:
        theirs = tl.load((row + 3 * SIZE if words is None else words) + members_of(SIZE))
        peer = differing(kind, theirs, row, SIZE)
        if peer >= 0:
            other = tl.max(tl.where(members_of(SIZE) == peer, theirs, 0), axis=0)
            report_difference(status, rank, row.to(tl.int64), peer, 0, 0, kind, other, _KIND)


@triton.jit
def report_overlap(uses, status, rank, address, me):
    """Report if `uses` launches used the counter at `address` when this one took it; see `report_difference`."""
    if uses != 0:
        nothing = tl.cast(uses, tl.int64) * 0
        report_difference(status, rank, address, me, nothing, nothing, nothing, nothing, _OVERLAP)


@triton.jit
def take(counter, me, status, rank):
    """Claim a counter of this rank until its next value is stored; report if another launch uses it."""
    word = tl.atomic_add(counter, 1 << _COUNT_BITS, sem="relaxed", scope="gpu")
    report_overlap(word >> _COUNT_BITS, status, rank, counter.to(tl.int64), me)
    return count_of(word)


@triton.jit
def claim(row, me, epoch, status, rank, SIZE: tl.constexpr):
    """Claim the row at the first barrier of a launch, until `leave`; report if another launch uses it."""
    last = tl.cast(epoch, tl.int64) - 1
    before = tl.atomic_cas(row + 4 * SIZE, last, last + (1 << _COUNT_BITS), sem="relaxed", scope="gpu")
    later = (before >> _COUNT_BITS == 1) & (count_of(before) < last)
    report_overlap(tl.where((before == last) | later, 0, 1), status, rank, row.to(tl.int64), me)


@triton.jit
def arrive(row, bases, me, epoch, SIZE: tl.constexpr):
    """Set this member's flag on all members: the first half of `barrier`."""
    lanes = lanes_for(SIZE)
    gather_stores()
    set_flags(at_member(row + me, bases, me, members_of(SIZE)), epoch, lanes < SIZE, "release", "sys")


@triton.jit
def _replace_words(row, me, lanes, seen, epoch, SIZE: tl.constexpr):
    """Replace the words of members that have not come in time, which are an earlier call's, by this rank's own.

    Those may be no places; so what follows addresses memory that there is.
    """
    late = (lanes < SIZE) & (seen < epoch)
    for i in tl.static_range(1, 3):
        own = tl.load(row + i * SIZE + me + lanes * 0, mask=late, other=0)
        tl.store(row + i * SIZE + lanes % SIZE, own, mask=late)
    tl.debug_barrier()


@triton.jit
def await_all(row, me, epoch, timeout_ns, status, rank, SIZE: tl.constexpr):
    """Wait for all members' flags: the second half of `barrier`."""
    lanes = lanes_for(SIZE)
    flags, status = row + lanes % SIZE, tl.cast(status, tl.int64)
    if is_cuda():
        seen = await_each(flags, epoch, lanes < SIZE, "reached", "acquire", "sys", timeout_ns, status, rank)
        _replace_words(row, me, lanes, seen, epoch, SIZE)
    else:
        place, _ = spin(flags, epoch, "reached", "acquire", "sys", timeout_ns, status, rank)
        if place > 0:
            _replace_words(row, me, lanes, poll(flags, "relaxed", "sys"), epoch, SIZE)


@triton.jit
def barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE: tl.constexpr):
    """Arrive at an epoch and wait until all members have arrived.

    Earlier stores by any thread of the members' programs of this number are visible to all threads afterwards.

    Args:
        row, epoch: see `row_of`; one more than at the last barrier.
        bases, me: int64[SIZE], the members' heaps; the caller's index among them.
        timeout_ns, status, rank: see `iris_triton.language.flags.await_flag`; `rank` is the caller's in the world.
    """
    arrive(row, bases, me, epoch, SIZE)
    claim(row, me, epoch, status, rank, SIZE)  # while the others' flags are on their way
    await_all(row, me, epoch, timeout_ns, status, rank, SIZE)


@triton.jit
def last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE: tl.constexpr):
    """End a call with a barrier; `epoch` is that of the previous barrier."""
    epoch += 1
    barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@triton.jit
def publish(word, value, scope: tl.constexpr):
    """Set a flag after all earlier loads and stores of this program (release)."""
    gather_stores()
    set_flag(word, value, "release", scope)


@triton.jit(do_not_specialize=("me", "rank", "timeout_ns", "status"))
def barrier_alone(control, bases, me, rank, timeout_ns, status, SIZE: tl.constexpr):
    """Run a barrier in a kernel of one program, between operations of the stream that are not kernels."""
    row = row_of(control, SIZE)
    last_barrier(row, bases, me, last_epoch(row, SIZE), timeout_ns, status, rank, SIZE)


@triton.jit(do_not_specialize=("me", "rank", "kind", "timeout_ns", "status"), do_not_specialize_on_alignment=("out",))
def enter_alone(control, bases, me, rank, kind, out, timeout_ns, status, SIZE: tl.constexpr):
    """Begin a call in a kernel of one program: a barrier, and a comparison of the members' calls.

    With an output, they differ also where it lies at different places of the heaps.  The call must not end on any
    member before this kernel has ended on all.
    """
    if out is not None:
        kind = kind | (out.to(tl.int64) - tl.load(bases + me)) << _KIND_BITS
    row, epoch = enter(control, bases, me, kind, SIZE)
    epoch += 1
    barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    compare_kinds(row, kind, status, rank, SIZE)
    leave(row, epoch, SIZE)
