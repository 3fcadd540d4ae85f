"""`nvls_two_shot`: all_reduce; `nvls`: reduce_scatter, all_gather.  By addresses that reach all ranks' heaps at once.

Chosen where measured, or by name: on GPUs with multicast (`iris_triton.language.multimem`) for all ranks, on CPUs,
which emulate it, for any group.  A member adds up its part of all inputs by loads that reduce, or takes its own input;
stores to all hand it out.  all_reduce copies nothing where all members have input and output at the same offsets; the
rest goes in pieces through a staging region.  Each sum is made once, so all members get the same bits.
"""

import dataclasses
import math

import triton
import triton.language as tl

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest, DeviceType
from iris_triton.collectives.parts import barrier as sync
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, KernelCollective, Plan
from iris_triton.collectives.parts.elements import copy, item_nbytes, reduce_to
from iris_triton.collectives.parts.sizes import VECTOR_NBYTES, blocks_for, carrier_of, item_of, pieces, rounded_up
from iris_triton.language.multimem import multimem_fence, multimem_load_reduce, multimem_store


@triton.jit
def _through_switch(
    dst, src, count, me, bases, multicast,
    SUMS: tl.constexpr, TO_ALL: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Move vectors of 16 bytes within the heaps, `count` elements, rounded up: sums of all members, or the own ones."""
    UNIT: tl.constexpr = 16 // item_nbytes(src.dtype)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK // UNIT) * UNIT
    at = tl.program_id(0).to(tl.int64) * BLOCK
    while at < count:
        mask = at + lanes < count
        if SUMS:
            words = multimem_load_reduce(src + at + lanes, me, bases, multicast, mask, SIZE)
        else:
            words = ()
            for k in tl.static_range(4):
                place = (src + at + lanes).to(tl.pointer_type(tl.int32), bitcast=True) + k
                words = words + (tl.load(place, mask=mask, other=0),)  # noqa: RUF005 - the compiler knows no star
        if TO_ALL:
            multimem_store(dst + at + lanes, words, me, bases, multicast, mask, SIZE)
        else:
            for k in tl.static_range(4):
                tl.store((dst + at + lanes).to(tl.pointer_type(tl.int32), bitcast=True) + k, words[k], mask=mask)
        at += step


@triton.jit
def _stage(mine, inp, first, count, sizes, strides, DIMS: tl.constexpr, BLOCK: tl.constexpr):
    """Copy `count` elements from index `first` on, and fill the last vector with zeros, in the program that has it."""
    copy(mine, 0, inp, first, sizes, strides, count, 0, DIMS, BLOCK)
    UNIT: tl.constexpr = 16 // item_nbytes(mine.dtype)
    rest = count + tl.arange(0, UNIT)
    is_own = (count > 0) & ((count - 1) // BLOCK % tl.num_programs(0) == tl.program_id(0))
    tl.store(mine + rest, 0, mask=is_own & (rest < (count + UNIT - 1) // UNIT * UNIT))


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def nvls(
    out, inp, control, stage, bases, me, rank, kind, count, shard, capacity, multicast, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    SIZE: tl.constexpr, SUMS: tl.constexpr, TO_ALL: tl.constexpr, DIRECT: tl.constexpr, IN_DIMS: tl.constexpr,
    OUT_DIMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Hand out this member's part of SIZE: the sum of all inputs' parts, or its own input; to all, or to itself.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        count, shard: elements of the whole, and of a part; the last ones may be shorter, or empty.
        multicast: see `iris_triton.language.multimem`.
        SUMS, TO_ALL: inputs, outputs have all parts; else they are one part.
        DIRECT: both have all parts, and are dense and on the heap.
    """
    ITEM: tl.constexpr = item_nbytes(inp.dtype)
    row, epoch = sync.enter(control, bases, me, kind, SIZE)
    shard = tl.cast(shard, tl.int64)
    capacity = tl.cast(capacity, tl.int64)
    begin = me * shard
    own = tl.load(bases + me)
    mine = stage.to(inp.dtype, bitcast=True)
    done = capacity * 0
    while done < shard:
        if DIRECT:
            sync.send(row, bases, me, inp.to(tl.int64) - own, out.to(tl.int64) - own, SIZE)
        else:
            for i in range(0 if SUMS else me, SIZE if SUMS else me + 1):
                piece = tl.minimum(tl.minimum(count - i * shard, shard) - done, capacity)
                first = i * shard + done if SUMS else done
                _stage(mine + i * capacity, inp, first, piece, in_sizes, in_strides, IN_DIMS, BLOCK)
        epoch += 1
        sync.barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)  # inputs are there, results taken
        if done == 0:
            sync.compare_kinds(row, kind, status, rank, SIZE)
        multimem_fence()
        piece = tl.minimum(tl.minimum(count - begin, shard) - done, capacity)
        if DIRECT:
            here, there = inp.to(tl.int64) - own, out.to(tl.int64) - own
            members = sync.members_of(SIZE)
            apart = (sync.sent(row, members, SIZE) - here) | (sync.sent_second(row, members, SIZE) - there)
            apart = apart | (here | there) % 16
            whole = piece * 0
            if tl.max((apart != 0).to(tl.int32), axis=0) == 0:
                whole = tl.maximum(piece, 0) * ITEM // 16 * 16 // ITEM
                _through_switch(out + begin, inp + begin, whole, me, bases, multicast, SUMS, TO_ALL, SIZE, BLOCK)
            reduce_to(
                inp, 0, row, bases, (begin + whole) * ITEM, piece - whole, out_sizes, out_strides, 0, "sum", SIZE,
                BLOCK, PUSH=True
            )  # fmt: skip
        else:
            part = mine + me * capacity
            _through_switch(part, part, piece, me, bases, multicast, SUMS, TO_ALL, SIZE, BLOCK)
        epoch += 1
        sync.barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)  # results are there, the stage is free
        if not DIRECT:
            multimem_fence()
            for i in range(0 if TO_ALL else me, SIZE if TO_ALL else me + 1):
                piece = tl.minimum(tl.minimum(count - i * shard, shard) - done, capacity)
                first = i * shard + done if TO_ALL else done
                copy(out, first, mine + i * capacity, 0, out_sizes, out_strides, piece, OUT_DIMS, 0, BLOCK)
        done += capacity
    sync.leave(row, epoch, SIZE)


