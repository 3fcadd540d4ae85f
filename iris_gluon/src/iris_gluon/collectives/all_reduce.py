"""`gluon_two_shot`: all_reduce.  Each rank reduces its shard of all inputs, and stores the result into all outputs.

Chosen with Config(use_gluon=True), or where a table says so.  Reduced in the group's order: all members get the same
bits.  Tensors that peers cannot address take part through landing regions, in rounds of pieces.
"""
# mypy: disable-error-code="assignment"

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest
from iris_gluon.collectives.base import LANDING, GluonCollective
from iris_gluon.collectives.elements import copy, reduce_to
from iris_triton.collectives.parts.barrier import barrier, last_epoch, leave, row_of, send, sent, sent_second
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, Plan, barrier_arguments
from iris_triton.collectives.parts.elements import item_nbytes
from iris_triton.collectives.parts.sizes import item_of, layout_arguments, pieces, rounded_up


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot(
    out, inp, control, stage, bases, me, rank, count, shard, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: gl.constexpr, OP: gl.constexpr, IN_DIRECT: gl.constexpr, OUT_DIRECT: gl.constexpr, IN_DIMS: gl.constexpr,
    OUT_DIMS: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Reduce this rank's shard of all inputs, and store the result into all outputs.

    The landing region holds a piece of this rank's shard from each member, if inputs are not direct, followed by a
    piece of the result from each member, if outputs are not direct.  If inputs land there, a round has two barriers, so
    that results are fetched before the next ones arrive; otherwise results are double-buffered.

    Args (beside those of `iris_gluon.collectives.push.push`):
        count, shard: elements of the whole, and of a shard; the last ones may be shorter, or empty.
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
    first = stage.to(gl.int64) - own
    second = first + RESULTS * capacity * ITEM
    if IN_DIRECT:
        first = inp.to(gl.int64) - own
    if OUT_DIRECT:
        second = out.to(gl.int64) - own
    send(row, bases, me, first, second, SIZE)
    barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)  # inputs are ready, outputs and landing regions free
    begin = me * shard
    done = count * 0
    half = done
    while done < shard:
        if not IN_DIRECT:
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                at = member * shard + done
                piece = gl.minimum(gl.minimum(count - at, shard - done), capacity)
                there = gl.load(bases + member) + sent(row, member, SIZE) + me * capacity * ITEM
                copy(
                    there.to(inp.dtype), done * 0, in_sizes, in_strides, inp, at, in_sizes, in_strides, piece, part,
                    parts, 0, IN_DIMS, BLOCK
                )  # fmt: skip
            epoch += 1
            barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        sources = ()
        targets = ()
        for i in gl.static_range(SIZE):
            if IN_DIRECT:
                src = gl.load(bases + i) + sent(row, i, SIZE) + (begin + done) * ITEM
            else:
                src = stage.to(gl.int64) + i * capacity * ITEM
            member = (me + 1 + i) % SIZE
            to = gl.load(bases + member) + sent_second(row, member, SIZE)
            to += (begin + done) * ITEM if OUT_DIRECT else half + me * capacity * ITEM
            sources = sources + (src,)  # noqa: RUF005
            targets = targets + (to,)  # noqa: RUF005
        piece = gl.minimum(gl.minimum(count - begin, shard) - done, capacity)
        reduce_to(targets, sources, inp, piece, part, parts, OP, SIZE, BLOCK)
        epoch += 1
        barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if not OUT_DIRECT:
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                at = member * shard + done
                piece = gl.minimum(gl.minimum(count - at, shard - done), capacity)
                here = stage.to(gl.int64) + half + (RESULTS + member) * capacity * ITEM
                copy(
                    out, at, out_sizes, out_strides, here.to(out.dtype), done * 0, out_sizes, out_strides, piece, part,
                    parts, OUT_DIMS, 0, BLOCK
                )  # fmt: skip
        done += capacity
        if IN_DIRECT:
            half = SIZE * capacity * ITEM - half
    leave(row, epoch, SIZE)


class TwoShot(GluonCollective):
    """all_reduce in two steps."""

    deterministic = True
    variants = ("two_shot",)

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: shards come, and results go; what lands takes a barrier more and is copied."""
        lands = (not request.direct_in) + (not request.direct_out)
        moved = 2 * request.nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, barriers=2 + (not request.direct_in), moved=moved, copied=request.nbytes * lands)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        op, carrier = self.reduction(request)
        count, item = math.prod(request.shape), item_of(request)
        shard = rounded_up(-(-count // team.size), item)
        direct_in, direct_out = request.direct_in, request.direct_out
        number, halves = team.size * ((not direct_in) + (not direct_out)), 2 if direct_in else 1
        blocks = self._blocks(request, team, shard, item, reduces=True)
        arguments = barrier_arguments(team) | layout_arguments(request)
        arguments |= pieces(team, shard, item, number, halves=halves, name=LANDING, needed=number > 0)
        arguments |= {"OP": op, "count": count, "shard": shard, "IN_DIRECT": direct_in, "OUT_DIRECT": direct_out}
        return self.bind(two_shot, team, blocks, arguments, carrier)
