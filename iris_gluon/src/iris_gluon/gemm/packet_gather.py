"""`hopper_packets`: all_gather_matmul of few rows (up to 128).  A travels as packets while B's first blocks are loaded.

Chosen on Hopper where it was measured as the fastest one: then a product takes as long as B takes to be read, and the
gathering is done in that time as far as shared memory holds blocks of B.  Every program sends its part of this rank's
rows to all members, stores what came from them in local memory, and waits until all programs have done so.

Packets and mailbox are those of `iris_triton.collectives.packets`, and so is when a place of it is free again.
"""
# mypy: disable-error-code="assignment"

import sys
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from iris_core.dispatch.team import Host, lasting
from iris_core.errors import UnsupportedError
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import DeviceType, FusedRequest
from iris_gluon._compat import aggregate, barrier
from iris_gluon.gemm.fused import RUNTIME, UNIT, Hopper
from iris_triton.collectives.packets import mailbox as boxes
from iris_triton.collectives.packets.packet import clear, encode, poll, push
from iris_triton.collectives.parts.barrier import publish
from iris_triton.gemm.parts.fused import Plan, Tiling, arguments_of, bind, programs_for
from iris_triton.gemm.parts.tiles import PER_CALL
from iris_triton.language.blocks import lanes
from iris_triton.language.flags import await_flag, await_flags, lanes_for

_STEP = 64  # elements of the inner dimension, of which it must be a multiple
_ENC = gl.constexpr("sentinel")
_RUNTIME = (*RUNTIME, "kind", "rows", "inner", "slot", "steps", "box", "half")


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
        """Gather, and return the epoch; called by all warps of every program."""
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
        return epoch


