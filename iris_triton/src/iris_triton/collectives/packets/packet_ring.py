"""`sentinel_ring`: all_reduce and reduce_scatter round a ring.  Each thread takes its packets all the way round.

Chosen for large messages where a table says so, or by name.

At every moment each member sends to the next one only, so the traffic is a permutation.  Input and output may be any
tensors, and the mailbox does not grow with the message.

A program has an area of the mailbox to itself, whatever the grid: two halves, which its rounds use in turn, with a slot
for each message of a round.  In a round every thread sends a packet of one part to the next member, adds its own input
to what comes, and passes that on, until each part has met all members; in an all_reduce the results go round once more.

Places of sentinel packets are free again when the reader has cleared them.  It says so to the member before at the end
of each round (release), which asks before it uses the same half again (acquire): so nothing leans on the order of
stores, or on the end of kernels.  Words of a program, in each member's region:

    0   rounds that the next member has finished (it counts)
    1   rounds so far: the same on all members; see `iris_triton.collectives.parts.barrier.take`

They only grow, so a captured launch can be replayed.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from iris_core.types import Availability, DeviceType
from iris_triton.collectives.packets.arithmetic import reduced
from iris_triton.collectives.packets.base import PacketCollective, Plan
from iris_triton.collectives.packets.data import limit_of, load_data, store_data
from iris_triton.collectives.packets.mailbox import MAX_PROGRAMS, PACKET, PER_CALL
from iris_triton.collectives.packets.packet import clear, encode, poll, push, spot
from iris_triton.collectives.packets.split import CPU_PAIRS, GPU_PAIRS, GPU_WARPS, START_S
from iris_triton.collectives.parts.barrier import count_of, publish, report_overlap, take, uses_of
from iris_triton.collectives.parts.elements import finished
from iris_triton.collectives.parts.sizes import carrier_of
from iris_triton.language.flags import await_flag
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.team import Team
    from iris_core.types import CollectiveRequest

WORDS = 2
"""Words of a program."""

_RUNTIME = (
    "peers", "me", "rank", "nbytes", "part", "packets", "box", "area", "timeout_ns", "status",
    "in_sizes", "in_strides", "out_sizes", "out_strides",
)  # fmt: skip

_ENC = tl.constexpr("sentinel")


@triton.constexpr_function
def _step_of(op):
    """What is done on the way: an average is a sum until the end."""
    return "sum" if op == "avg" else op


@triton.jit
def _added(own, came, OP: tl.constexpr, DT: tl.constexpr):
    """Two packets, element by element."""
    return reduced(own + came, 2, 4, DT, _step_of(OP))


@triton.jit
def _done(words, OP: tl.constexpr, DT: tl.constexpr, N: tl.constexpr):
    """The end of a reduction; only elements of 32 bits are averaged."""
    if OP == "avg":
        return (
            finished(words[0].to(DT, bitcast=True), OP, N).to(tl.int32, bitcast=True),
            finished(words[1].to(DT, bitcast=True), OP, N).to(tl.int32, bitcast=True),
            finished(words[2].to(DT, bitcast=True), OP, N).to(tl.int32, bitcast=True),
            finished(words[3].to(DT, bitcast=True), OP, N).to(tl.int32, bitcast=True),
        )
    else:
        return words


@triton.jit
def _take(mine, epoch, mask, flags, timeout_ns, status, rank, NAP_NS: tl.constexpr):
    """Await a packet of each thread, free its place, and return its words."""
    raw = poll(mine, 0, epoch, mask, flags, timeout_ns, status, rank, 1, _ENC, NAP_NS, 0, True)
    clear(mine, 0, mask, 1)
    return raw


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def packet_ring(
    out, inp, words, peers, me, rank, nbytes, part, packets, box, area, timeout_ns, status,
    in_sizes, in_strides, out_sizes, out_strides,
    N: tl.constexpr, GATHERS: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr, ITEM: tl.constexpr,
    IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr, IN_WHOLE: tl.constexpr, OUT_WHOLE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, NAP_NS: tl.constexpr
):  # fmt: skip
    """Reduce the inputs of all members.

    Args:
        out, inp: the tensors, dense or strided.
        words: WORDS words for each program (int64).
        peers: addresses of the members' heaps, beginning with the next member and ending with the own one.
        me, rank: the caller's index in the team, and in the world.
        nbytes: bytes of the whole input.
        part: bytes of a member's part; in an all_reduce the last ones may be shorter, or empty.
        packets: of a part.
        box: byte of the heap at which the mailbox begins.
        area: bytes of a program's area of it.
        timeout_ns, status: bound of waits, and where they report.
        in_sizes, in_strides, out_sizes, out_strides: of strided tensors, in elements.
        N: number of members, two at least.
        GATHERS: all members get all results; else each its part.
        DT, OP: elements and reduction.
        ITEM: bytes of an element.
        IN_DIMS, OUT_DIMS: dimensions of strided tensors; 0 if dense.
        IN_WHOLE, OUT_WHOLE: the tensor is dense, and its address, `part` and `nbytes` are multiples of 16 bytes.
        EVEN: all parts have `part` bytes.
        BLOCK: packets of a program at a time, one for each thread.
        NAP_NS: nanoseconds to sleep between two looks at a packet.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    to, origin = out.to(tl.int64), inp.to(tl.int64)
    part = tl.cast(part, tl.int64)
    total = tl.cast(nbytes, tl.int64)
    own = words + program * 2
    before = (own.to(tl.int64) + (peers[N - 2] - peers[N - 1])).to(own.dtype)
    slot: tl.constexpr = BLOCK * 16
    half: tl.constexpr = 2 * (N - 1) * slot
    word = take(own + 1)
    report_overlap(uses_of(word), status, rank, (own + 1).to(tl.int64), me)
    rounds = count_of(word)
    for s in range(program * BLOCK, packets, tl.num_programs(0) * BLOCK):
        await_flag(own, rounds - 1, "ge", "acquire", "sys", timeout_ns, tl.cast(status, tl.int64), rank)
        packet = s + lane
        mask = (packet < packets).to(tl.int32)
        offset, flags = spot(packet, _ENC)
        mark = program * 0  # no epoch is in these packets
        at = lane.to(tl.int64) * 16 + (tl.cast(box, tl.int64) + program.to(tl.int64) * area + (rounds & 1) * half)
        mine, there = peers[N - 1] + at, peers[0] + at
        member = (me + N - 1) % N
        length = limit_of(total, part, member, EVEN)
        value = load_data(
            origin, member * part, offset, length, flags, in_sizes, in_strides, _ENC, IN_WHOLE, ITEM, IN_DIMS
        )  # fmt: skip
        push(there, encode(value, 0, flags, _ENC), mask, flags, _ENC)
        for t in tl.range(1, N - 1, loop_unroll_factor=1):
            member = (me + N - 1 - t) % N
            length = limit_of(total, part, member, EVEN)
            value = load_data(
                origin, member * part, offset, length, flags, in_sizes, in_strides, _ENC, IN_WHOLE, ITEM, IN_DIMS
            )  # fmt: skip
            came = _take(mine + (t - 1) * slot, mark, mask, flags, timeout_ns, status, rank, NAP_NS)
            push(there + t * slot, encode(_added(value, came, OP, DT), 0, flags, _ENC), mask, flags, _ENC)
        length = limit_of(total, part, me, EVEN)
        value = load_data(
            origin, me * part, offset, length, flags, in_sizes, in_strides, _ENC, IN_WHOLE, ITEM, IN_DIMS
        )  # fmt: skip
        came = _take(mine + (N - 2) * slot, mark, mask, flags, timeout_ns, status, rank, NAP_NS)
        result = encode(_done(_added(value, came, OP, DT), OP, DT, N), 0, flags, _ENC)  # the same NaNs as for others
        if GATHERS:
            push(there + (N - 1) * slot, result, mask, flags, _ENC)
            store_data(
                to, me * part, offset, length, flags, out_sizes, out_strides, result, _ENC, OUT_WHOLE, ITEM, OUT_DIMS
            )  # fmt: skip
            for t in tl.range(0, N - 2, loop_unroll_factor=1):
                member = (me + N - 1 - t) % N
                length = limit_of(total, part, member, EVEN)
                came = _take(mine + (N - 1 + t) * slot, mark, mask, flags, timeout_ns, status, rank, NAP_NS)
                push(there + (N + t) * slot, came, mask, flags, _ENC)
                store_data(
                    to, member * part, offset, length, flags, out_sizes, out_strides, came, _ENC, OUT_WHOLE, ITEM,
                    OUT_DIMS
                )  # fmt: skip
            member = (me + 1) % N
            length = limit_of(total, part, member, EVEN)
            came = _take(mine + (2 * N - 3) * slot, mark, mask, flags, timeout_ns, status, rank, NAP_NS)
            store_data(
                to, member * part, offset, length, flags, out_sizes, out_strides, came, _ENC, OUT_WHOLE, ITEM, OUT_DIMS
            )  # fmt: skip
        else:
            store_data(
                to, part * 0, offset, length, flags, out_sizes, out_strides, result, _ENC, OUT_WHOLE, ITEM, OUT_DIMS
            )  # fmt: skip
        rounds += 1
        publish(before, rounds, "sys")
    tl.store(own + 1, rounds)


