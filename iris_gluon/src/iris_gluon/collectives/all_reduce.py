"""`gluon_one_shot`, `gluon_two_shot`: all_reduce.  One step for small tensors, two for large ones.

Chosen with Config(use_gluon=True), or where a table says so.  All members get the same bits.

`one_shot`: every rank stores its input into the landing regions of all, and reduces what has landed.  `two_shot`: each
rank reduces its shard of all inputs and stores the result into all outputs.  Tensors that peers cannot address take
part through landing regions, in rounds of pieces.  Each element is reduced in the group's order.

What is read from landing regions lies in the own memory: nothing but stores goes over the links, except that `two_shot`
reads inputs that peers can address where they are.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs
# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_gluon.collectives.base import LANDING, GluonCollective
from iris_gluon.collectives.elements import copy, reduce_to
from iris_triton.collectives.parts.barrier import last_epoch, leave, meet, row_of, tell_all, told, told_second
from iris_triton.collectives.parts.elements import item_nbytes
from iris_triton.collectives.parts.portable import OF_BOOL, PER_CALL, RUNTIME, Plan
from iris_triton.collectives.parts.sizes import carrier_of, item_of, layouts_of, pieces, rounded_up

if TYPE_CHECKING:
    from iris_core.dispatch.team import Region, Team
    from iris_core.types import CollectiveRequest


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def one_shot(
    out, inp, control, landing, bases, me, rank, count, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: gl.constexpr, OP: gl.constexpr, IN_DIMS: gl.constexpr, IN_WIDE: gl.constexpr, OUT_DIMS: gl.constexpr,
    OUT_WIDE: gl.constexpr, INDEX: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Store the input into every member's landing region, and reduce what lands in the own one.

    Half of the region holds a piece from each member.  The halves take turns: who stores into one has met the others
    after they had reduced what was there.

    Args (beside those of `iris_gluon.collectives.push.push`):
        count: number of elements.
        OP: the reduction's name.
    """
    ITEM: gl.constexpr = item_nbytes(inp.dtype)
    part, parts = gl.program_id(0).to(gl.int64), gl.num_programs(0).to(gl.int64)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    own = gl.load(bases + me)
    count = gl.cast(count, gl.int64)
    capacity = gl.cast(capacity, gl.int64)
    place = landing.to(gl.int64) - own
    tell_all(row, bases, me, place, place, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)  # landing regions are free
    done = count * 0
    half = done
    while done < count:
        piece = gl.minimum(count - done, capacity)
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            there = gl.load(bases + member) + told(row, member, SIZE) + half + me * capacity * ITEM
            copy(
                there.to(inp.dtype), done * 0, in_sizes, in_strides, inp, done, in_sizes, in_strides, piece, part,
                parts, 0, True, IN_DIMS, IN_WIDE, INDEX, BLOCK
            )  # fmt: skip
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        sources = ()
        for i in gl.static_range(SIZE):
            sources = sources + (landing.to(gl.int64) + half + i * capacity * ITEM,)  # noqa: RUF005
        reduce_to(
            (out.to(gl.int64),), done, out_sizes, out_strides, sources, out, piece, part, parts, 1, OUT_DIMS, OUT_WIDE,
            OP, SIZE, INDEX, BLOCK
        )  # fmt: skip
        done += capacity
        half = SIZE * capacity * ITEM - half
    leave(row, epoch, SIZE)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot(
    out, inp, control, landing, bases, me, rank, count, shard, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: gl.constexpr, OP: gl.constexpr, IN_DIRECT: gl.constexpr, OUT_DIRECT: gl.constexpr, IN_DIMS: gl.constexpr,
    IN_WIDE: gl.constexpr, OUT_DIMS: gl.constexpr, OUT_WIDE: gl.constexpr, INDEX: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Reduce the own shard of all inputs, and store the result into all outputs.

    The landing region has a piece of the own shard from each member, if inputs are not direct; behind them, if outputs
    are not direct, a piece of the result from each member.  Where inputs land, too, a round has two meetings, so all
    know that results have been fetched before the next ones come; else two halves for results take turns.

    Args (beside those of `one_shot`):
        shard: elements of a shard; the last ones may be shorter, or empty.
        capacity: elements of a piece; a shard's, if everything is direct.
        IN_DIRECT, OUT_DIRECT: whether peers can address the input, and the output; the same on all members.
    """
    ITEM: gl.constexpr = item_nbytes(inp.dtype)
    RESULTS: gl.constexpr = 0 if IN_DIRECT else SIZE  # pieces before the results
    part, parts = gl.program_id(0).to(gl.int64), gl.num_programs(0).to(gl.int64)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    own = gl.load(bases + me)
    count = gl.cast(count, gl.int64)
    shard = gl.cast(shard, gl.int64)
    capacity = gl.cast(capacity, gl.int64)
    first = landing.to(gl.int64) - own
    second = first + RESULTS * capacity * ITEM
    if IN_DIRECT:
        first = inp.to(gl.int64) - own
    if OUT_DIRECT:
        second = out.to(gl.int64) - own
    tell_all(row, bases, me, first, second, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)  # inputs are ready, outputs and landing regions free
    begin = me * shard
    done = count * 0
    half = done
    while done < shard:
        if not IN_DIRECT:
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                at = member * shard + done
                piece = gl.minimum(gl.minimum(count - at, shard - done), capacity)
                there = gl.load(bases + member) + told(row, member, SIZE) + me * capacity * ITEM
                copy(
                    there.to(inp.dtype), done * 0, in_sizes, in_strides, inp, at, in_sizes, in_strides, piece, part,
                    parts, 0, True, IN_DIMS, IN_WIDE, INDEX, BLOCK
                )  # fmt: skip
            epoch += 1
            meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        sources = ()
        targets = ()
        for i in gl.static_range(SIZE):
            if IN_DIRECT:
                src = gl.load(bases + i) + told(row, i, SIZE) + (begin + done) * ITEM
            else:
                src = landing.to(gl.int64) + i * capacity * ITEM
            member = (me + 1 + i) % SIZE
            to = gl.load(bases + member) + told_second(row, member, SIZE)
            if OUT_DIRECT:
                to += (begin + done) * ITEM
            else:
                to += half + me * capacity * ITEM
            sources = sources + (src,)  # noqa: RUF005
            targets = targets + (to,)  # noqa: RUF005
        piece = gl.minimum(gl.minimum(count - begin, shard) - done, capacity)
        reduce_to(
            targets,
            done * 0,
            out_sizes,
            out_strides,
            sources,
            inp,
            piece,
            part,
            parts,
            SIZE,
            0,
            True,
            OP,
            SIZE,
            INDEX,
            BLOCK,
        )
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if not OUT_DIRECT:
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                at = member * shard + done
                piece = gl.minimum(gl.minimum(count - at, shard - done), capacity)
                here = landing.to(gl.int64) + half + (RESULTS + member) * capacity * ITEM
                copy(
                    out, at, out_sizes, out_strides, here.to(out.dtype), done * 0, out_sizes, out_strides, piece, part,
                    parts, OUT_DIMS, OUT_WIDE, 0, True, INDEX, BLOCK
                )  # fmt: skip
        done += capacity
        if IN_DIRECT:
            half = SIZE * capacity * ITEM - half
    leave(row, epoch, SIZE)


# -- reducing ---------------------------------------------------------------------------------------------------------
class _Reduction(GluonCollective):
    """all_reduce in one of two forms."""

    def _bind(
        self,
        request: CollectiveRequest,
        team: Team,
        kernel: Any,
        landing: Region,
        capacity: int,
        handled: int,
        **more: Any,
    ) -> Plan:
        """Bind a kernel, of which a rank handles so many elements at least."""
        op = request.options["reduction"]
        carrier = carrier_of("uint8") if request.dtype == "bool" else None
        if carrier is not None:
            op = OF_BOOL[op]
        item = item_of(request)
        blocks = self._blocks(request, team, handled, item, reduces=True)
        arguments = self._arguments(team, landing, capacity, *layouts_of(request), item)
        arguments |= {"OP": op, "count": math.prod(request.shape), **more}
        return self.bind(kernel, team, blocks, arguments, carrier)


class OneShot(_Reduction):
    """all_reduce in one step: everything to everybody."""

    variants = ("one_shot",)

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings; every input goes over the links to everybody, and is read where it lands."""
        moved = request.nbytes * (request.group_size - 1)
        return self.model(request, meetings=2, moved=moved, copied=request.nbytes * request.group_size)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel."""
        count, item = math.prod(request.shape), item_of(request)
        landing, capacity = pieces(team, count, item, team.size, name=LANDING)
        return self._bind(request, team, one_shot, landing, capacity, count)


class TwoShot(_Reduction):
    """all_reduce in two steps: each rank reduces its shard of all inputs, and stores it into all outputs."""

    variants = ("two_shot",)

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: shards come, and results go; what lands is met for and copied."""
        lands = (not request.direct_in) + (not request.direct_out)
        moved = 2 * request.nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, meetings=2 + (not request.direct_in), moved=moved, copied=request.nbytes * lands)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel."""
        count, item = math.prod(request.shape), item_of(request)
        shard = rounded_up(-(-count // team.size), item)
        direct_in, direct_out = request.direct_in, request.direct_out
        landing, capacity = team.control, shard
        if not (direct_in and direct_out):
            number = team.size * ((not direct_in) + (not direct_out))
            landing, capacity = pieces(team, shard, item, number, halves=2 if direct_in else 1, name=LANDING)
        return self._bind(
            request, team, two_shot, landing, capacity, shard, shard=shard, IN_DIRECT=direct_in, OUT_DIRECT=direct_out
        )
