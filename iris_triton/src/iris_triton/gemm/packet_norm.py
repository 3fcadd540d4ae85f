"""`sentinel_one_shot`, `sentinel_two_shot`: all_reduce_rms_norm for NVIDIA GPUs, by packets instead of barriers.

Chosen for few rows, and for more: a call costs a launch and one hop, or two, as the all_reduce of these names does,
whose mailbox it uses (`iris_triton.collectives.packets`).  In one shot a program sends its rows to all members, and
finishes each as soon as all have sent theirs; where there are several times as many programs as rows, they share rows,
and tell each other the sums of their squares and their largest elements.  In two shots it sends each to its owner,
which sums it and sends the sum to all.  Sums and residuals are those of `one_shot` and `two_shot`.

A place in the mailbox is free again two launches later: then all members have begun the launch in between, for each
has sent something that this one got, or without which an owner could not have sent its sums.
"""

import torch
import triton
import triton.language as tl

from iris_core.dispatch.team import Host
from iris_core.types import DeviceType, NormRequest
from iris_triton.collectives.packets import mailbox as boxes
from iris_triton.collectives.packets.arithmetic import elements_of, reduced
from iris_triton.collectives.packets.data import load_data
from iris_triton.collectives.packets.packet import clear, encode, poll, push
from iris_triton.collectives.parts.collective import RUNTIME, Plan
from iris_triton.gemm.reduce_norm import TENSORS, ReduceNorm, finish, row_of
from iris_triton.language.asm import follow, let_next_start
from iris_triton.launcher import BoundKernel, early_launch

ENC = tl.constexpr("sentinel")