@gluon.jit
def _copy(
    stages, stage, matrix, line, lines, column, columns, down, LINES: gl.constexpr, COLUMNS: gl.constexpr,
    NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Begin to copy a block of a matrix with dense rows to a stage, with zeros beyond its last line and column."""
    ACROSS: gl.constexpr = COLUMNS // 8 if COLUMNS < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [NUM_WARPS, 1], [1, 0])
    i = line + gl.arange(0, LINES, layout=gl.SliceLayout(1, layout))
    j = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    begin = gl.multiple_of(matrix.to(gl.int64).to(matrix.dtype), 16)  # here: calls drop what is promised
    whole = gl.cast(down, gl.int64) // 8 * 8
    place = begin + i.to(gl.int64)[:, None] * whole + j[None, :]
    is_there = (i < lines)[:, None] & (j < columns // 8 * 8)[None, :]
    async_copy.async_copy_global_to_shared(stages.index(stage), place, is_there)


@gluon.jit
def _copy_b(
    stages, stage, b, k, column, inner, columns, down, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    TURNED_B: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    if TURNED_B:
        _copy(stages, stage, b, column, columns, k, inner, down, BLOCK_N, BLOCK_K, NUM_WARPS)
    else:
        _copy(stages, stage, b, k, inner, column, columns, down, BLOCK_K, BLOCK_N, NUM_WARPS)


@gluon.jit
def _with_splits(
    acc, partial, words, tile, tiles, split, epoch, timeout_ns, status, rank, SPLITS: gl.constexpr
):  # fmt: skip
    """Hand the sums of a split over to the first program of the tile, or add those of the others to its own."""
    HEIGHT: gl.constexpr = acc.shape[1]
    i = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    j = gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, acc.type.layout))
    place = partial + tile * (acc.shape[0] * HEIGHT) + i[:, None] * HEIGHT + j[None, :]
    apart = tiles * (acc.shape[0] * HEIGHT)
    if split > 0:
        gl.store(place + (split - 1) * apart, acc)
        publish(words + split, epoch + 1, "gpu")
    else:
        for other in gl.static_range(1, SPLITS):
            await_flag(
                words + other, epoch + 1, "eq", "acquire", "gpu", gl.cast(timeout_ns, gl.int64),
                gl.cast(status, gl.int64), rank
            )  # fmt: skip
            acc += gl.load(place + (other - 1) * apart)
    return acc


@gluon.jit
def _store(
    acc, out, bias, column, m, n, down, right, bias_step, BIAS: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Store a transposed tile, with the bias."""
    ACROSS: gl.constexpr = acc.shape[0] // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [NUM_WARPS, 1], [1, 0])
    values = gl.convert_layout(acc.permute((1, 0)), layout)
    i = gl.arange(0, acc.shape[1], layout=gl.SliceLayout(1, layout))
    j = column + gl.arange(0, acc.shape[0], layout=gl.SliceLayout(0, layout))
    if BIAS == "columns":
        along = gl.load(bias + j.to(gl.int64) * bias_step, mask=j < n, other=0.0)
        values += along.to(gl.float32)[None, :]
    elif BIAS == "rows":
        along = gl.load(bias + i.to(gl.int64) * bias_step, mask=i < m, other=0.0)
        values += along.to(gl.float32)[:, None]
    target = out + i.to(gl.int64)[:, None] * down + j.to(gl.int64)[None, :] * right
    gl.store(target, values.to(out.dtype.element_ty), mask=(i < m)[:, None] & (j < n)[None, :])


@gluon.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def packet_gather(
    out, a, b, bias, gathered, words, partial, counters, bases, me, rank, kind, m, n, k, rows, inner, a_down, b_down,
    out_down, out_right, bias_step, tiles_n, steps, slot, box, half, timeout_ns, status,
    N: gl.constexpr, DIM: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, NUM_WARPS: gl.constexpr,
    PROGRAMS: gl.constexpr, COUNT: gl.constexpr, LOOKS: gl.constexpr
):  # fmt: skip
    """Gather A, and multiply it with B.  All programs have to be there at the same time: one for a tile, or SPLITS.

    The product is that of the transposed matrices: matrix units take 64 rows at least, which B has where A has few.

    Args (beside those of `push_product` and of `Gathering`):
        gathered: local memory for m x k elements.
        partial: float32, local memory for the tiles of all splits but the first.
        b_down: elements from row to row, or TURNED_B from column to column.
        steps: blocks of the inner dimension of a split; k is a multiple of BLOCK_K.
        DIM: 0 where members have rows of A, 1 where they have columns.
    """
    words_of_row = k // 2
    gathering = Gathering(
        a.to(gl.pointer_type(gl.int32)), gathered.to(gl.pointer_type(gl.int32)), words, bases, counters, me, rank, kind,
        gl.cast(box, gl.int64), gl.cast(half, gl.int64), gl.cast(timeout_ns, gl.int64), gl.cast(status, gl.int64),
        rows, inner, a_down // 2, words_of_row, gl.cast(rows * words_of_row if DIM == 0 else inner * 4, gl.int64),
        gl.cast(slot, gl.int64), N, PROGRAMS, COUNT, LOOKS,
    )  # fmt: skip
    tile, split = gl.program_id(0) % tiles_n, gl.program_id(0) // tiles_n
    column, first = tile * BLOCK_N, split * steps
    steps = gl.minimum(steps, k // BLOCK_K - first)
    element: gl.constexpr = a.dtype.element_ty
    B_ROWS: gl.constexpr = BLOCK_N if TURNED_B else BLOCK_K
    B_COLUMNS: gl.constexpr = BLOCK_K if TURNED_B else BLOCK_N
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_K], element)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([B_ROWS, B_COLUMNS], element)
    a_stages = gl.allocate_shared_memory(element, [STAGES, BLOCK_M, BLOCK_K], a_layout)
    b_stages = gl.allocate_shared_memory(element, [STAGES, B_ROWS, B_COLUMNS], b_layout)
    for i in gl.static_range(STAGES - 1):
        if i < steps:
            _copy_b(
                b_stages, i, b, (first + i) * BLOCK_K, column, k, n, b_down, BLOCK_N, BLOCK_K, TURNED_B, NUM_WARPS
            )  # fmt: skip
        async_copy.commit_group()
    epoch = gathering.run()
    for i in gl.static_range(STAGES - 1):
        if i < steps:
            _copy(a_stages, i, gathered, 0, m, (first + i) * BLOCK_K, k, k, BLOCK_M, BLOCK_K, NUM_WARPS)
        async_copy.commit_group()
    ALONG: gl.constexpr = NUM_WARPS if BLOCK_N >= 16 * NUM_WARPS else BLOCK_N // 16
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [ALONG, NUM_WARPS // ALONG], instr_shape=[16, BLOCK_M * ALONG // NUM_WARPS, 16]
    )
    pending = hopper.warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout))
    for i in range(steps):
        async_copy.wait_group(STAGES - 2)
        hopper.fence_async_shared()
        acc = hopper.warpgroup_mma_wait(0, deps=(pending,))
        barrier()  # the blocks of this step are there, and those of the step before were read
        block = b_stages.index(i % STAGES)
        block = block if TURNED_B else block.permute((1, 0))
        pending = hopper.warpgroup_mma(block, a_stages.index(i % STAGES).permute((1, 0)), acc, is_async=True)
        ahead = i + (STAGES - 1)
        if ahead < steps:
            at = (first + ahead) * BLOCK_K
            _copy(a_stages, ahead % STAGES, gathered, 0, m, at, k, k, BLOCK_M, BLOCK_K, NUM_WARPS)
            _copy_b(b_stages, ahead % STAGES, b, at, column, k, n, b_down, BLOCK_N, BLOCK_K, TURNED_B, NUM_WARPS)
        async_copy.commit_group()
    acc = hopper.warpgroup_mma_wait(0, deps=(pending,))
    async_copy.wait_group(0)
    if SPLITS > 1:
        acc = _with_splits(
            acc, partial, words + (PROGRAMS + tile * SPLITS), tile, tiles_n, split, epoch, timeout_ns, status, rank,
            SPLITS
        )  # fmt: skip
    if split == 0:
        _store(acc, out, bias, column, m, n, out_down, out_right, bias_step, BIAS, NUM_WARPS)


