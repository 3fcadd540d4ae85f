"""`atomic`, `spinlock`: all_reduce.  Every element has an owner, and all members add theirs to its sum there.

Chosen by name, or where the model says so.

The owner of a shard stores its own elements into its accumulators; the others add theirs, by atomics, or while they
hold a lock; the owner finishes the sums, and everybody gets them.  Between these steps all meet.  The message goes in
pieces, so the accumulators do not grow with it.  They are wider than the elements where that is necessary: float32 for
16-bit floats, int32 for integers for which there are no atomics.

Each sum is formed once, and goes to all: so all members get the same bits.  But the members' contributions arrive in
any order, so the last bits of sums and products of floats may differ from one run to the next.

The lock is a ticket lock (Mellor-Crummey and Scott, "Algorithms for scalable synchronization on shared-memory
multiprocessors", ACM Trans. Comput. Syst. 9 (1991)): who draws a number waits until that is served.  One lock for each
program lies at each owner, for programs of the same number add to the same elements; whoever holds it adds all that its
program has for this owner.  Words of a lock: the number that is drawn next, the number that is served.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from iris_core.types import Availability
from iris_triton.collectives.parts.barrier import (
    compare_kinds,
    elsewhere,
    enter,
    meet,
    meet_and_leave,
    publish,
    tell_all,
    told,
)
from iris_triton.collectives.parts.elements import combine, copy, finished, load_block, store_block, widened
from iris_triton.collectives.parts.portable import PER_CALL, RUNTIME, Plan, Reduction
from iris_triton.collectives.parts.sizes import (
    VECTOR_NBYTES,
    blocks_for,
    item_of,
    layout_arguments,
    layouts_of,
    rounded_up,
    wide_of,
)
from iris_triton.language.flags import await_flag

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

LOCK_WORDS = 2
"""Words of a lock."""


@triton.jit
def _add_atomically(pointers, value, mask, OP: tl.constexpr):
    """Add a block to accumulators, each element by itself."""
    if OP == "sum" or OP == "avg":
        tl.atomic_add(pointers, value, mask=mask, sem="relaxed", scope="sys")
    elif OP == "min":
        tl.atomic_min(pointers, value, mask=mask, sem="relaxed", scope="sys")
    elif OP == "max":
        tl.atomic_max(pointers, value, mask=mask, sem="relaxed", scope="sys")
    elif OP == "band":
        tl.atomic_and(pointers, value, mask=mask, sem="relaxed", scope="sys")
    elif OP == "bor":
        tl.atomic_or(pointers, value, mask=mask, sem="relaxed", scope="sys")
    else:
        tl.static_assert(OP == "bxor", "there is no atomic for this reduction")
        tl.atomic_xor(pointers, value, mask=mask, sem="relaxed", scope="sys")


@triton.jit
def draw(lock, timeout_ns, status, rank):
    """Wait for a ticket lock; returns the ticket.

    Any member draws, and only the holder of a ticket sets the number that is served next: none can serve another's.
    """
    ticket = tl.atomic_add(lock, 1, sem="relaxed", scope="sys")
    await_flag(lock + 1, ticket, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    return ticket


@triton.jit
def _add(
    there, inp, first, piece, sizes, strides,
    LOCKED: tl.constexpr, OP: tl.constexpr, DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Add this program's blocks of `piece` elements of the input, from `first` on, to the accumulators `there`."""
    lanes = tl.arange(0, BLOCK)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for at in range(tl.program_id(0).to(tl.int64) * BLOCK, piece, step):
        left = piece - at
        value = load_block(inp, first + at, left, sizes, strides, DIMS, BLOCK).to(there.dtype.element_ty)
        if LOCKED:
            value = combine(load_block(there, at, left, sizes, strides, 0, BLOCK), value, OP)
            store_block(there, at, left, sizes, strides, value, 0, BLOCK)
        else:
            _add_atomically(there + at + lanes, value, lanes < left, OP)


