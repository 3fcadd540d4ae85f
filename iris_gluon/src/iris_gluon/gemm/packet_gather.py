"""`hopper_packets`: all_gather_matmul of few rows (up to 128).  A travels as packets while B's first blocks are loaded.

Chosen on Hopper where it was measured as the fastest one: then a product takes as long as B takes to be read, and the
gathering is done in that time as far as shared memory holds blocks of B.  Every program sends its part of this rank's
rows to all members, stores what came from them in local memory, and waits until all programs have done so.

Packets and mailbox are those of `iris_triton.collectives.packets`, and so is when a place of it is free again.
"""
# mypy: disable-error-code="assignment"

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.dispatch.team import Host, lasting
from iris_core.errors import UnsupportedError
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import DeviceType, FusedRequest
from iris_gluon._compat import aggregate
from iris_gluon.gemm.fused import RUNTIME, UNIT, Hopper, biased, matrix_at, operand
from iris_gluon.gemm.hopper import multiply_tiles
from iris_gluon.gemm.launch import GemmConfig
from iris_gluon.gemm.order import RowGroups
from iris_gluon.gemm.sinks import StoreTile
from iris_triton.collectives.packets import mailbox as boxes
from iris_triton.collectives.packets.packet import clear, encode, poll, push
from iris_triton.collectives.parts.barrier import publish
from iris_triton.gemm.parts.fused import Plan
from iris_triton.gemm.parts.tiles import PER_CALL
from iris_triton.language.blocks import lanes
from iris_triton.language.flags import await_flags, lanes_for

_ENC = gl.constexpr("sentinel")
_RUNTIME = (*RUNTIME, "kind", "rows", "inner", "slot", "box", "half")