class Nvls(KernelCollective):
    """all_reduce, reduce_scatter or all_gather through addresses that reach all members."""

    measured_only = True

    def _problem(self, request: CollectiveRequest) -> str:
        problem = super()._problem(request)
        adds = request.options.get("reduction") == "sum" and request.dtype in ("float32", "float16", "bfloat16")
        if not problem and self.op != "all_gather" and not adds:
            return "it adds up float32, float16 and bfloat16, and does nothing else"
        if problem or request.multicast or request.target.type is DeviceType.CPU:
            return problem
        return (
            "it needs addresses that reach the heaps of all ranks, which are the group: NVIDIA's GPUs, Hopper and "
            "newer, with allocator 'vmem' and IRIS_VMEM__MULTICAST=1"
        )

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two barriers; what goes to the switch while as much comes; copies to and from the stage."""
        whole = request.nbytes * (request.group_size if self.op == "all_gather" else 1)
        moved = whole * (2 if request.target.type is DeviceType.CPU else 1)  # one after the other
        return self.model(request, barriers=2, moved=moved, copied=0 if self._is_direct(request) else 2 * whole)

    def _is_direct(self, request: CollectiveRequest) -> bool:
        return self.op == "all_reduce" and request.direct_in and request.direct_out

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        carrier = carrier_of(request.dtype) if self.op == "all_gather" else None
        item = item_of(request) if carrier is None else carrier.dtype.itemsize
        count = math.prod(request.shape)
        if carrier is not None:
            shard, count = count * carrier.parts, count * carrier.parts * team.size
        else:
            shard = count // team.size if self.op == "reduce_scatter" else rounded_up(-(-count // team.size), item)
        blocks = blocks_for(request, team, shard, item, reduces=self.op != "all_gather")
        blocks = dataclasses.replace(blocks, block=max(blocks.block, VECTOR_NBYTES // item))
        arguments = self.arguments(request, team, carrier)
        direct = self._is_direct(request)
        arguments |= pieces(team, shard, item, team.size, halves=1, name="nvls", needed=not direct)
        arguments |= {"SUMS": carrier is None, "TO_ALL": self.op != "reduce_scatter", "DIRECT": direct}
        arguments |= {"count": count, "shard": shard, "multicast": team.multicast_base}
        return self.bind(nvls, team, blocks, arguments, carrier)