@triton.jit
def _finish(sums, begin, left, like, OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A block of results: integers wrap around in their own type, floats are rounded once, at the end."""
    element: tl.constexpr = like.dtype.element_ty
    value = load_block(sums, begin, left, (1,), (1,), 0, BLOCK)
    if element.is_floating():
        return finished(widened(value), OP, SIZE).to(element)
    else:
        return finished(value.to(element), OP, SIZE)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def accumulate(
    out, inp, control, sums, results, locks, bases, me, rank, kind, count, shard, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, OP: tl.constexpr, LOCKED: tl.constexpr, STAGED: tl.constexpr, IN_DIMS: tl.constexpr,
    OUT_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce the inputs of all members.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        out, inp: the tensors; the output is dense and on the heap unless STAGED.
        sums: this rank's accumulators, `capacity` of them.
        results: if STAGED, memory of the team for as many elements, from which the others take them.
        locks: if LOCKED, LOCK_WORDS words for each program (int64).
        count: elements of the whole.
        shard: elements of a shard; the last ones may be shorter, or empty.
        capacity: elements of a piece.
        OP: the reduction's name.
        LOCKED: whether to add under a lock; else by atomics.
        STAGED: whether each member takes the results; else they are stored into its output.
    """
    row, epoch = enter(control, bases, me, kind, SIZE)
    own = tl.load(bases + me)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    start = tl.program_id(0).to(tl.int64) * BLOCK
    count = tl.cast(count, tl.int64)
    shard = tl.cast(shard, tl.int64)
    capacity = tl.cast(capacity, tl.int64)
    mine = results.to(inp.dtype, bitcast=True)
    lock = locks + tl.program_id(0) * 2
    done = capacity * 0
    if not STAGED:
        tell_all(row, bases, me, out.to(tl.int64) - own, 0, SIZE)
    while done < shard:
        first = me * shard + done
        piece = tl.minimum(tl.minimum(count - first, shard - done), capacity)
        for at in range(start, piece, step):
            value = load_block(inp, first + at, piece - at, in_sizes, in_strides, IN_DIMS, BLOCK)
            store_block(sums, at, piece - at, (1,), (1,), value.to(sums.dtype.element_ty), 0, BLOCK)
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if done == 0:
            compare_kinds(row, kind, status, rank, SIZE)
        for i in range(1, SIZE):
            member = (me + i) % SIZE
            distance = tl.load(bases + member) - own
            theirs = member * shard + done
            number = tl.minimum(tl.minimum(count - theirs, shard - done), capacity)
            there = elsewhere(sums, distance)
            if LOCKED:
                if start < number:
                    drawn = elsewhere(lock, distance)
                    ticket = draw(drawn, timeout_ns, status, rank)
                    _add(there, inp, theirs, number, in_sizes, in_strides, True, OP, IN_DIMS, BLOCK)
                    publish(drawn + 1, ticket + 1, "sys")
            else:
                _add(there, inp, theirs, number, in_sizes, in_strides, False, OP, IN_DIMS, BLOCK)
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        for at in range(start, piece, step):
            result = _finish(sums, at, piece - at, inp, OP, SIZE, BLOCK)
            if STAGED:
                store_block(mine, at, piece - at, (1,), (1,), result, 0, BLOCK)
            else:
                for i in range(SIZE):
                    member = (me + 1 + i) % SIZE
                    there = (tl.load(bases + member) + told(row, member, SIZE)).to(inp.dtype)
                    store_block(there, first + at, piece - at, (1,), (1,), result, 0, BLOCK)
        if not STAGED:
            tl.debug_barrier()  # another thread may still read the sum that this one overwrites in the next round
        else:
            epoch += 1
            meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                theirs = member * shard + done
                number = tl.minimum(tl.minimum(count - theirs, shard - done), capacity)
                src = elsewhere(mine, tl.load(bases + member) - own)
                copy(out, theirs, out_sizes, out_strides, src, 0, out_sizes, out_strides, number, OUT_DIMS, 0, BLOCK)
        done += capacity
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class _Accumulate(Reduction):
    """all_reduce in accumulators at the elements' owners; see the beginning of this file."""

    locked: bool
    slowness: float
    """Bytes over the links for each byte that is added, a way that is only guessed."""

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: contributions, results, and the meetings; a lock is drawn and given back for each peer."""
        once = request.nbytes * (request.group_size - 1) / request.group_size
        wide = self.accumulators(request).itemsize / item_of(request)
        meetings = 3 + (not request.direct_out) + 2 * (request.group_size - 1) * self.locked
        copied = request.nbytes * (wide / request.group_size + (not request.direct_out))
        return self.model(request, meetings=meetings, moved=once * (self.slowness * wide + 1), copied=copied)

    @staticmethod
    def accumulators(request: CollectiveRequest) -> torch.dtype:
        """Return the type of the accumulators."""
        return wide_of(request)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel.  Collective: every member calls it."""
        op, carrier = self.reduction(request)
        item, wide = item_of(request), self.accumulators(request)
        staged = not request.direct_out
        count = math.prod(request.shape)
        shard = rounded_up(-(-count // team.size), 1)  # in vectors of the narrowest elements: all parts are aligned
        each = wide.itemsize + item * staged
        region = team.workspace("accumulators", shard * each, VECTOR_NBYTES * each)
        capacity = min(shard, region.nbytes // each // VECTOR_NBYTES * VECTOR_NBYTES)
        locks = team.control
        if self.locked:
            locks = team.region("locks", LOCK_WORDS * 8 * team.max_programs)
        blocks = blocks_for(request, team, shard, item, reduces=True)
        arguments = self.arguments(request, team) | layout_arguments(*layouts_of(request))
        arguments |= {
            "OP": op,
            "sums": region.tensor[: capacity * wide.itemsize].view(wide),
            "results": region.tensor[capacity * wide.itemsize :] if staged else region.tensor,
            "locks": locks.tensor.view(torch.int64),
            "count": count,
            "shard": shard,
            "capacity": capacity,
            "LOCKED": self.locked,
            "STAGED": staged,
        }
        return self.bind(accumulate, team, blocks, arguments, carrier)


class Atomic(_Accumulate):
    """all_reduce by atomics in the owners' memory.

    The order in which the members' elements are added may differ from run to run, and so may the last bits of floats;
    within a run they are the same on all members.
    """

    locked = False
    slowness = 2.0

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        reduction = request.options.get("reduction")
        if answer and reduction == "product" and request.dtype != "bool":
            return Availability.no("there are no atomic products")
        if answer and reduction in ("min", "max") and "float" in request.dtype:
            return Availability.no("atomic minima and maxima of floats would lose NaNs")
        return answer

    @staticmethod
    def accumulators(request: CollectiveRequest) -> torch.dtype:
        """Return the type of the accumulators: atomics have at least 32 bits."""
        return torch.int32 if item_of(request) < 4 and "float" not in request.dtype else wide_of(request)


class Spinlock(_Accumulate):
    """all_reduce by adding to sums in the owners' memory, one member at a time; as `Atomic`, for every reduction.

    The order in which the members' elements are added may differ from run to run, and so may the last bits of floats;
    within a run they are the same on all members.
    """

    locked = True
    slowness = 3.0
