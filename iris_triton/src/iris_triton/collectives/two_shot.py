"""`two_shot`: all_reduce.  Each rank reduces its shard of all inputs, and the results go to all.

Chosen where a table or the model says so.  Reduced in the group's order, so all members get the same bits.  Where peers
can address inputs and outputs, a rank reads its shard of the inputs and pushes the result.  Else both go through
staging regions, as in `pull`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import triton
import triton.language as tl

from iris_triton.collectives.parts.barrier import (
    compare_kinds,
    enter,
    meet,
    meet_and_leave,
    members_of,
    tell,
    tell_all,
    told,
    told_second,
)
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, KernelCollective, Plan
from iris_triton.collectives.parts.elements import are_aligned, copy, item_nbytes, reduce_to, reduced
from iris_triton.collectives.parts.sizes import blocks_for, item_of, layout_arguments, layouts_of, pieces, rounded_up

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest


@triton.jit
def _reduce_and_push(row, bases, begin, count, like, OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Reduce `count` elements from `begin` on, and store them into every member's output (its second word)."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    members = members_of(SIZE)
    shift = begin * item_nbytes(like.dtype)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    heaps = tl.load(bases + members) + shift
    if are_aligned(heaps + told(row, members, SIZE) | heaps + told_second(row, members, SIZE)):
        while at + BLOCK <= count:
            total = reduced(row, bases, shift, like, at + lanes, None, True, OP, SIZE)
            for i in tl.static_range(SIZE):
                to = (tl.load(bases + i) + told_second(row, i, SIZE) + shift).to(like.dtype)
                tl.store(tl.multiple_of(to, 16) + at + lanes, total)
            at += step
    while at < count:
        mask = at + lanes < count
        total = reduced(row, bases, shift, like, at + lanes, mask, False, OP, SIZE)
        for i in tl.static_range(SIZE):
            to = (tl.load(bases + i) + told_second(row, i, SIZE) + shift).to(like.dtype)
            tl.store(to + at + lanes, total, mask=mask)
        at += step


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot_direct(
    out, inp, control, bases, me, rank, kind, count, shard, timeout_ns, status,
    SIZE: tl.constexpr, OP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce the own shard of all inputs, and push the result into all outputs; both are dense and on the heap.

    Args (beside those of `pull_reduce`):
        count: elements of the whole.
        shard: elements of a shard; the last ones may be shorter, or empty.
    """
    row, epoch = enter(control, bases, me, kind, SIZE)
    epoch += 1
    own = tl.load(bases + me)
    tell_all(row, bases, me, inp.to(tl.int64) - own, out.to(tl.int64) - own, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    compare_kinds(row, kind, status, rank, SIZE)
    begin = tl.cast(me, tl.int64) * shard
    _reduce_and_push(row, bases, begin, tl.minimum(count - begin, shard), inp, OP, SIZE, BLOCK)
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot_staged(
    out, inp, control, stage, bases, me, rank, kind, count, shard, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, OP: tl.constexpr, IN_STAGED: tl.constexpr, IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce the own shard in pieces, which the others read from the staging region.

    The region holds a piece of the result, and behind it a piece of the input for each member, if IN_STAGED.  Two
    meetings per piece: the inputs are there, the results are there.

    Args (beside those of `two_shot_direct`):
        capacity: elements of a piece.
    """
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row, epoch = enter(control, bases, me, kind, SIZE)
    own = tl.load(bases + me)
    capacity = tl.cast(capacity, tl.int64)
    begin = tl.cast(me, tl.int64) * shard
    mine = stage.to(inp.dtype, bitcast=True)
    done = capacity * 0
    while done < shard:
        if IN_STAGED:
            for i in range(SIZE):
                first = i * tl.cast(shard, tl.int64) + done
                piece = tl.minimum(tl.minimum(count - first, shard - done), capacity)
                copy(
                    mine + (i + 1) * capacity, 0, in_sizes, in_strides, inp, first, in_sizes, in_strides, piece,
                    0, IN_DIMS, BLOCK
                )  # fmt: skip
        if done == 0:
            members = members_of(SIZE).to(tl.int64)
            if IN_STAGED:
                tell(row, bases, me, stage.to(tl.int64) - own + (members + 1) * capacity * ITEM, members, SIZE)
            else:
                tell(row, bases, me, inp.to(tl.int64) - own + members * shard * ITEM, members, SIZE)
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if done == 0:
            compare_kinds(row, kind, status, rank, SIZE)
        piece = tl.minimum(tl.minimum(count - begin, shard) - done, capacity)
        if IN_STAGED:
            shift = done * 0
        else:
            shift = done * ITEM
        reduce_to(mine, 0, row, bases, shift, piece, out_sizes, out_strides, 0, OP, SIZE, BLOCK)
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            first = member * tl.cast(shard, tl.int64) + done
            piece = tl.minimum(tl.minimum(count - first, shard - done), capacity)
            src = (tl.load(bases + member) + (stage.to(tl.int64) - own)).to(inp.dtype)
            copy(out, first, out_sizes, out_strides, src, 0, out_sizes, out_strides, piece, OUT_DIMS, 0, BLOCK)
        done += capacity
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class TwoShot(KernelCollective):
    """all_reduce in two steps."""

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: shards come, and results go; without an output that peers can address, one meeting more."""
        moved = 2 * request.nbytes * (request.group_size - 1) / request.group_size
        staged = (not request.direct_in) + (not request.direct_out)
        return self.model(request, meetings=2 + staged, moved=moved, copied=request.nbytes * staged)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind one of the two kernels."""
        op, carrier = self.reduction(request)
        item = item_of(request)
        count = math.prod(request.shape)
        shard = rounded_up(-(-count // team.size), item)
        blocks = blocks_for(request, team, shard, item, reduces=True)
        arguments = self.arguments(request, team) | {"count": count, "shard": shard, "OP": op}
        kernel = two_shot_direct
        if not (request.direct_in and request.direct_out):
            kernel = two_shot_staged
            region, capacity = pieces(team, shard, item, 1 + team.size * (not request.direct_in), halves=1)
            arguments |= {"stage": region.tensor, "capacity": capacity, "IN_STAGED": not request.direct_in}
            arguments |= layout_arguments(*layouts_of(request))
            if request.direct_in:
                arguments["IN_DIMS"] = 0
        return self.bind(kernel, team, blocks, arguments, carrier)
