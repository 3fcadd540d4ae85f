"""`gluon_push`: all_gather and all_to_all.  Every rank stores its parts into its peers' memory.

Chosen with Config(use_gluon=True), or where a table says so.  A table says which elements go where, as for `pull`.  An
output that peers can address is stored into: barrier, store, barrier.  Parts for another one land in its landing
region, in rounds of pieces, whose two halves take turns.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.dispatch.team import Team, lasting
from iris_core.types import CollectiveRequest
from iris_gluon.collectives.base import LANDING, GluonCollective
from iris_gluon.collectives.elements import copy
from iris_triton.collectives.parts import barrier as sync
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, Plan, barrier_arguments
from iris_triton.collectives.parts.elements import as_words, item_nbytes
from iris_triton.collectives.parts.sizes import carrier_of, layout_arguments, pieces
from iris_triton.collectives.pull import begins, received_nbytes, splits_table

_ROUNDS_AT = gl.constexpr(43)  # a rank says how many elements it expects and, from this bit on, in how many rounds
_COUNT_MASK = gl.constexpr((1 << 43) - 1)


@gluon.jit
def _my_part(count, me, member, SIZE: gl.constexpr, BLOCK: gl.constexpr):
    """Return this program's number among those that share the transfer between two members; equal on both.

    The part for each member begins at another program, so that programs share the work if parts are small.  It is the
    same in all rounds: only the same program knows when a slot of a landing region is free again.  `count` (int64) are
    the elements of the first round.
    """
    programs = gl.num_programs(0).to(gl.int64)
    blocks = (count + BLOCK - 1) // BLOCK
    return (gl.program_id(0) + programs - blocks * ((me + member) % SIZE) % programs) % programs


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push(
    out, inp, control, stage, table, bases, me, rank, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: gl.constexpr, DIRECT: gl.constexpr, IN_DIMS: gl.constexpr, OUT_DIMS: gl.constexpr, BLOCK: gl.constexpr
):  # fmt: skip
    """Store the parts in the table into the members' memory.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        stage: the team's landing region; half of it holds a piece from each member.
        DIRECT: whether peers can address the output; if it is not dense, all members' outputs have the same strides.
    """
    inp = as_words(inp)
    out = as_words(out)
    ITEM: gl.constexpr = item_nbytes(inp.dtype)
    PEER_DIMS: gl.constexpr = OUT_DIMS if DIRECT else 0
    members = sync.members_of(SIZE)
    programs = gl.num_programs(0).to(gl.int64)
    row = sync.row_of(control, SIZE)
    epoch = sync.last_epoch(row, SIZE) + 1
    own = gl.load(bases + me)
    capacity = gl.cast(capacity, gl.int64)
    half_nbytes = SIZE * capacity * ITEM
    begins = gl.load(table + 2 * SIZE + members)
    wants = gl.load(table + 3 * SIZE + members)
    if DIRECT:
        places = out.to(gl.int64) - own + begins * 0
        if OUT_DIMS == 0:
            places += begins * ITEM
    else:
        places = stage.to(gl.int64) - own + members * capacity * ITEM
        own_rounds = (gl.max(wants, axis=0) + capacity - 1) // capacity
        wants = wants | (own_rounds << _ROUNDS_AT)
    sync.send(row, bases, me, places, wants, SIZE)
    sync.barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    rounds = gl.maximum(gl.max(sync.sent_second(row, members, SIZE) >> _ROUNDS_AT, axis=0), 1)
    turn = capacity * 0
    while turn < rounds:
        half = turn % 2 * half_nbytes
        done = turn * capacity
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            begin = gl.load(table + member)
            there = gl.load(bases + member) + sync.sent(row, member, SIZE)
            wanted = sync.sent_second(row, member, SIZE)
            piece = gl.minimum(gl.load(table + SIZE + member), wanted & _COUNT_MASK)  # never more than has room
            part = _my_part(gl.minimum(piece, capacity), me, member, SIZE, BLOCK)
            to = begin * 0
            if (wanted >> _ROUNDS_AT) > 0:
                there += half
                begin += done
                piece = gl.minimum(piece - done, capacity)
            elif turn > 0:
                piece = piece * 0
            if PEER_DIMS > 0:
                to += me * piece  # parts of a strided output are equally large
            elif IN_DIMS == 0 and DIRECT:  # noqa: SIM102 - decided at compile time
                if there == inp.to(gl.int64) + begin * ITEM:  # in place
                    piece = piece * 0
            copy(
                there.to(out.dtype), to, out_sizes, out_strides, inp, begin, in_sizes, in_strides, piece,
                part, programs, PEER_DIMS, IN_DIMS, BLOCK
            )  # fmt: skip
        epoch += 1
        sync.barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if not DIRECT:
            for i in range(SIZE):
                member = (me + 1 + i) % SIZE
                begin = gl.load(table + 2 * SIZE + member)
                piece = gl.load(table + 3 * SIZE + member)
                part = _my_part(gl.minimum(piece, capacity), me, member, SIZE, BLOCK)
                piece = gl.minimum(piece - done, capacity)
                here = (stage.to(gl.int64) + half + member * capacity * ITEM).to(out.dtype)
                copy(
                    out, begin + done, out_sizes, out_strides, here, begin * 0, out_sizes, out_strides, piece,
                    part, programs, OUT_DIMS, 0, BLOCK
                )  # fmt: skip
        turn += 1
    sync.leave(row, epoch, SIZE)


class Push(GluonCollective):
    """all_gather or all_to_all by stores into the others' memory."""

    uneven = True
    variants = ("persistent",)

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two barriers, what goes over the links, and copying what has landed."""
        out_nbytes = request.nbytes * (request.group_size if self.op == "all_gather" else 1)
        lands = request.options.get("uneven", False) or not request.direct_out  # facts of a single rank must not count
        return self.model(request, barriers=2, moved=received_nbytes(request), copied=out_nbytes * lands)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        carrier = carrier_of(request.dtype)
        item = carrier.dtype.itemsize
        table, part = _table(request, carrier.parts)
        lands = request.options["uneven"] or not request.direct_out  # of uneven calls, all members' if one's does
        blocks = self._blocks(request, team, None if part is None else part * team.size, item, reduces=False)
        words = lasting(lambda: torch.tensor(table, dtype=torch.int64, device=team.device))
        arguments = barrier_arguments(team) | layout_arguments(request, carrier)
        if lands:
            arguments |= pieces(team, part, item, team.size, name=LANDING)
        else:
            arguments |= {"stage": team.control.tensor, "capacity": 1}
        arguments |= {"table": words, "DIRECT": request.direct_out}
        return self.bind(push, team, blocks, arguments, carrier, words)


def _table(request: CollectiveRequest, parts: int) -> tuple[list[int], int | None]:
    """Return the table of the kernel, and the number of elements for a member, if all know it."""
    if request.options["uneven"]:
        return splits_table(request, parts), None
    size, total = request.group_size, math.prod(request.shape) * parts
    part = total if request.op == "all_gather" else total // size
    each = [part] * size
    return [*([0] * size if request.op == "all_gather" else begins(each)), *each, *begins(each), *each], part
