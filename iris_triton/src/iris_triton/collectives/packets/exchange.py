"""`<encoding>_one_shot`, `_two_shot`: all_reduce; `_mailbox`: the other collectives.  No barrier.

Chosen on NVIDIA GPUs up to some MiB, as tables and models say: a call costs a launch and one hop (`exchange`) or two.
A message goes in pieces of `cap` packets; each is an epoch, and the epochs use the two halves of the mailbox in turn.
A member that sends packets of an epoch has received those of the one before from all, so all have read what the half
had two epochs ago.  For that every thread sends and receives equally many packets in each piece, some without data: as
all do that members other than the root send in a broadcast or scatter.
"""

from dataclasses import dataclass, replace

import triton
import triton.language as tl

from iris_core.dispatch.team import Team
from iris_core.types import CollectiveRequest, DeviceType
from iris_triton.collectives.packets import mailbox as boxes
from iris_triton.collectives.packets.arithmetic import reduced
from iris_triton.collectives.packets.base import ROOTS, PacketCollective
from iris_triton.collectives.packets.data import limit_of, load_data, store_data
from iris_triton.collectives.packets.mailbox import MAX_PROGRAMS, PACKET
from iris_triton.collectives.packets.packet import clear, data_words, decode, encode, packet_of, poll, push, spot
from iris_triton.collectives.parts.collective import PER_CALL, RUNTIME, Plan
from iris_triton.collectives.parts.sizes import Blocks, carrier_of
from iris_triton.language.asm import follow, let_next_start
from iris_triton.launcher import early_launch


