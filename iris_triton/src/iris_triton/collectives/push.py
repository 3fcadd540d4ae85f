"""`push`, `persistent`, `partitioned`: all_gather and all_to_all; `push`: reduce_scatter.  Stores into peers' memory.

Chosen for large messages where a table or the model says so.

`push_direct` serves outputs that are dense and on the heap: all say where theirs lie and that they are free, push, and
meet again.  `push_staged` serves other outputs: in rounds, each rank pushes a piece for every member into a half of
that one's staging region, all meet, and each one takes out what came.  `push_reduce` serves reduce_scatter in the same
way; what came is reduced there, in the group's order.  No input has to be addressed by anybody else.

A form says in which order a rank's programs serve the members:

    "members"   all programs push to one member, then to the next; at every moment the traffic is a permutation
    "tiles"     each program takes a tile to all members in turn, then its next tile; what all get is read once
    "divided"   the programs are divided among the members, and all members are served at the same time

The second and the third are the reference system's variants "persistent" and "partitioned".  In every form the blocks
that a program takes out, or reduces, are those that came from programs of its number: so it has to meet only those.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from iris_core.errors import UnsupportedError
from iris_core.types import Availability, DeviceType
from iris_triton.collectives.parts.barrier import (
    compare_kinds,
    last_epoch,
    leave,
    meet,
    members_of,
    row_of,
    tell,
    tell_kind,
    told,
)
from iris_triton.collectives.parts.elements import are_aligned, as_words, copy, copy_part, item_nbytes, strided
from iris_triton.collectives.parts.portable import Plan, Portable
from iris_triton.collectives.parts.reducing import Reduction, reduce_slots
from iris_triton.collectives.parts.sizes import MOST_PROGRAMS, Blocks, blocks_for, carrier_of, layout_of, pieces
from iris_triton.collectives.pull import PER_CALL, RUNTIME
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

_RUNTIME = (*RUNTIME, "count")


@triton.jit
def _in_heap(row, bases, member, place, TOLD: tl.constexpr, SIZE: tl.constexpr):
    """Address of a byte in members' heaps (scalar or block): `place`, if TOLD counted from where they have told."""
    there = tl.load(bases + member) + place
    if TOLD:
        there += told(row, member, SIZE)
    return there