_MOST_ROWS, _MOST_SPLITS, _MOST_STAGES = 128, 4, 10
_SHARED_NBYTES = 220_000  # of a program, for its stages
_HELD = 8  # packets of a member that a thread takes at a time, at most


class HopperPackets(Hopper):
    """`hopper_packets` of all_gather_matmul."""

    deterministic = True
    scaled = ()
    rows_owned = False
    devices: tuple[DeviceType, ...] = (DeviceType.CUDA,)  # tests of the protocol emulate the assembly on others
    uses = ("block_size_n", "block_size_k", "num_stages", "num_sms", "num_warps")

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
        if request.k % _STEP:
            return f"the inner dimension must be a multiple of {_STEP}"
        return super()._problem(request)

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: as a library's product, then what goes over the links."""
        return product_s(request) + moving_s(request) + fixed_s(request, launches=1, barriers=0)

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return [{"block_size_n": 64}, {"block_size_n": 128}]

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        team, size, by_rows = host.team, host.team.size, request.options["gather_dim"] == 0
        config, dtype = request.options["config"], getattr(torch, request.dtype)
        most = programs_for(request, host, sys.maxsize)
        height = max(16, 1 << (request.m - 1).bit_length())
        width = config.get("block_size_n", 64 if request.n <= 64 * most else 128)
        deep = config.get("block_size_k", 2 * _STEP if height <= 64 and request.k % (2 * _STEP) == 0 else _STEP)
        warps = config.get("num_warps", 8 if height * width >= 8192 else 4)
        tiles = -(-request.n // width)
        if tiles > most:
            raise UnsupportedError(f"{self.name!r} needs a program for each of {tiles} tiles, and there are {most}")
        splits = max(1, min(most // tiles, _MOST_SPLITS, request.k // (4 * deep)))
        steps = -(-request.k // (splits * deep))
        splits = -(-request.k // (steps * deep))
        stage = (height + width) * deep * dtype.itemsize
        stages = config.get("num_stages", max(2, min(_MOST_STAGES, _SHARED_NBYTES // stage)))
        programs = tiles * splits
        rows, columns = (request.m // size, request.k) if by_rows else (request.m, request.k // size)
        inner, threads = columns // UNIT, 32 * warps
        each = -(-rows * inner // programs)
        count = threads * boxes.power_of_2(-(-each // threads), max(1, _HELD // max(1, size // 2)))
        mailbox = boxes.mailbox_for(team, "sentinel", rows * inner, size, 1)
        if mailbox.pieces > 1:
            raise UnsupportedError(f"{self.name!r} needs a workspace that holds all rows: see IRIS_CCL_WORKSPACE")
        words = lasting(lambda: torch.zeros(programs + tiles * splits, dtype=torch.int32, device=team.device))
        if words.is_cuda:
            torch.cuda.current_stream(words.device).synchronize()  # it may first be used on another stream
        gathered = host.scratch(request.m * request.k * dtype.itemsize, "gathered").view(dtype)
        partial = None
        if splits > 1:
            partial = host.scratch(4 * (splits - 1) * tiles * width * height, "parts of sums").view(torch.float32)
        constants = {
            "BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": deep, "STAGES": stages, "SPLITS": splits,
            "NUM_WARPS": warps, "PROGRAMS": programs, "COUNT": count, "LOOKS": boxes.looks_of(programs, warps),
            "N": size, "DIM": 0 if by_rows else 1, "TURNED_B": request.b_stride[1] != 1,
        }  # fmt: skip
        options = {"num_warps": warps}
        arguments = arguments_of(request, Tiling(height, width, constants, options), request.m, request.out_stride) | {
            "gathered": gathered, "words": words, "partial": partial, "counters": mailbox.counters, "rows": rows,
            "inner": inner, "kind": request.options.get("kind", 0), "slot": rows * inner * boxes.PACKET, "steps": steps,
            "box": mailbox.offset_bytes, "half": mailbox.half_nbytes, "b_down": max(request.b_stride),
        }  # fmt: skip
        return Plan(bind(request, host, packet_gather, programs, arguments, options), locks=words)