@triton.jit
def _gather_parts(
    base, me, offset, total, part, flags, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, SHARDED: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr,
    ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Load the data of a packet for every member, in the order of `peers`; of one packet, if all get the same."""
    if SHARDED:
        words = ()
        for k in tl.static_range(N):
            member = (me + 1 + k) % N
            limit = limit_of(total, part, member, EVEN)
            words = words + load_data(base, member * part, offset, limit, flags, sizes, strides, ENC, WHOLE, ITEM, DIMS)
        return words
    else:
        limit = limit_of(total, part, 0, EVEN)
        return load_data(base, part * 0, offset, limit, flags, sizes, strides, ENC, WHOLE, ITEM, DIMS)


@triton.jit
def _push_all(
    peers, place, words, epoch, mask, flags,
    N: tl.constexpr, ENC: tl.constexpr, SHARDED: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Push a packet to the same place at every member; STEP: the warps go from one member to the next together."""
    W: tl.constexpr = data_words(ENC)
    raw = encode(packet_of(words, 0, W), epoch, flags, ENC)
    for k in tl.static_range(N):
        if SHARDED and k > 0:
            raw = encode(packet_of(words, k, W), epoch, flags, ENC)
        push(peers[k] + place, raw, mask, flags, ENC)
        if STEP and k + 1 < N:
            tl.debug_barrier()


@triton.jit
def _forward(
    peers, place, me, slot, mark, mask, flags, timeout_ns, status, rank,
    N: tl.constexpr, ENC: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr, STEP: tl.constexpr, NAP_NS: tl.constexpr
):  # fmt: skip
    """Reduce the data of all members between two hops, and push the result to all."""
    mine = peers[N - 1] + place
    came = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
    result = reduced(decode(came, N, ENC), N, data_words(ENC), DT, OP)
    _push_all(peers, place + (N + me) * slot, result, mark, mask, flags, N, ENC, False, STEP)
    if ENC == "sentinel":  # last: no peer waits for it, and the data no longer occupies registers
        clear(mine, slot, mask, N)


@triton.jit
def _deliver(
    to, came, offset, total, part, root, flags, sizes, strides,
    N: tl.constexpr, ENC: tl.constexpr, REDUCES: tl.constexpr, ROOT: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr,
    EVEN: tl.constexpr, WHOLE: tl.constexpr, ITEM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """Store the data of the last hop: reduced, the root's, or each member's in its own part of the output."""
    W: tl.constexpr = data_words(ENC)
    words = decode(came, N, ENC)
    if REDUCES:
        limit = limit_of(total, part, 0, EVEN)
        result = reduced(words, N, W, DT, OP)
        store_data(to, part * 0, offset, limit, flags, sizes, strides, result, ENC, WHOLE, ITEM, DIMS)
    elif ROOT == "from":
        result = ()
        for k in tl.static_range(W):
            word = words[k]
            for i in tl.static_range(1, N):
                word = tl.where(root == i, words[W * i + k], word)
            result = result + (word,)  # noqa: RUF005 - the compiler knows no star
        store_data(to, part * 0, offset, part, flags, sizes, strides, result, ENC, WHOLE, ITEM, DIMS)
    else:
        for i in tl.static_range(N):
            limit = limit_of(total, part, i, EVEN)
            store_data(
                to, i * part, offset, limit, flags, sizes, strides, packet_of(words, i, W), ENC, WHOLE, ITEM, DIMS
            )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def exchange(
    out, inp, counters, peers, me, rank, kind, nbytes, part, first, cap, pieces, box, half, timeout_ns, status, root,
    in_sizes, in_strides, out_sizes, out_strides,
    N: tl.constexpr, ENC: tl.constexpr, HOPS: tl.constexpr, SHARDED: tl.constexpr, REDUCES: tl.constexpr,
    ROOT: tl.constexpr, DT: tl.constexpr, OP: tl.constexpr, ITEM: tl.constexpr,
    IN_DIMS: tl.constexpr, OUT_DIMS: tl.constexpr,
    IN_WHOLE: tl.constexpr, OUT_WHOLE: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, NAP_NS: tl.constexpr, EARLY: tl.constexpr, LOOKS: tl.constexpr
):  # fmt: skip
    """Send a part to every member; reduce the received parts and send the result to all, reduce them, or store each.

    In one hop, it is an all_gather without SHARDED and REDUCES, an all_to_all with SHARDED, an all_reduce with REDUCES
    (each member reduces the same in the same order), a reduce_scatter with both; with ROOT "from" a broadcast or a
    scatter, with "to" a gather or a reduce.  In two hops it is an all_reduce: each member reduces its part of all
    inputs, and sends the result to all.  Every thread takes its own packets through both hops: no program waits for
    another one of its rank.

    Args (beside those of `iris_triton.collectives.pull.pull`):
        counters: int32[WORDS], the mailbox's.
        root: number of the member that alone sends data, or alone stores any.
        peers: addresses of the members' heaps, beginning with the next member and ending with the own one.
        nbytes: bytes of the whole input, in two hops; else None.
        part: bytes that go to a member; in two hops the last parts may be shorter, or empty.
        first: packet with which this launch begins.
        cap: packets of a piece; of whole lines.
        pieces: how many pieces this launch has; one, if the encoding is "sentinel".
        box, half: byte of the heap at which the mailbox begins; bytes of a half of it.
        N, ENC: number of members; the encoding, see `iris_triton.collectives.packets.packet`.
        SHARDED: the input has a part for each member, as in two hops; else all get the same.
        REDUCES: whether what came in the last hop is reduced.
        ROOT: "from" where only the root sends data, "to" where only it stores what came; else "".
        DT, OP, ITEM: elements and reduction, if anything is reduced; bytes of an element.
        IN_WHOLE, OUT_WHOLE: as WHOLE of `load_data`.
        EVEN: all parts have `part` bytes, as in one hop.
        ONCE: there is one piece, and the grid covers it, a packet for a thread: then nothing is a loop, and the data
            is loaded at the same time as the epoch.
        BLOCK: packets that a program handles at a time: at least one for each thread.
        STEP: the warps of a program go from peer to peer together.
        NAP_NS, EARLY, LOOKS: see `poll`, `iris_triton.language.asm.follow` and `Mailbox.arguments`.
    """
    follow(EARLY)
    program = tl.program_id(0)
    to, origin = out.to(tl.int64), inp.to(tl.int64)
    part = tl.cast(part, tl.int64)
    if HOPS == 2:
        total = tl.cast(nbytes, tl.int64)
    slot = tl.cast(cap, tl.int64) * 16
    if HOPS == 1:
        total = part * N
    sent, kept = total, total
    if ROOT == "from":
        sent = tl.where(me == root, total, 0)
    if ROOT == "to":
        kept = tl.where(me == root, total, 0)
    if ONCE:
        packet = program * BLOCK + tl.arange(0, BLOCK)
        mask = (packet < cap).to(tl.int32)
        offset, flags = spot(first + packet, ENC)
        words = _gather_parts(
            origin, me, offset, sent, part, flags, in_sizes, in_strides, N, ENC, SHARDED, EVEN, IN_WHOLE, ITEM, IN_DIMS
        )  # fmt: skip
        epoch, found = boxes.look(counters, 1, me, N, LOOKS)
        mark = boxes.mark_of(epoch)
        place = packet.to(tl.int64) * 16 + (tl.cast(box, tl.int64) + (epoch & 1).to(tl.int64) * half)
        _push_all(peers, place + me * slot, words, mark, mask, flags, N, ENC, SHARDED, STEP)
        claimed = boxes.advance(found, counters, epoch, 1, kind, peers, me, status, rank, N)
        if HOPS == 2:
            _forward(
                peers, place, me, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, DT, OP, STEP, NAP_NS
            )  # fmt: skip
            place += N * slot
        mine = peers[N - 1] + place
        came = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
        boxes.end(counters, epoch + 1)
        let_next_start(EARLY)
        _deliver(
            to, came, offset, kept, part, root, flags, out_sizes, out_strides, N, ENC, REDUCES, ROOT, DT, OP, EVEN,
            OUT_WHOLE, ITEM, OUT_DIMS
        )  # fmt: skip
        if ENC == "sentinel":
            clear(mine, slot, mask, N)
        boxes.confirm(counters, claimed, epoch, me, status, rank)
    else:
        step = tl.num_programs(0) * BLOCK
        epoch, found = boxes.look(counters, pieces, me, N, LOOKS)
        claimed = boxes.advance(found, counters, epoch, pieces, kind, peers, me, status, rank, N)
        for piece in range(pieces):
            at = tl.cast(box, tl.int64) + ((epoch + piece) & 1).to(tl.int64) * half
            mark = boxes.mark_of(epoch + piece)
            for s in range(program * BLOCK, cap, step):
                packet = s + tl.arange(0, BLOCK)
                mask = (packet < cap).to(tl.int32)
                offset, flags = spot(first + piece * cap + packet, ENC)
                words = _gather_parts(
                    origin, me, offset, sent, part, flags, in_sizes, in_strides, N, ENC, SHARDED, EVEN, IN_WHOLE,
                    ITEM, IN_DIMS
                )  # fmt: skip
                place = packet.to(tl.int64) * 16 + (at + me * slot)
                _push_all(peers, place, words, mark, mask, flags, N, ENC, SHARDED, STEP)
            inbox = peers[N - 1] + at
            if HOPS == 2:
                for s in range(program * BLOCK, cap, step):
                    packet = s + tl.arange(0, BLOCK)
                    mask = (packet < cap).to(tl.int32)
                    _, flags = spot(packet, ENC)
                    _forward(
                        peers, packet.to(tl.int64) * 16 + at, me, slot, mark, mask, flags, timeout_ns, status, rank, N,
                        ENC, DT, OP, STEP, NAP_NS
                    )  # fmt: skip
                inbox += N * slot
            for s in range(program * BLOCK, cap, step):
                packet = s + tl.arange(0, BLOCK)
                mask = (packet < cap).to(tl.int32)
                offset, flags = spot(first + piece * cap + packet, ENC)
                mine = packet.to(tl.int64) * 16 + inbox
                came = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, NAP_NS)
                _deliver(
                    to, came, offset, kept, part, root, flags, out_sizes, out_strides, N, ENC, REDUCES, ROOT, DT,
                    OP, EVEN, OUT_WHOLE, ITEM, OUT_DIMS
                )  # fmt: skip
                if ENC == "sentinel":
                    clear(mine, slot, mask, N)
        boxes.end(counters, epoch + pieces)
        boxes.confirm(counters, claimed, epoch, me, status, rank)


@dataclass(frozen=True, slots=True)
class Shape(Blocks):
    """Grid of a launch; `options` bound registers where more would prevent all programs from being resident."""

    step: bool = False  # the warps of a program go from peer to peer together
    nap_ns: int = 0  # nanoseconds to sleep between two looks at packets


_CPU_BLOCK, _CPU_PROGRAMS = 256, 4
_STEP_NBYTES, _NAP_NBYTES = 64 << 10, 2 << 20
_EARLY_NBYTES = 1 << 20  # of data for one member: a launch that comes up early saves time, nothing above
_HOP_S, _LAUNCH_S, _WIRE = 0.8e-6, 1.0e-6, 3.4e11  # of the model: seconds, seconds, bytes per second
_SENT_PER_BYTE = {"ll": 2.0, "ll128": 128 / 120, "sentinel": 1.0}  # by encoding


def shape_for(request: CollectiveRequest, packets: int, encoding: str, form: str) -> Shape:
    """Return how to divide a launch in which every member sends `packets` to each.

    One packet for each thread, and few warps for each program.  From 64 KB for a member on, it pays to let the warps go
    from member to member together; from 2 MB on, polling less often frees issue slots for those that push.
    """
    config = request.options["config"]
    if request.target.type is DeviceType.CPU:
        block = 32 * config["num_warps"] if "num_warps" in config else _CPU_BLOCK
        return Shape(max(1, min(config.get("comm_sms", _CPU_PROGRAMS), -(-packets // block))), block, {})
    nbytes, usual = packets * PACKET, 2
    if form == "two_shot" and encoding == "sentinel":  # about 128 programs, as long as they are small
        wide = min(16, triton.next_power_of_2(-(-packets // (128 * 32))))
        usual = wide if wide <= 8 else 4
    elif form == "mailbox" and nbytes >= _STEP_NBYTES:
        usual = 4
    usual = max(usual, min(8, triton.next_power_of_2(-(-packets // (MAX_PROGRAMS * 32)))))
    warps = config.get("num_warps", usual)
    block, most = 32 * warps, min(config.get("comm_sms", MAX_PROGRAMS), MAX_PROGRAMS)
    return Shape(
        max(1, min(most, -(-packets // block))),
        block,
        {"num_warps": warps} | ({"maxnreg": 64} if form == "two_shot" and encoding == "sentinel" else {}),
        step=form != "one_shot" and nbytes >= _STEP_NBYTES,
        nap_ns=100 if form != "two_shot" and nbytes >= _NAP_NBYTES else 0,
    )


class Exchange(PacketCollective):
    """One operation in one hop ("one_shot", "mailbox") or in two ("two_shot")."""

    deterministic = True

    tried = (  # not four warps and 64 programs: a config with its default values asks for nothing
        {"num_warps": 2}, {"num_warps": 8}, {"num_warps": 1}, {"comm_sms": 132, "num_warps": 8},
        {"comm_sms": 32, "num_warps": 16}, {"num_warps": 16},
    )  # fmt: skip

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: a launch, the hops, and what goes over the links."""
        others, size = request.group_size - 1, request.group_size
        part = request.nbytes / (size if self._hops == 2 else self._parts_of(request))
        sent = self._hops * others * part * _SENT_PER_BYTE[self._encoding]
        return _LAUNCH_S + self._hops * _HOP_S + sent / _WIRE

    def _launch_of(self, request: CollectiveRequest) -> tuple[int, ...]:
        shape = shape_for(request, self._packets(request), self._encoding, self._form)
        return shape.programs, shape.block

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        packets = self._packets(request)
        shape = shape_for(request, packets, self._encoding, self._form)
        mailbox = boxes.mailbox_for(team, self._encoding, packets, self._hops * team.size, shape.block)
        early = early_launch(team.device) if packets <= boxes.packets_for(_EARLY_NBYTES, self._encoding) else {}
        # That a peer's next packet comes after a place was cleared is sure only if a kernel has ended in between.
        launches = mailbox.pieces if self._encoding == "sentinel" else 1
        arguments = self._arguments(request)
        arguments |= mailbox.arguments(team, shape.programs, shape.options.get("num_warps", 1)) | {
            "pieces": mailbox.pieces // launches,
            "nbytes": request.nbytes if self._hops == 2 else None,
            "ENC": self._encoding,
            "HOPS": self._hops,
            "SHARDED": self._sharded or self._hops == 2,
            "REDUCES": self._reduces and self._hops == 1,
            "root": request.options.get("root", 0),
            "ROOT": ROOTS.get(self.op, ""),
            "EVEN": self.op not in ROOTS and (self._hops == 1 or arguments["part"] * team.size == request.nbytes),
            "ONCE": mailbox.pieces == 1 and shape.programs * shape.block >= mailbox.cap,
            "STEP": shape.step,
            "NAP_NS": shape.nap_ns,
            "EARLY": bool(early),
        }
        blocks = replace(shape, options={**shape.options, **early})
        firsts = [i * mailbox.cap for i in range(launches)]
        return self.bind(exchange, team, blocks, arguments, carrier_of(request.dtype), firsts=firsts)