@triton.jit
def _push_tiles(
    row, bases, place, inp, begin, apart, count, me, in_sizes, in_strides,
    TOLD: tl.constexpr, SHARDED: tl.constexpr, SIZE: tl.constexpr, IN_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Push tile after tile to all members; see `_push`."""
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK
    if not SHARDED:
        apart = apart * 0
    if IN_DIMS == 0:
        members = members_of(SIZE).to(tl.int64)
        origins = inp.to(tl.int64) + (begin + members * apart) * item_nbytes(inp.dtype)
        if are_aligned(origins | _in_heap(row, bases, members, place, TOLD, SIZE)):
            while at + BLOCK <= count:
                origin = tl.multiple_of((inp + begin + at).to(tl.int64).to(inp.dtype), 16)
                if not SHARDED:
                    shared = tl.load(origin + lanes)
                for i in range(SIZE):
                    member = (me + 1 + i) % SIZE
                    there = _in_heap(row, bases, member, place, TOLD, SIZE).to(inp.dtype)
                    if SHARDED:
                        origin = tl.multiple_of((inp + begin + member * apart + at).to(tl.int64).to(inp.dtype), 16)
                        shared = tl.load(origin + lanes)
                    tl.store(tl.multiple_of(there, 16) + at + lanes, shared)
                at += step
    while at < count:
        mask = at + lanes < count
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            there = _in_heap(row, bases, member, place, TOLD, SIZE).to(inp.dtype)
            index = begin + member * apart + at + lanes
            if IN_DIMS > 0:
                index = strided(index, in_sizes, in_strides, IN_DIMS)
            tl.store(there + at + lanes, tl.load(inp + index, mask=mask), mask=mask)
        at += step


@triton.jit
def _push(
    row, bases, place, inp, begin, apart, count, me, in_sizes, in_strides,
    TOLD: tl.constexpr, SHARDED: tl.constexpr, FORM: tl.constexpr, SIZE: tl.constexpr, IN_DIMS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Push `count` elements to every member.

    Args:
        row, bases, place, TOLD: where to, see `_in_heap`.
        inp: the input;
        begin: and the linear index where it begins for member 0;
        apart: and so many elements further for the next one, if SHARDED: else all get the same.
        FORM: see the beginning of this file.
    """
    apart = tl.cast(apart, tl.int64)
    if FORM == "tiles":
        _push_tiles(
            row, bases, place, inp, begin, apart, count, me, in_sizes, in_strides, TOLD, SHARDED, SIZE, IN_DIMS, BLOCK
        )
    elif FORM == "divided":
        share = tl.num_programs(0).to(tl.int64) // SIZE
        program = tl.program_id(0).to(tl.int64)
        member = (me + program // share) % SIZE
        if SHARDED:
            begin += member * apart
        there = _in_heap(row, bases, member, place, TOLD, SIZE).to(inp.dtype)
        copy_part(
            there, 0, in_sizes, in_strides, inp, begin, in_sizes, in_strides, count, program % share, share,
            0, IN_DIMS, BLOCK
        )  # fmt: skip
    else:
        tl.static_assert(FORM == "members", "unknown form")
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            first = begin
            if SHARDED:
                first += member * apart
            there = _in_heap(row, bases, member, place, TOLD, SIZE).to(inp.dtype)
            copy(there, 0, in_sizes, in_strides, inp, first, in_sizes, in_strides, count, 0, IN_DIMS, BLOCK)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_direct(
    out, inp, control, bases, me, rank, kind, count, timeout_ns, status, in_sizes, in_strides,
    SIZE: tl.constexpr, SHARDED: tl.constexpr, FORM: tl.constexpr, IN_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Push a part to every member's output.

    Args:
        out, inp: the tensors; the output is dense and on the heap.
        control: the team's control region (int64).
        bases: int64[SIZE], the members' heaps.
        me, rank: the caller's index in the team, and in the world.
        kind: number of the kind of call; the same on all members.
        count: elements that go to a member.
        timeout_ns, status: bound of waits, and where they report.
        in_sizes, in_strides: of the input, IN_DIMS of them; none if it is dense.
        SIZE: number of members.
        SHARDED: the input has a part for each member; else all get the same.
        FORM: see the beginning of this file; with "divided", SIZE divides the number of programs.
        BLOCK: elements that a program moves at a time.
    """
    inp = as_words(inp)
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    tell_kind(row, bases, me, kind, SIZE)
    nothing = members_of(SIZE).to(tl.int64) * 0
    count = tl.cast(count, tl.int64)
    tell(row, bases, me, nothing + (out.to(tl.int64) - tl.load(bases + me)), nothing, SIZE)
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    compare_kinds(row, kind, status, rank, SIZE)
    _push(
        row, bases, me * count * ITEM, inp, count * 0, count, count, me, in_sizes, in_strides,
        True, SHARDED, FORM, SIZE, IN_DIMS, BLOCK
    )  # fmt: skip
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_staged(
    out, inp, control, stage, bases, me, rank, kind, count, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, SHARDED: tl.constexpr, FORM: tl.constexpr, IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Push a part to every member through its staging region.

    Args (beside those of `push_direct`):
        stage: the team's staging region; half of it holds a piece from each member.
        capacity: elements of a piece.
        out_sizes, out_strides: of the output, OUT_DIMS of them; none if it is dense.
    """
    inp = as_words(inp)
    out = as_words(out)
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE)
    tell_kind(row, bases, me, kind, SIZE)
    count = tl.cast(count, tl.int64)
    capacity = tl.cast(capacity, tl.int64)
    place = stage.to(tl.int64) - tl.load(bases + me) + me * capacity * ITEM
    mine = stage.to(inp.dtype, bitcast=True)
    done = capacity * 0
    half = done
    while done < count:
        piece = tl.minimum(count - done, capacity)
        _push(
            row, bases, place + half * ITEM, inp, done, count, piece, me, in_sizes, in_strides,
            False, SHARDED, FORM, SIZE, IN_DIMS, BLOCK
        )  # fmt: skip
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if done == 0:
            compare_kinds(row, kind, status, rank, SIZE)
        if FORM == "divided":
            share = tl.num_programs(0).to(tl.int64) // SIZE
            program = tl.program_id(0).to(tl.int64)
            member = (me + SIZE - program // share) % SIZE
            came = mine + half + member * capacity
            copy_part(
                out, member * count + done, out_sizes, out_strides, came, 0, out_sizes, out_strides, piece,
                program % share, share, OUT_DIMS, 0, BLOCK
            )  # fmt: skip
        else:
            for i in range(SIZE):
                came = mine + half + i * capacity
                copy(
                    out, i * count + done, out_sizes, out_strides, came, 0, out_sizes, out_strides, piece,
                    OUT_DIMS, 0, BLOCK
                )  # fmt: skip
        done += capacity
        half = SIZE * capacity - half
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push_reduce(
    out, inp, control, stage, bases, me, rank, kind, count, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, OP: tl.constexpr, IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Push a part to every member's staging region, and reduce those that came.

    Args (beside those of `push_staged`):
        OP: the reduction's name.
    """
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE)
    tell_kind(row, bases, me, kind, SIZE)
    count = tl.cast(count, tl.int64)
    capacity = tl.cast(capacity, tl.int64)
    place = stage.to(tl.int64) - tl.load(bases + me) + me * capacity * ITEM
    mine = stage.to(inp.dtype, bitcast=True)
    done = capacity * 0
    half = done
    while done < count:
        piece = tl.minimum(count - done, capacity)
        _push(
            row, bases, place + half * ITEM, inp, done, count, piece, me, in_sizes, in_strides,
            False, True, "members", SIZE, IN_DIMS, BLOCK
        )  # fmt: skip
        epoch += 1
        meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        if done == 0:
            compare_kinds(row, kind, status, rank, SIZE)
        reduce_slots(out, done, mine + half, capacity, piece, out_sizes, out_strides, OUT_DIMS, OP, SIZE, BLOCK)
        done += capacity
        half = SIZE * capacity - half
    epoch += 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    leave(row, epoch, SIZE)


PUSHED = ("all_gather", "all_to_all")
"""Operations that pushing serves."""

FORMS = {"push": "members", "persistent": "tiles", "partitioned": "divided"}
"""Algorithms that push, and their forms as the kernels call them."""

_PERSISTENT_SHARE = 1.17  # of the model: all links at the same time


class Push(Portable):
    """all_gather or all_to_all by pushing.

    Attributes:
        measured_only: of "partitioned", which is as fast as "persistent" and not for every number of programs.

    Args:
        op: the operation.
        name: the algorithm, one of `FORMS`.
    """

    def __init__(self, op: str, name: str) -> None:
        super().__init__(op, name)
        self.measured_only = name == "partitioned"
        self._form = FORMS[name]

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        if request.options.get("uneven"):
            return Availability.no("it sends parts of equal size")
        programs, size = request.options.get("config", {}).get("comm_sms"), request.group_size
        if self._form == "divided" and programs is not None and programs % size:
            return Availability.no(
                f"it divides its programs among {size} members, and comm_sms={programs} is no multiple of {size}"
            )
        return answer

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings, what goes over the links, and an output that is copied out of the staging."""
        share = 1 if self.op == "all_gather" else 1 / request.group_size
        copied = 0.0 if request.direct_out else request.nbytes * share * request.group_size
        moved = request.nbytes * share * (request.group_size - 1)
        faster = _PERSISTENT_SHARE if self._form == "tiles" else 1
        return self.model(request, meetings=2, moved=moved, copied=copied, link_share=faster)

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return configs that are worth measuring; programs that are divided are a multiple of the members."""
        offered = super().tunings(request)
        if self._form != "divided":
            return offered
        size = request.group_size
        return [{name: n // size * size if name == "comm_sms" else n for name, n in each.items()} for each in offered]

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind one of the two kernels.  Collective: every member calls it."""
        carrier = carrier_of(request.dtype)
        item = carrier.dtype.itemsize
        sharded = self.op == "all_to_all"
        count = math.prod(request.shape) * carrier.parts // (team.size if sharded else 1)
        inner = layout_of(*carrier.extend(request.shape, request.options["in_stride"]))
        blocks = blocks_for(request, team, count, item, reduces=False)
        if self._form == "divided":
            blocks = self._divided(request, team, count, blocks)
        arguments = {
            "control": team.control.tensor.view(torch.int64),
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "kind": request.options.get("kind", 0),
            "count": count,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "SIZE": team.size,
            "SHARDED": sharded,
            "FORM": self._form,
            "IN_DIMS": inner.num_dims,
            "BLOCK": blocks.block,
        }
        kernel = push_direct
        if not request.direct_out:
            kernel = push_staged
            region, capacity = pieces(team, count, item, team.size, name="pushed")
            outer = layout_of(*carrier.extend(request.options["out_shape"], request.options["out_stride"]))
            arguments |= {
                "stage": region.tensor,
                "capacity": capacity,
                "out_sizes": outer.sizes,
                "out_strides": outer.strides,
                "OUT_DIMS": outer.num_dims,
            }
        return Plan(BoundKernel(kernel, blocks.programs, arguments, PER_CALL, team.device, blocks.options), carrier)

    @staticmethod
    def _divided(request: CollectiveRequest, team: Team, count: int, blocks: Blocks) -> Blocks:
        """The same blocks for as many programs for each member as are of use."""
        size = team.size
        usual = blocks.programs if request.target.type is DeviceType.CPU else MOST_PROGRAMS
        most = min(request.options["config"].get("comm_sms", max(usual, size)), team.max_programs) // size
        if most == 0:
            raise UnsupportedError(
                f"{request.op}: 'partitioned' needs a program for each of {size} members, and there is room for "
                f"{team.max_programs} programs: raise IRIS_SYSTEM_SIZE"
            )
        return Blocks(size * max(1, min(most, -(-count // blocks.block))), blocks.block, blocks.options)


class PushReduce(Reduction):
    """reduce_scatter: every rank pushes its parts to their owners, who reduce them in the group's order."""

    def __init__(self) -> None:
        super().__init__("reduce_scatter", "push")

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings, what goes over the links, and reading what came."""
        moved = request.nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, meetings=2, moved=moved, copied=request.nbytes)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel.  Collective: every member calls it."""
        op, carrier = self.reduction(request)
        item = getattr(torch, request.dtype).itemsize
        count = math.prod(request.shape) // team.size
        inner = layout_of(request.shape, request.options["in_stride"])
        outer = layout_of(request.options["out_shape"], request.options["out_stride"])
        region, capacity = pieces(team, count, item, team.size, name="pushed")
        blocks = blocks_for(request, team, count, item, reduces=True)
        arguments = self.common(request, team, op) | {
            "stage": region.tensor,
            "count": count,
            "capacity": capacity,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "out_sizes": outer.sizes,
            "out_strides": outer.strides,
            "IN_DIMS": inner.num_dims,
            "OUT_DIMS": outer.num_dims,
            "BLOCK": blocks.block,
        }
        kernel = BoundKernel(push_reduce, blocks.programs, arguments, PER_CALL, team.device, blocks.options)
        return Plan(kernel, carrier)