@triton.jit
def _load(x, t, offset, limit, flags, ITEM: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the words of row `t`."""
    return load_data(x.to(tl.int64), t * limit, offset, limit, flags, (0,), (0,), ENC, ALIGNED, ITEM, 0)


@triton.jit
def _send(words, t, peers, me, at, slot, mark, offset, limit, mask, flags, N: tl.constexpr, TWO: tl.constexpr):
    """Send row `t` to its owner, or to all members."""
    raw = encode(words, mark, flags, ENC)
    if TWO:
        owner = boxes.pick(peers, (t + N - 1 - me) % N, N)
        push(owner + (at + me * slot + t // N * limit) + offset, raw, mask, flags, ENC)
    else:
        for k in tl.static_range(N):
            push(peers[k] + (at + me * slot + t * limit) + offset, raw, mask, flags, ENC)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=TENSORS)
def norm_packets(
    out, residual, x, weight, scales, counters, peers, me, rank, kind, rows, hidden, cap, box, half, eps, most,
    timeout_ns, status, parts,
    N: tl.constexpr, TWO: tl.constexpr, PARTS: tl.constexpr, DT: tl.constexpr, ITEM: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, LOOKS: tl.constexpr
):  # fmt: skip
    """Send all rows, and finish each; a program takes every `num_programs`-th row, and waits for those of its number.

    With TWO, row t belongs to member t % N.  In the mailbox are then what each member sends to this one, which owns
    rows, and the sums of each owner's.

    With PARTS, `rows` are parts of rows, `hidden` is of a part, and there is a program for each.

    Args (beside those of `iris_triton.gemm.reduce_norm.norm_one_shot`):
        counters, peers, cap, box, half, N, DT, ITEM, EARLY, LOOKS: see
            `iris_triton.collectives.packets.exchange.exchange`; rows are whole packets.
        parts: int64, words of this rank; see `iris_triton.gemm.reduce_norm.finish`.
        BLOCK: a power of two of packets, at least those of a row.
    """
    follow(EARLY)
    program, programs = tl.program_id(0), tl.num_programs(0)
    packets = hidden * ITEM // 16  # of a row
    slot = tl.cast(cap, tl.int64) * 16
    packet = tl.arange(0, BLOCK)
    mask = (packet < packets).to(tl.int32)
    flags = packet * 0
    offset = packet.to(tl.int64) * 16
    limit = tl.cast(packets, tl.int64) * 16
    ELEMENTS: tl.constexpr = BLOCK * 16 // ITEM
    words = _load(x, program, offset, limit, flags, ITEM, ALIGNED)  # at the same time as the epoch
    epoch, found = boxes.look(counters, 1, me, N, LOOKS)
    mark = boxes.mark_of(epoch)
    at = tl.cast(box, tl.int64) + (epoch & 1).to(tl.int64) * half
    _send(words, program, peers, me, at, slot, mark, offset, limit, mask, flags, N, TWO)
    for t in range(program + programs, rows, programs):
        words = _load(x, t, offset, limit, flags, ITEM, ALIGNED)
        _send(words, t, peers, me, at, slot, mark, offset, limit, mask, flags, N, TWO)
    claimed = boxes.advance(found, counters, epoch, 1, kind, peers, me, status, rank, N)
    factors = row_of(weight, program % PARTS, hidden, ALIGNED, ELEMENTS)
    if TWO:
        for t in range(program, rows, programs):
            if t % N == me:
                mine = peers[N - 1] + (at + t // N * limit) + offset
                came = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, 0)
                raw = encode(reduced(came, N, 4, DT, "sum"), mark, flags, ENC)
                for k in tl.static_range(N):
                    push(peers[k] + (at + (N + me) * slot + t // N * limit) + offset, raw, mask, flags, ENC)
                clear(mine, slot, mask, N)
    for t in range(program, rows, programs):
        before = row_of(residual, t, hidden, ALIGNED, ELEMENTS)
        if TWO:
            mine = peers[N - 1] + (at + (N + t % N) * slot + t // N * limit) + offset
            w0, w1, w2, w3 = flags, flags, flags, flags
            for i in tl.static_range(N):  # a report names the sender, which is a constant of the assembly
                if t % N == i:
                    w0, w1, w2, w3 = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, 1, ENC, 0, i)
            sums = (w0, w1, w2, w3)
        else:
            mine = peers[N - 1] + (at + t * limit) + offset
            came = poll(mine, slot, mark, mask, flags, timeout_ns, status, rank, N, ENC, 0)
            sums = reduced(came, N, 4, DT, "sum")
        if t + programs >= rows:  # it waits no more
            boxes.end(counters, epoch + 1)
            let_next_start(EARLY)
        kept = (sums[0] * mask, sums[1] * mask, sums[2] * mask, sums[3] * mask)  # of packets that were not awaited, 0
        finish(
            elements_of(kept, DT, ELEMENTS).to(tl.float32), before, factors, t, out, residual, scales, hidden, eps,
            most, ALIGNED, ELEMENTS, PARTS, parts, epoch + 1
        )  # fmt: skip
        if TWO:
            clear(mine, slot, mask, 1)
        else:
            clear(mine, slot, mask, N)
    boxes.confirm(counters, claimed, epoch, me, status, rank)


_PACKETS_OF_A_WARP, _PACKETS_OF_A_PROGRAM, _MOST_WARPS, _MOST_PARTS = 32, 128, 32, 8
_SECONDS, _HOP_S, _WIRE = 1.4e-6, 1.6e-6, 3.4e11  # of the model


def shape_of(row: int, warps: int | None = None) -> tuple[int, int]:
    """Return packets of a block and warps for rows of a number of packets: at least one packet for each thread.

    With fewer, several threads would hold the same packet, and one of them clear what another one still waits for.
    """
    block = triton.next_power_of_2(row)
    warps = warps or max(4, min(_MOST_WARPS, block // _PACKETS_OF_A_WARP))
    return max(block, 32 * warps), warps


class PacketNorm(ReduceNorm):
    """all_reduce_rms_norm in one hop of packets, or in two."""

    devices: tuple[DeviceType, ...] = (DeviceType.CUDA,)  # tests of the protocol emulate the assembly on others

    def __init__(self, shots: int, most_nbytes: int) -> None:
        super().__init__("sentinel_one_shot" if shots == 1 else "sentinel_two_shot", most_nbytes)
        self._shots = shots

    def _problem(self, request: NormRequest) -> str:
        if problem := super()._problem(request):
            return problem
        if request.group_size > boxes.MAX_MEMBERS:
            return f"it serves groups of up to {boxes.MAX_MEMBERS} ranks, and this one has {request.group_size}"
        if request.nbytes // max(1, request.rows) % boxes.PACKET:
            return f"rows are no multiple of {boxes.PACKET} bytes"
        return "" if request.target.type in self.devices else "its packets are assembly for NVIDIA GPUs"

    def cost(self, request: NormRequest) -> float:
        sent = (request.group_size - 1) * request.nbytes * (1 if self._shots == 1 else 2 / request.group_size)
        return _SECONDS + self._shots * _HOP_S + sent / _WIRE

    def _parts(self, request: NormRequest, row: int, programs: int) -> int:
        """Return how many programs share a row of a number of packets: as many as there are for each, by `comm_sms`.

        The sum of the squares is then made of theirs, and so is the largest element.
        """
        most, each = _MOST_PARTS, programs // request.rows
        while most > 1 and (most > each or row % most or self._shots == 2):
            most //= 2
        return most

    def prepare(self, request: NormRequest, host: Host) -> Plan:
        team, config, on_cpu = host.team, request.options["config"], request.target.type is DeviceType.CPU
        row = request.nbytes // request.rows // boxes.PACKET
        parts = self._parts(request, row, self.resident(request, host, 1, request.rows * row // _PACKETS_OF_A_PROGRAM))
        row //= parts
        block, warps = shape_of(row, config.get("num_warps"))
        two, size = self._shots == 2, team.size
        rows = request.rows * parts
        bands = -(-rows // size) if two else rows
        mailbox = boxes.mailbox_for(team, "sentinel", bands * row, self._shots * size)
        programs = min(self.resident(request, host, 2, boxes.MAX_PROGRAMS), rows)
        nbytes, words = 16 * boxes.MAX_PROGRAMS, None
        if parts > 1:
            words = team.region(f"parts of norms at {mailbox.offset_bytes}", nbytes).tensor[:nbytes].view(torch.int64)
        early = early_launch(team.device)
        arguments, names = self.arguments(request, team)
        arguments |= mailbox.arguments(team, programs, warps) | {
            "TWO": two, "parts": words, "PARTS": parts, "rows": rows, "hidden": request.hidden // parts, "BLOCK": block,
            "DT": getattr(tl, request.dtype), "ITEM": row * boxes.PACKET * parts // request.hidden,
            "EARLY": bool(early),
        }  # fmt: skip
        options = {} if on_cpu else {"num_warps": warps, **early}
        return self.planned(request, BoundKernel(norm_packets, programs, arguments, names, team.device, options))