@aggregate
class Gathering:
    """A of all members, as packets of 16 bytes, into local memory.

    Attributes:
        a, gathered: pointers to int32: this rank's rows; the rows of all.
        words: pointer to int32, one for each program: an epoch and 1 when it has stored its part.
        bases: pointer to int64, the members' heaps.
        counters, me, rank, kind, box, half, timeout_ns, status: see
            `iris_triton.collectives.packets.exchange.exchange`.
        rows, inner: of a member, the latter in packets.
        a_down, down, across: words from row to row of A, and of `gathered`, and from one member's part to the next.
        slot: bytes of the mailbox for one member.
        size, programs, count, looks: number of members; of programs; packets that a program takes at a time; see
            `iris_triton.collectives.packets.mailbox.looks_of` (constexprs).
    """

    a: gl.tensor
    gathered: gl.tensor
    words: gl.tensor
    bases: gl.tensor
    counters: gl.tensor
    me: gl.tensor
    rank: gl.tensor
    kind: gl.tensor
    box: gl.tensor
    half: gl.tensor
    timeout_ns: gl.tensor
    status: gl.tensor
    rows: gl.tensor
    inner: gl.tensor
    a_down: gl.tensor
    down: gl.tensor
    across: gl.tensor
    slot: gl.tensor
    size: gl.constexpr
    programs: gl.constexpr
    count: gl.constexpr
    looks: gl.constexpr

    @gluon.jit
    def run(self):
        """Gather; called by all warps of every program."""
        program, total = gl.program_id(0), self.rows * self.inner
        peers = ()
        for i in gl.static_range(self.size):
            peers = peers + (gl.load(self.bases + (self.me + 1 + i) % self.size),)  # noqa: RUF005
        epoch, found = boxes.look(self.counters, 1, self.me, self.size, self.looks)
        mark = boxes.mark_of(epoch)
        at = self.box + (epoch & 1).to(gl.int64) * self.half
        for s in range(program * self.count, total, self.programs * self.count):
            packet = s + lanes(self.count)
            mask = packet < total
            where = self.a + (packet // self.inner).to(gl.int64) * self.a_down + packet % self.inner * 4
            words = ()
            for k in gl.static_range(4):
                words = words + (gl.load(where + k, mask=mask, other=0),)  # noqa: RUF005
            raw = encode(words, mark, packet * 0, _ENC)
            place = packet.to(gl.int64) * 16 + (at + self.me * self.slot)
            for i in gl.static_range(self.size):
                push(peers[i] + place, raw, mask.to(gl.int32), packet * 0, _ENC)
        claimed = boxes.advance(
            found, self.counters, epoch, 1, self.kind, peers, self.me, self.status, self.rank, self.size
        )
        for s in range(program * self.count, total, self.programs * self.count):
            packet = s + lanes(self.count)
            mask = packet < total
            mine = packet.to(gl.int64) * 16 + (peers[self.size - 1] + at)
            came = poll(
                mine, self.slot, mark, mask.to(gl.int32), packet * 0, self.timeout_ns, self.status, self.rank,
                self.size, _ENC, 0
            )  # fmt: skip
            where = self.gathered + (packet // self.inner).to(gl.int64) * self.down + packet % self.inner * 4
            for i in gl.static_range(self.size):
                for k in gl.static_range(4):
                    gl.store(where + (i * self.across + k), came[4 * i + k], mask=mask)
            clear(mine, self.slot, mask.to(gl.int32), self.size)
        boxes.end(self.counters, epoch + 1)
        publish(self.words + program, epoch + 1, "gpu")
        lane = lanes_for(self.programs)
        await_flags(
            self.words + lane % self.programs, epoch + 1, lane < self.programs, "eq", "acquire", "gpu", self.timeout_ns,
            self.status, self.rank
        )  # fmt: skip
        boxes.confirm(self.counters, claimed, epoch, self.me, self.status, self.rank)


@gluon.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def packet_gather(
    out, a, b, bias, gathered, words, counters, bases, me, rank, kind, m, n, k, rows, inner, a_down, b_down, out_down,
    bias_step, tiles_n, k_tiles, slot, box, half, timeout_ns, status,
    N: gl.constexpr, DIM: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr,
    PROGRAMS: gl.constexpr, COUNT: gl.constexpr, LOOKS: gl.constexpr
):  # fmt: skip
    """Gather A, and multiply it with B.  All programs have to be there at the same time.

    Args (beside those of `push_product` and of `Gathering`):
        gathered: local memory for m x k elements.
        DIM: 0 where members have rows of A, 1 where they have columns.
    """
    words_of_row = k // 2
    gathering = Gathering(
        a.to(gl.pointer_type(gl.int32)), gathered.to(gl.pointer_type(gl.int32)), words, bases, counters, me, rank, kind,
        gl.cast(box, gl.int64), gl.cast(half, gl.int64), gl.cast(timeout_ns, gl.int64), gl.cast(status, gl.int64),
        rows, inner, a_down // 2, words_of_row, gl.cast(rows * words_of_row if DIM == 0 else inner * 4, gl.int64),
        gl.cast(slot, gl.int64), N, PROGRAMS, COUNT, LOOKS,
    )  # fmt: skip
    sink = StoreTile(matrix_at(out.to(gl.int64), out, m, n, gl.cast(out_down, gl.int64), BLOCK_M, BLOCK_N // PARTS))
    multiply_tiles(
        operand(gathered, m, k, k, BLOCK_M, BLOCK_K, False), operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        RowGroups(gl.to_tensor(1), tiles_n, 1), biased(sink, bias, bias_step, m, n, BIAS), tiles_n, k_tiles, STAGES,
        PARTS, NUM_WARPS, False, TURNED_B, None, None, out.dtype.element_ty, gathering
    )  # fmt: skip


_MOST_ROWS, _MOST_STAGES = 128, 12
_HELD = 8  # packets of a member that a thread takes at a time, at most


class HopperPackets(Hopper):
    """`hopper_packets` of all_gather_matmul."""

    deterministic = True
    scaled = ()
    rows_owned = False
    devices: tuple[DeviceType, ...] = (DeviceType.CUDA,)  # tests of the protocol emulate the assembly on others
    uses = ("block_size_n", "num_stages", "num_sms")

    def _problem(self, request: FusedRequest) -> str:
        size = request.group_size
        if request.target.type not in self.devices:
            return "its packets are assembly for NVIDIA GPUs"
        if request.m > _MOST_ROWS or size > boxes.MAX_MEMBERS:
            return f"it serves products of up to {_MOST_ROWS} rows, in groups of up to {boxes.MAX_MEMBERS} ranks"
        if request.dtype not in ("bfloat16", "float16"):
            return f"its packets carry floats of 16 bits, and not {request.dtype}"
        if request.a_stride[1] != 1 or request.k // (1 if request.options["gather_dim"] == 0 else size) % UNIT:
            return "A must have dense rows of a multiple of 16 bytes"
        if request.out_stride[1] != 1 or request.out_stride[0] % UNIT or not request.aligned[2]:
            return "TMA needs dense rows of the output that begin at multiples of 16 bytes"
        return super()._problem(request)

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: as a library's product, then what goes over the links."""
        return product_s(request) + moving_s(request) + fixed_s(request, launches=1, barriers=0)

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return [{"block_size_n": 64}, {"block_size_n": 128}]

    def _gemm(self, request: FusedRequest, processors: int) -> GemmConfig:
        config, wide = request.options["config"], request.m > 64
        columns = config.get("block_size_n", 64 if request.n <= 64 * processors else 128)
        given = {"block_m": 128 if wide else 64, "block_n": columns, "parts": 1, "num_warps": 8 if wide else 4}
        given |= {"group": 1, "maxnreg": 168 if wide else 255}
        most = config.get("num_stages", _MOST_STAGES)
        for stages in range(most, 1, -1):  # as many as shared memory holds
            try:
                return GemmConfig(**given, stages=stages)
            except ValueError:
                if "num_stages" in config or stages == 2:
                    raise
        return GemmConfig(**given, stages=most)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        team, size, by_rows = host.team, host.team.size, request.options["gather_dim"] == 0
        gemm, programs = self._launch(request, host)
        rows, columns = (request.m // size, request.k) if by_rows else (request.m, request.k // size)
        inner, threads = columns // UNIT, 32 * gemm.num_warps
        each = -(-rows * inner // programs)
        count = threads * boxes.power_of_2(-(-each // threads), max(1, _HELD // max(1, size // 2)))
        mailbox = boxes.mailbox_for(team, "sentinel", rows * inner, size, 1)
        if mailbox.pieces > 1:
            raise UnsupportedError(f"{self.name!r} needs a workspace that holds all rows: see IRIS_CCL_WORKSPACE")
        words = lasting(lambda: torch.zeros(programs, dtype=torch.int32, device=team.device))
        if words.is_cuda:
            torch.cuda.current_stream(words.device).synchronize()  # it may first be used on another stream
        nbytes = request.m * request.k * 2
        gathered = host.scratch(nbytes, "gathered")[:nbytes].view(getattr(torch, request.dtype))
        kernel = self._bind(
            request, host, packet_gather, programs, gemm, gathered=gathered, words=words, counters=mailbox.counters,
            rows=rows, inner=inner, kind=request.options.get("kind", 0), slot=rows * inner * boxes.PACKET,
            box=mailbox.offset_bytes, half=mailbox.half_nbytes, N=size, DIM=0 if by_rows else 1, PROGRAMS=programs,
            COUNT=count, LOOKS=boxes.looks_of(programs, gemm.num_warps),
        )  # fmt: skip
        return Plan(kernel, locks=words)
