"""`sentinel_split`: all_reduce.  Some programs only push, others only reduce.

Chosen for large messages where a table says so, or by name.  Programs come in pairs: the even one pushes parts of the
input into mailboxes, to one member after the other; the odd one polls, reduces, and frees the places.  Then the even
one pushes the results into the others' outputs.  A message that is larger than the mailbox goes in several launches, as
places are surely free again only when a kernel has ended.
"""

import torch
import triton
import triton.language as tl

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest, DeviceType
from iris_triton.collectives.packets import mailbox as boxes
from iris_triton.collectives.packets.arithmetic import reduced
from iris_triton.collectives.packets.base import PacketCollective
from iris_triton.collectives.packets.data import limit_of, load_data, store_data
from iris_triton.collectives.packets.mailbox import MAX_PROGRAMS, PACKET
from iris_triton.collectives.packets.packet import alignment, clear, encode, poll, push, spot
from iris_triton.collectives.parts.barrier import arrive, await_all, claim, last_epoch, leave, row_words, send, sent
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, Plan
from iris_triton.collectives.parts.sizes import Blocks, carrier_of
from iris_triton.language.flags import await_flag, set_flag

ENC = tl.constexpr("sentinel")
_NAP_NS = tl.constexpr(100)  # between two looks at packets of all members
_FIRST_NAP_NS = tl.constexpr(500)  # between two at those of the member that comes last, before looking at all


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def split(
    out, inp, counters, control, local, bases, peers, me, rank, kind, nbytes, part, first, cap, slots, box, half,
    timeout_ns, status, in_sizes, in_strides, out_sizes, out_strides,
    N: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr, ITEM: tl.constexpr,
    IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr, IN_WHOLE: tl.constexpr, OUT_WHOLE: tl.constexpr, EVEN: tl.constexpr,
    BLOCK: tl.constexpr, SUB: tl.constexpr, ITER: tl.constexpr, LOOKS: tl.constexpr
):  # fmt: skip
    """Reduce this rank's part of all inputs, and store the results into all outputs, which are dense and on the heap.

    No program waits before its first push: results go only to members whose data of this call has come.  Where their
    outputs lie they say when they begin, by the words of the portable algorithms' barriers, and those are awaited
    before the first result; another barrier ends the call.

    A pushing program holds several packets in each thread, so that loads and stores overlap; a reducing one takes one
    packet of a thread at a time, from all members, and hands every chunk of results over by a flag of this rank.

    Args (beside those of `iris_triton.collectives.packets.exchange.exchange`):
        local: int32, a word of this rank for each pair; 0 between launches.
        first, cap: packet of each part with which this launch begins; packets of each part in it.
        slots: packets between what comes from two members in the mailbox.
        BLOCK, SUB: packets that a pushing, and a reducing, program handles at a time; BLOCK is a multiple of SUB.
        ITER: blocks of a chunk.
    """
    program = tl.program_id(0)
    pair = program // 2
    step = (tl.num_programs(0) // 2) * BLOCK
    epoch, found = boxes.look(counters, 1, me, N, LOOKS)
    claimed = boxes.advance(found, counters, epoch, 1, kind, peers, me, status, rank, N)
    mark = boxes.mark_of(epoch)
    to, origin = out.to(tl.int64), inp.to(tl.int64)
    part = tl.cast(part, tl.int64)
    total = tl.cast(nbytes, tl.int64)
    slot = tl.cast(slots, tl.int64) * 16
    own = peers[N - 1]
    at = tl.cast(box, tl.int64) + (epoch & 1).to(tl.int64) * half
    chunk = step * ITER
    chunks = (cap + chunk - 1) // chunk
    limit = limit_of(total, part, me, EVEN)
    begin = me * part
    row = control + pair * row_words(N)  # pairs are numbered like the programs of other kernels
    if program % 2 == 0:
        turn = last_epoch(row, N)
        send(row, bases, me, to - own, 0, N)
        turn += 1
        arrive(row, bases, me, turn, N)
        claim(row, me, turn, status, rank, N)
        for c in range(chunks + 1):
            if c < chunks:
                for i in tl.range(0, N - 1, loop_unroll_factor=1):  # unrolled, it would need three times the registers
                    member = (me + 1 + i) % N
                    there = boxes.pick(peers, i, N) + (at + i * slot)
                    length = limit_of(total, part, member, EVEN)
                    for s in range(c * chunk + pair * BLOCK, min(c * chunk + chunk, cap), step):
                        packet = s + tl.arange(0, BLOCK)
                        offset, flags = spot(first + packet, ENC)
                        words = load_data(
                            origin, member * part, offset, length, flags, in_sizes, in_strides, ENC, IN_WHOLE, ITEM,
                            IN_DIMS
                        )  # fmt: skip
                        mask = (packet < cap).to(tl.int32)
                        push(packet.to(tl.int64) * 16 + there, encode(words, mark, flags, ENC), mask, flags, ENC)
            if c == 1:
                await_all(row, me, turn, timeout_ns, status, rank, N)
            if c > 0:
                await_flag(local + pair, c, "ge", "acquire", "gpu", timeout_ns, tl.cast(status, tl.int64), rank)
                for i in tl.range(0, N - 1, loop_unroll_factor=1):
                    there = boxes.pick(peers, i, N) + sent(row, (me + 1 + i) % N, N)
                    whole = there % alignment(ENC) == 0
                    for s in range(c * chunk - chunk + pair * BLOCK, min(c * chunk, cap), step):
                        packet = s + tl.arange(0, BLOCK)
                        offset, flags = spot(first + packet, ENC)
                        length = tl.where(packet < cap, limit, 0)
                        words = load_data(
                            to, begin, offset, length, flags, out_sizes, out_strides, ENC, OUT_WHOLE, ITEM, OUT_DIMS
                        )
                        if OUT_WHOLE & whole:  # this rank's output, and that of the other one
                            store_data(
                                there, begin, offset, length, flags, out_sizes, out_strides, words, ENC, True, ITEM, 0
                            )
                        else:
                            store_data(
                                there, begin, offset, length, flags, out_sizes, out_strides, words, ENC, False, ITEM, 0
                            )
        tl.debug_barrier()
        tl.store(local + pair, 0)
        turn += 1
        arrive(row, bases, me, turn, N)
        await_all(row, me, turn, timeout_ns, status, rank, N)
        leave(row, turn, N)
    else:
        for c in range(chunks):
            for s in range(c * chunk + pair * BLOCK, min(c * chunk + chunk, cap), step):
                for part_of_block in range(0, BLOCK, SUB):
                    packet = s + part_of_block + tl.arange(0, SUB)
                    mask = (packet < cap).to(tl.int32)
                    offset, flags = spot(first + packet, ENC)
                    mine = packet.to(tl.int64) * 16 + (own + at)
                    words = load_data(
                        origin, me * part, offset, limit, flags, in_sizes, in_strides, ENC, IN_WHOLE, ITEM, IN_DIMS
                    )
                    last = mine + (N - 2) * slot
                    poll(last, slot, mark, mask, flags, timeout_ns, status, rank, 1, ENC, _FIRST_NAP_NS, N - 2, True)
                    raw = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N - 1, ENC, _NAP_NS, 0, True)
                    result = reduced(words + raw, N, 4, DT, OP)
                    length = tl.where(packet < cap, limit, 0)
                    store_data(
                        to, begin, offset, length, flags, out_sizes, out_strides, result, ENC, OUT_WHOLE, ITEM,
                        OUT_DIMS
                    )  # fmt: skip
                    clear(mine, slot, mask, N - 1)
            tl.debug_barrier()
            set_flag(local + pair, c + 1, "release", "gpu")
    boxes.end(counters, epoch + 1)
    boxes.confirm(counters, claimed, epoch, me, status, rank)


