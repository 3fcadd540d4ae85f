"""`two_shot`: all_reduce.  Each rank reduces its shard of all inputs, then the results are gathered.

Chosen where a table or the model says so.  Reduced in the group's order, so all members get the same bits.  Where peers
can address inputs and outputs, a rank reads its shard of the inputs and pushes the result.  Else both go through
staging regions, as in `pull`.
"""

import math

import triton
import triton.language as tl

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest
from iris_triton.collectives.parts.barrier import barrier, compare_kinds, enter, last_barrier, members_of, send
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, KernelCollective, Plan
from iris_triton.collectives.parts.elements import copy, item_nbytes, reduce_to
from iris_triton.collectives.parts.sizes import blocks_for, item_of, pieces, rounded_up


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def two_shot(
    out, inp, control, stage, bases, me, rank, kind, count, shard, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, OP: tl.constexpr, DIRECT: tl.constexpr, IN_STAGED: tl.constexpr, IN_DIMS: tl.constexpr,
    OUT_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce this rank's shard of all inputs, and make the result available to all members.

    Without DIRECT, in pieces, which the peers read from the staging region: it holds a piece of the result, followed by
    a piece of the input for each member if IN_STAGED.  Two barriers per piece: inputs are ready, results are
    ready.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        count, shard: elements of the whole, and of a shard; the last ones may be shorter, or empty.
        DIRECT: inputs and outputs are dense and on the heap, and results are pushed into all outputs.
        IN_STAGED: inputs are not.
    """
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row, epoch = enter(control, bases, me, kind, SIZE)
    own = tl.load(bases + me)
    begin = tl.cast(me, tl.int64) * shard
    if DIRECT:
        epoch += 1
        send(row, bases, me, inp.to(tl.int64) - own, out.to(tl.int64) - own, SIZE)
        barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        compare_kinds(row, kind, status, rank, SIZE)
        piece = tl.minimum(count - begin, shard)
        reduce_to(
            inp, 0, row, bases, begin * ITEM, piece, out_sizes, out_strides, 0, OP, SIZE, BLOCK, PUSH=True
        )  # fmt: skip
    else:
        capacity = tl.cast(capacity, tl.int64)
        mine = stage.to(inp.dtype, bitcast=True)
        done = capacity * 0
        while done < shard:
            if IN_STAGED:
                for i in range(SIZE):
                    first = i * tl.cast(shard, tl.int64) + done
                    piece = tl.minimum(tl.minimum(count - first, shard - done), capacity)
                    copy(mine + (i + 1) * capacity, 0, inp, first, in_sizes, in_strides, piece, 0, IN_DIMS, BLOCK)
            if done == 0:
                members = members_of(SIZE).to(tl.int64)
                if IN_STAGED:
                    send(row, bases, me, stage.to(tl.int64) - own + (members + 1) * capacity * ITEM, members, SIZE)
                else:
                    send(row, bases, me, inp.to(tl.int64) - own + members * shard * ITEM, members, SIZE)
            epoch += 1
            barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
            if done == 0:
                compare_kinds(row, kind, status, rank, SIZE)
            piece = tl.minimum(tl.minimum(count - begin, shard) - done, capacity)
            shift = done * 0 if IN_STAGED else done * ITEM
            reduce_to(mine, 0, row, bases, shift, piece, out_sizes, out_strides, 0, OP, SIZE, BLOCK)
            epoch += 1
            barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                first = member * tl.cast(shard, tl.int64) + done
                piece = tl.minimum(tl.minimum(count - first, shard - done), capacity)
                src = (tl.load(bases + member) + (stage.to(tl.int64) - own)).to(inp.dtype)
                copy(out, first, src, 0, out_sizes, out_strides, piece, OUT_DIMS, 0, BLOCK)
            done += capacity
    last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


class TwoShot(KernelCollective):
    """all_reduce in two steps."""

    deterministic = True

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: receive shards, send results; one more barrier if peers cannot address the output."""
        moved = 2 * request.nbytes * (request.group_size - 1) / request.group_size
        staged = (not request.direct_in) + (not request.direct_out)
        return self.model(request, barriers=2 + staged, moved=moved, copied=request.nbytes * staged)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        op, carrier = self.reduction(request)
        item, count = item_of(request), math.prod(request.shape)
        shard = rounded_up(-(-count // team.size), item)
        blocks = blocks_for(request, team, shard, item, reduces=True)
        direct, staged = request.direct_in and request.direct_out, not request.direct_in
        arguments = self.arguments(request, team)
        arguments |= pieces(team, shard, item, 1 + team.size * staged, halves=1, needed=not direct)
        arguments |= {"count": count, "shard": shard, "OP": op, "DIRECT": direct, "IN_STAGED": staged}
        return self.bind(two_shot, team, blocks, arguments, carrier)
