"""`ring`: all_reduce round a ring.  Every rank talks to its two neighbours only.

Chosen by name, or where the model says so.

Each program of a rank has a mailbox of a few slots, which the program of the same number on the rank before fills.  The
message is cut into one shard per member, a shard into tiles for the programs, a tile into slices: what goes over the
wire at a time.  The partial result of a slice starts at the member whose number the shard has, and each next member
adds its own input; the last one finishes it, and the result goes round once more.  So every element is reduced by one
chain, and all members get the same bits; the order of the chain depends on the shard.  Partial results travel in the
type in which they are added up, float32 for 16-bit floats, so they are rounded once, like everywhere else; results
travel in the elements' type.  The ring is that of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", J. Parallel Distrib. Comput. 69 (2009).

Several rings go side by side with different steps from neighbour to neighbour, all of them prime to the number of
members, so that on a fully connected machine they use different links.  With G of them, program p belongs to ring
p % G.

No input or output is touched by anybody else, so they may be any tensors, and the mailboxes do not grow with the
message.  Words of a program, in each member's region:

    0   messages that have come into the mailbox here (the one before counts)
    1   messages that the next one has taken out of its mailbox (it counts)
    2   messages so far, at the end of the last launch: the same on all members, as each sends as many as it gets

They only grow.  All meet at the end of a launch: so all mailboxes are empty, whoever fills them next, and in whatever
slots.
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
from iris_triton.collectives.parts.barrier import elsewhere, last_epoch, meet_and_leave, publish, row_of, tell_kind
from iris_triton.collectives.parts.elements import combine, finished, load_block, store_block, wide_type, widened
from iris_triton.collectives.parts.portable import PER_CALL, RUNTIME, Plan, Portable, Reduction
from iris_triton.collectives.parts.sizes import (
    MOST_PROGRAMS,
    VECTOR_NBYTES,
    Blocks,
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

WORDS = 4
"""Words of a program; the last one is not used."""

_ARRIVED, _TAKEN, _NUMBER = (tl.constexpr(n) for n in range(3))
_RUNTIME = (*RUNTIME, "slots", "rings")


@triton.jit
def _send(value, number, left, box, mine, theirs, slots, timeout_ns, status, rank, BLOCK: tl.constexpr):
    """Put a block of `left` elements into the mailbox of the next one.

    Args:
        value: the block; its type is that of the message.
        number: messages that were sent before.
        left: elements of it that are meant, from the first one on; may be none.
        box: that program's mailbox there, of elements as wide as those that are added up.
        mine, theirs: the words of this program here, and of the next one's.
        slots: of a mailbox.
    """
    await_flag(mine + _TAKEN, number + 1 - slots, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    slot = (box + number % slots * BLOCK).to(tl.pointer_type(value.dtype), bitcast=True)
    store_block(slot, 0, left, (1,), (1,), value, 0, BLOCK)
    publish(theirs + _ARRIVED, number + 1, "sys")


@triton.jit
def _receive(like, number, left, box, mine, theirs, slots, timeout_ns, status, rank, BLOCK: tl.constexpr):
    """Take a block of elements of the type to which `like` points out of the own mailbox; as `_send`, backwards."""
    await_flag(mine + _ARRIVED, number + 1, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
    slot = (box + number % slots * BLOCK).to(like.dtype, bitcast=True)
    value = load_block(slot, 0, left, (1,), (1,), 0, BLOCK)
    publish(theirs + _TAKEN, number + 1, "sys")
    return value


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def ring(
    out, inp, control, mail, words, steps, bases, me, rank, kind, count, shard, slots, rings, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, OP: tl.constexpr, SLICES: tl.constexpr, IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr,
    BLOCK: tl.constexpr
):  # fmt: skip
    """Reduce the inputs of all members.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        mail: the mailboxes: for each program `slots` slots of BLOCK elements as wide as those that are added up.
        words: WORDS words for each program (int64).
        steps: int64[rings], how many members further each ring's next neighbour is.
        count: elements of the whole.
        shard: elements of a shard; the last ones may be shorter, or empty.
        slots: of a mailbox; at least SLICES.
        rings: how many.
        OP: the reduction's name.
        SLICES: of a tile.
        BLOCK: elements of a slice.
    """
    wide = tl.pointer_type(wide_type(inp.dtype.element_ty))
    program = tl.program_id(0)
    tell_kind(row_of(control, SIZE), bases, me, kind, SIZE)
    step = tl.load(steps + program % rings)
    own = tl.load(bases + me)
    after = tl.load(bases + (me + step) % SIZE) - own
    before = tl.load(bases + (me + SIZE - step) % SIZE) - own
    mine = words + program * 4
    their_taken, their_arrived = elsewhere(mine, before), elsewhere(mine, after)
    box = mail.to(wide, bitcast=True) + tl.cast(program, tl.int64) * slots * BLOCK
    their_box = elsewhere(box, after)
    sent = tl.load(mine + _NUMBER)
    got = sent
    tile = SLICES * BLOCK
    for begin in range(tl.cast(program, tl.int64) * tile, tl.cast(shard, tl.int64), tl.num_programs(0) * tile):
        for j in range(SLICES):
            within = begin + j * BLOCK
            first = tl.cast(me, tl.int64) * shard + within
            left = tl.minimum(count - first, shard - within)
            value = widened(load_block(inp, first, left, in_sizes, in_strides, IN_DIMS, BLOCK))
            if SIZE == 1:
                value = finished(value, OP, SIZE).to(inp.dtype.element_ty)
                store_block(out, first, left, out_sizes, out_strides, value, OUT_DIMS, BLOCK)
            else:
                _send(value, sent, left, their_box, mine, their_arrived, slots, timeout_ns, status, rank, BLOCK)
                sent += 1
        for i in range(1, SIZE - 1):
            for j in range(SLICES):
                within = begin + j * BLOCK
                first = (me + i * (SIZE - step)) % SIZE * shard + within
                left = tl.minimum(count - first, shard - within)
                value = _receive(box, got, left, box, mine, their_taken, slots, timeout_ns, status, rank, BLOCK)
                got += 1
                ours = widened(load_block(inp, first, left, in_sizes, in_strides, IN_DIMS, BLOCK))
                value = combine(value, ours, OP)
                _send(value, sent, left, their_box, mine, their_arrived, slots, timeout_ns, status, rank, BLOCK)
                sent += 1
        if SIZE > 1:
            for j in range(SLICES):
                within = begin + j * BLOCK
                first = (me + step) % SIZE * shard + within
                left = tl.minimum(count - first, shard - within)
                value = _receive(box, got, left, box, mine, their_taken, slots, timeout_ns, status, rank, BLOCK)
                got += 1
                ours = widened(load_block(inp, first, left, in_sizes, in_strides, IN_DIMS, BLOCK))
                value = combine(value, ours, OP)
                result = finished(value, OP, SIZE).to(inp.dtype.element_ty)
                store_block(out, first, left, out_sizes, out_strides, result, OUT_DIMS, BLOCK)
                _send(result, sent, left, their_box, mine, their_arrived, slots, timeout_ns, status, rank, BLOCK)
                sent += 1
        for i in range(0, SIZE - 1):
            for j in range(SLICES):
                within = begin + j * BLOCK
                first = (me + i * (SIZE - step)) % SIZE * shard + within
                left = tl.minimum(count - first, shard - within)
                value = _receive(inp, got, left, box, mine, their_taken, slots, timeout_ns, status, rank, BLOCK)
                got += 1
                store_block(out, first, left, out_sizes, out_strides, value, OUT_DIMS, BLOCK)
                if i < SIZE - 2:
                    _send(value, sent, left, their_box, mine, their_arrived, slots, timeout_ns, status, rank, BLOCK)
                    sent += 1
    tl.store(mine + _NUMBER, sent)
    row = row_of(control, SIZE)
    meet_and_leave(row, bases, me, last_epoch(row, SIZE), timeout_ns, status, rank, SIZE)


_GPU_SLICES = 2  # of a tile, so that one is under way while another one is added up


class Ring(Reduction):
    """all_reduce round one ring or several; see the beginning of this file.

    `Config.all_reduce_num_rings` is the number of rings.  `all_reduce_ring_slice_n` columns of a tile, of its
    block_size_m rows, are a slice: a tile goes over the wire as block_size_n / all_reduce_ring_slice_n messages one
    behind the other.
    """

    uses = (*Portable.uses, "all_reduce_num_rings", "all_reduce_ring_slice_n")

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        config = request.options.get("config", {})
        rings, programs = config.get("all_reduce_num_rings", 1), config.get("comm_sms")
        if answer and programs is not None and programs < rings:
            return Availability.no(f"all_reduce_num_rings={rings} need as many programs, and comm_sms={programs}")
        return answer

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: twice round the ring and a meeting; partial results are wide, results are not."""
        hops = 2 * (request.group_size - 1)
        once = request.nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, meetings=1 + hops, moved=once * (wide_of(request).itemsize / item_of(request) + 1))

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel.  Collective: every member calls it."""
        config = request.options["config"]
        op, carrier = self.reduction(request)
        item, wide = item_of(request), wide_of(request).itemsize
        count = math.prod(request.shape)
        shard = rounded_up(-(-count // team.size), item)
        blocks = blocks_for(request, team, shard, item, reduces=True)
        rings = config.get("all_reduce_num_rings", 1)
        slices, block = self.slices(request, blocks.block)
        on_cpu = request.target.type is DeviceType.CPU
        most = min(config.get("comm_sms", max(rings, 1 if on_cpu else MOST_PROGRAMS)), team.max_programs)
        if most < rings:
            raise UnsupportedError(
                f"all_reduce: {rings} rings need as many programs, and there is room for {team.max_programs}: "
                "raise IRIS_SYSTEM_SIZE"
            )
        programs = max(rings, min(most, -(-shard // (slices * block))))
        fixed = block != blocks.block or "block_size_m" in config or "block_size_n" in config
        least = block if fixed else max(1, VECTOR_NBYTES // wide)
        mail = team.workspace("ring", programs * 2 * slices * block * wide, rings * slices * least * wide)
        room = mail.nbytes // (slices * wide)  # elements, if each mailbox had a slot for each slice of a tile only
        while block > least and room < rings * block:
            block //= 2
        programs = min(programs, room // block)
        arguments = self.arguments(request, team) | layout_arguments(*layouts_of(request))
        arguments |= {
            "OP": op,
            "mail": mail.tensor,
            "words": team.region("ring words", WORDS * 8 * team.max_programs).tensor.view(torch.int64),
            "steps": team.constant(ring_steps(team.size, rings)),
            "count": count,
            "shard": shard,
            "slots": min(2 * slices, slices * room // (programs * block)),
            "rings": rings,
            "SLICES": slices,
        }
        return self.bind(ring, team, Blocks(programs, block, blocks.options), arguments, carrier)

    @staticmethod
    def slices(request: CollectiveRequest, block: int) -> tuple[int, int]:
        """Return slices of a tile, and elements of a slice, given how many a program would handle at a time."""
        config = request.options["config"]
        width = config.get("all_reduce_ring_slice_n")
        if width is not None:
            return config.get("block_size_n", 64) // width, config.get("block_size_m", 32) * width
        if "block_size_m" in config or "block_size_n" in config or request.target.type is DeviceType.CPU:
            return 1, block
        return _GPU_SLICES, block


def ring_steps(size: int, rings: int) -> list[int]:
    """Return how far each ring's next neighbour is: numbers prime to the size, in turn."""
    prime = [step for step in range(1, max(size, 2)) if math.gcd(step, size) == 1]
    return [prime[i % len(prime)] for i in range(rings)]