_CPU_BLOCK, _CPU_PAIRS = 256, 3
_GPU_WARPS, _GPU_PAIRS = 8, 132
_ITERATIONS = 4  # packets of a thread in a chunk
_FEW_NBYTES, _MANY_NBYTES = 1 << 20, 4 << 20  # of a part
_START_S, _BARRIER_S, _WIRE = 4e-6, 2.5e-6, 3.4e11  # of the model


class Split(PacketCollective):
    """all_reduce by pairs of programs."""

    tried = ({"comm_sms": 128}, {"num_warps": 16}, {"comm_sms": 132, "num_warps": 16})

    measured_only = True

    def __init__(self) -> None:
        super().__init__("all_reduce", "split", "sentinel")

    def _problem(self, request: CollectiveRequest) -> str:
        if problem := super()._problem(request):
            return problem
        if request.group_size < 2:
            return "it needs two ranks at least"
        if not request.direct_out:
            return "it stores results into the outputs of all, and this one is not on the heap, or strided"
        return ""

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: packets to all, and results as they are."""
        part = request.nbytes * (request.group_size - 1) / request.group_size
        return _START_S + _BARRIER_S + 2 * part / _WIRE

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        warps, sub, several, iterations = self._stretch(request)
        mailbox = boxes.mailbox_for(team, self._encoding, self._packets(request), team.size - 1, sub)
        pairs = self._pairs(request, mailbox.cap, sub * several, team.max_programs)
        arguments = self._arguments(request)
        arguments |= mailbox.arguments(team, 2 * pairs, warps or 1) | {
            "control": team.control.tensor.view(torch.int64),
            "local": team.region("split", 4 * MAX_PROGRAMS).tensor.view(torch.int32),
            "bases": team.bases,
            "nbytes": request.nbytes,
            "EVEN": arguments["part"] * team.size == request.nbytes,
            "slots": mailbox.cap,
            "SUB": sub,
            "ITER": iterations,
        }
        blocks = Blocks(2 * pairs, sub * several, {} if request.target.type is DeviceType.CPU else {"num_warps": warps})
        firsts = [i * mailbox.cap for i in range(mailbox.pieces)]
        return self.bind(split, team, blocks, arguments, carrier_of(request.dtype), firsts=firsts)

    def _launch_of(self, request: CollectiveRequest) -> tuple[int, ...]:
        warps, sub, several, iterations = self._stretch(request)
        return warps, several, iterations, self._pairs(request, self._packets(request), sub * several, MAX_PROGRAMS)

    def _stretch(self, request: CollectiveRequest) -> tuple[int, int, int, int]:
        """Warps; packets that a program holds one to a thread; how many a pushing thread holds; blocks of a chunk.

        Several packets in a thread keep more stores under way; several short blocks hand results over as often, and
        fill the programs more evenly where there are few.
        """
        config = request.options["config"]
        if request.target.type is DeviceType.CPU:
            warps = int(config.get("num_warps", 0))
            return warps, 32 * warps if warps else _CPU_BLOCK, 1, _ITERATIONS
        warps = int(config.get("num_warps", _GPU_WARPS))
        nbytes = self._packets(request) * PACKET
        several = 1 if _FEW_NBYTES < nbytes <= _MANY_NBYTES else 4
        return warps, 32 * warps, several, _ITERATIONS // several

    def _pairs(self, request: CollectiveRequest, packets: int, block: int, most: int) -> int:
        usual = 2 * (_CPU_PAIRS if request.target.type is DeviceType.CPU else _GPU_PAIRS)
        wanted = int(request.options["config"].get("comm_sms", usual)) // 2
        return max(1, min(wanted, most, MAX_PROGRAMS // 2, -(-packets // block)))