_HOP_S, _RING_WIRE = 0.8e-6, 3.51e11


class Ring(PacketCollective):
    """all_reduce or reduce_scatter of floats round a ring; see the beginning of this file.

    It serves 16-bit floats only where nothing is rounded on the way: their sums would be, at every hop.

    Args:
        op: the operation.
        emulate: as for `PacketCollective`.
    """

    _measured_only = True
    """Chosen where a table says so, or by name."""

    def __init__(self, op: str, *, emulate: bool = False) -> None:
        super().__init__(op, "ring", "sentinel", emulate=emulate)

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        if request.group_size < 2:
            return Availability.no("it needs two ranks at least")
        if "num_warps" in request.options.get("config", {}):
            return Availability.no("its mailbox is made for programs of one size, so it has no use for num_warps")
        if request.dtype != "float32" and request.options.get("reduction") not in ("min", "max"):
            return Availability.no(f"partial results of {request.dtype} would be rounded at every hop")
        return answer

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: once round the ring, or twice."""
        hops = (request.group_size - 1) * (1 + self._gathers)
        return START_S + hops * (_HOP_S + request.nbytes / request.group_size / _RING_WIRE)

    def tunings(self, request: CollectiveRequest) -> list[dict[str, int]]:
        """Return configs that are worth measuring for a call that this algorithm serves."""
        if request.target.type is DeviceType.CPU:
            return [{}]
        return [{}, {"comm_sms": 132}, {"comm_sms": 528}]

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Make a plan.  Collective: every member calls it."""
        on_cpu = request.target.type is DeviceType.CPU
        packets = self._packets(request)
        block = 32 * GPU_WARPS
        area = 2 * 2 * (team.size - 1) * block * PACKET
        most = min(request.options["config"].get("comm_sms", CPU_PAIRS if on_cpu else 2 * GPU_PAIRS), MAX_PROGRAMS)
        programs = max(1, min(most, -(-packets // block)))
        mailbox = team.workspace("ring of packets", programs * area, area, fill=0xFF)  # every byte of packets' EMPTY
        words = team.region("words of the ring of packets", WORDS * 8 * MAX_PROGRAMS)
        arguments = self._common(request, team)
        arguments |= {
            "words": words.tensor.view(torch.int64),
            "nbytes": request.nbytes,
            "packets": packets,
            "box": mailbox.offset_bytes,
            "area": area,
            "GATHERS": self._gathers,
            "EVEN": arguments["part"] * team.size == request.nbytes,
            "BLOCK": block,
            "NAP_NS": 0,
        }
        launch_options = {} if on_cpu else {"num_warps": GPU_WARPS}
        programs = min(programs, mailbox.nbytes // area)
        kernel = BoundKernel(packet_ring, programs, arguments, PER_CALL, team.device, launch_options)
        return Plan((kernel,), carrier_of(request.dtype))
