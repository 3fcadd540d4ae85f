"""`push`, `persistent`: all_gather and all_to_all.  Stores into peers' memory.

Chosen for large messages where a table or the model says so.  The two differ in the order of the traffic.  Outputs
that are dense and on the heap are stored into directly: barrier, push, barrier.  Others are filled in rounds through
staging regions, whose two halves take turns: push a piece for every member, barrier, take out what came.
"""

import math

import triton
import triton.language as tl

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest
from iris_triton.collectives.parts.barrier import barrier, compare_kinds, enter, last_barrier, members_of, send, sent
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, KernelCollective, Plan
from iris_triton.collectives.parts.elements import ANEW, are_aligned, as_words, copy, item_nbytes, strided
from iris_triton.collectives.parts.sizes import blocks_for, carrier_of, pieces
from iris_triton.collectives.pull import received_nbytes


@triton.jit
def _in_heap(row, bases, member, place, SENT: tl.constexpr, SIZE: tl.constexpr):
    """Return addresses at heap offset `place` of members (scalar or block); SENT: plus the offset that they sent."""
    there = tl.load(bases + member) + place
    if SENT:
        there += sent(row, member, SIZE)
    return there


@triton.jit
def _push_tiles(
    row, bases, place, inp, begin, apart, count, me, in_sizes, in_strides,
    SENT: tl.constexpr, SHARDED: tl.constexpr, SIZE: tl.constexpr, IN_DIMS: tl.constexpr, BLOCK: tl.constexpr
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
        if are_aligned(origins | _in_heap(row, bases, members, place, SENT, SIZE)):
            while at + BLOCK <= count:
                origin = tl.multiple_of((inp + begin + at).to(ANEW).to(inp.dtype), 16)
                if not SHARDED:
                    shared = tl.load(origin + lanes)
                for i in range(SIZE):
                    member = (me + 1 + i) % SIZE
                    there = _in_heap(row, bases, member, place, SENT, SIZE).to(inp.dtype)
                    if SHARDED:
                        origin = tl.multiple_of((inp + begin + member * apart + at).to(ANEW).to(inp.dtype), 16)
                        shared = tl.load(origin + lanes)
                    tl.store(tl.multiple_of(there, 16) + at + lanes, shared)
                at += step
    while at < count:
        mask = at + lanes < count
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            there = _in_heap(row, bases, member, place, SENT, SIZE).to(inp.dtype)
            index = strided(begin + member * apart + at + lanes, in_sizes, in_strides, IN_DIMS)
            tl.store(there + at + lanes, tl.load(inp + index, mask=mask), mask=mask)
        at += step


@triton.jit
def _push(
    row, bases, place, inp, begin, apart, count, me, in_sizes, in_strides,
    SENT: tl.constexpr, SHARDED: tl.constexpr, TILES: tl.constexpr, SIZE: tl.constexpr, IN_DIMS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Push `count` elements to every member.

    Args:
        row, bases, place, SENT: where to, see `_in_heap`.
        inp: the input.
        begin: linear index of the part for member 0.
        apart: elements from one member's part to the next one's, if SHARDED; else all get the same.
        TILES: each program takes a tile to all members in turn, then its next one; what all get is read once.  Else all
            programs push to one member, then to the next; the traffic is a permutation at every moment.  Either way a
            program waits only for those of its number, and takes out only what came from them.
    """
    apart = tl.cast(apart, tl.int64)
    if TILES:
        _push_tiles(
            row, bases, place, inp, begin, apart, count, me, in_sizes, in_strides, SENT, SHARDED, SIZE, IN_DIMS, BLOCK
        )
    else:
        for i in range(SIZE):
            member = (me + 1 + i) % SIZE
            first = begin
            if SHARDED:
                first += member * apart
            there = _in_heap(row, bases, member, place, SENT, SIZE).to(inp.dtype)
            copy(there, 0, inp, first, in_sizes, in_strides, count, 0, IN_DIMS, BLOCK)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def push(
    out, inp, control, stage, bases, me, rank, kind, count, capacity, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, DIRECT: tl.constexpr, SHARDED: tl.constexpr, TILES: tl.constexpr, IN_DIMS: tl.constexpr,
    OUT_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Push a part to every member.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        stage: the team's staging region; half of it holds a piece from each member.
        count: elements that go to a member.
        DIRECT: outputs are dense and on the heap; they need no staging.
        SHARDED: the input has a part for each member; else all get the same.
        TILES: see `_push`.
    """
    inp = as_words(inp)
    out = as_words(out)
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row, epoch = enter(control, bases, me, kind, SIZE)
    count = tl.cast(count, tl.int64)
    capacity = tl.cast(capacity, tl.int64)
    if DIRECT:
        epoch += 1
        send(row, bases, me, out.to(tl.int64) - tl.load(bases + me), 0, SIZE)
        barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
        compare_kinds(row, kind, status, rank, SIZE)
        _push(
            row, bases, me * count * ITEM, inp, count * 0, count, count, me, in_sizes, in_strides,
            True, SHARDED, TILES, SIZE, IN_DIMS, BLOCK
        )  # fmt: skip
    else:
        place = stage.to(tl.int64) - tl.load(bases + me) + me * capacity * ITEM
        mine = stage.to(inp.dtype, bitcast=True)
        done = capacity * 0
        half = done
        while done < count:
            piece = tl.minimum(count - done, capacity)
            _push(
                row, bases, place + half * ITEM, inp, done, count, piece, me, in_sizes, in_strides,
                False, SHARDED, TILES, SIZE, IN_DIMS, BLOCK
            )  # fmt: skip
            epoch += 1
            barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
            if done == 0:
                compare_kinds(row, kind, status, rank, SIZE)
            for i in range(SIZE):
                came = mine + half + i * capacity
                copy(out, i * count + done, came, 0, out_sizes, out_strides, piece, OUT_DIMS, 0, BLOCK)
            done += capacity
            half = SIZE * capacity - half
    last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


PUSHED = ("all_gather", "all_to_all")  # operations that pushing serves
_PERSISTENT_SHARE = 1.17  # of the model: all links at the same time


class Push(KernelCollective):
    """all_gather or all_to_all by pushing: by members, or, "persistent", a variant of AMD's Iris, by tiles."""

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two barriers, bytes over the links, and the copy of a staged output."""
        out_nbytes = request.nbytes * (request.group_size if self.op == "all_gather" else 1)
        moved, copied = received_nbytes(request), 0 if request.direct_out else out_nbytes
        faster = _PERSISTENT_SHARE if self.name == "persistent" else 1
        return self.model(request, barriers=2, moved=moved, copied=copied, link_share=faster)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        carrier, sharded = carrier_of(request.dtype), self.op == "all_to_all"
        item = carrier.dtype.itemsize
        count = math.prod(request.shape) * carrier.parts // (team.size if sharded else 1)
        blocks = blocks_for(request, team, count, item, reduces=False)
        arguments = self.arguments(request, team, carrier)
        arguments |= pieces(team, count, item, team.size, name="pushed", needed=not request.direct_out)
        arguments |= {"count": count, "DIRECT": request.direct_out, "SHARDED": sharded}
        arguments["TILES"] = self.name == "persistent"
        return self.bind(push, team, blocks, arguments, carrier)
