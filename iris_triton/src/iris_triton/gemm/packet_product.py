"""`packets`: products of up to 512 rows on NVIDIA GPUs, in one launch, whose tiles or whose A travel as packets.

Chosen for few rows, as measurements say: then a product takes as long as B takes to be read, and what matters is that
nothing is added to that.  Programs divide the tiles, and where these are few also the inner dimension (split-K);
partial sums of a tile are added by its first program, in order.  What travels::

    matmul_all_reduce       tiles go to all members, each of which adds them up; of many
                            bytes, a member adds up its rows, and sends the sums to all
    matmul_reduce_scatter   rows go to the member that gets them
    matmul_all_gather       tiles go to all members
    all_gather_matmul       A goes to all members, into local memory

Packets and mailbox are those of `iris_triton.collectives.packets`, and so is when a place of it is free again.
Products are rounded to the output's type before they are sent, and summed in the group's order, in float32.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from iris_core.dispatch.products import SCALED_BLOCK
from iris_core.dispatch.team import Host, rounded
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import DeviceType, FusedRequest
from iris_triton.collectives.packets import mailbox as boxes
from iris_triton.collectives.packets.arithmetic import elements_of, words_of
from iris_triton.collectives.packets.packet import clear, encode, packet_of, poll, push
from iris_triton.collectives.parts.barrier import publish
from iris_triton.collectives.parts.elements import item_nbytes
from iris_triton.gemm.parts import tiles as parts
from iris_triton.gemm.parts.fused import USED_CONFIG, Fused, Plan, Tiling, arguments_of, bind, tiling
from iris_triton.language.asm import follow, let_next_start
from iris_triton.language.flags import await_flag, await_flags, lanes_for
from iris_triton.launcher import early_launch

_SCALED_BLOCK = tl.constexpr(SCALED_BLOCK)
ENC = tl.constexpr("sentinel")


@triton.jit
def _load_part(a, s, total, inner, a_down, a_right, C: tl.constexpr):
    """Load C packets of A, of `total` elements."""
    EACH: tl.constexpr = 16 // item_nbytes(a.dtype)
    element = s * EACH + tl.arange(0, C * EACH)
    where = a + (element // inner).to(tl.int64) * a_down + (element % inner).to(tl.int64) * a_right
    return words_of(tl.load(where, mask=element < total, other=0.0), C)


@triton.jit
def _send_part(part, s, packets, peers, at, mark, N: tl.constexpr, C: tl.constexpr):
    """Send C packets of A, whose first has number s, to all members."""
    packet = s + tl.arange(0, C)
    raw = encode(part, mark, packet * 0, ENC)
    for i in tl.static_range(N):
        push(peers[i] + at + packet.to(tl.int64) * 16, raw, (packet < packets).to(tl.int32), packet * 0, ENC)


@triton.jit
def _store_parts(
    gathered, words, peers, at, slot, mark, epoch, rows, inner, k, timeout_ns, status, rank,
    N: tl.constexpr, DIM: tl.constexpr, PROGRAMS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Store this program's packets of A from all members, and publish that they are there."""
    EACH: tl.constexpr = 16 // item_nbytes(gathered.dtype)
    packets = rows * (inner // EACH)
    for s in range(tl.program_id(0) * C, packets, PROGRAMS * C):
        packet, element = s + tl.arange(0, C), s * EACH + tl.arange(0, C * EACH)
        mask, row, column = (packet < packets).to(tl.int32), element // inner, element % inner
        mine = peers[N - 1] + at + packet.to(tl.int64) * 16
        came = poll(mine, slot, mark, mask, mask * 0, timeout_ns, status, rank, N, ENC, 0)
        for i in tl.static_range(N):
            values = elements_of(packet_of(came, i, 4), gathered.dtype.element_ty, C * EACH)
            line, right = (i * rows + row, column) if DIM == 0 else (row, i * inner + column)
            tl.store(gathered + (line.to(tl.int64) * k + right), values, mask=element < packets * EACH)
    publish(words + tl.program_id(0), epoch + 1, "gpu")


@triton.jit
def _await_parts(
    words, own, slot, epoch, packets, timeout_ns, status, rank,
    N: tl.constexpr, PROGRAMS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Clear this program's packets, now that the others need not wait for it, and wait for what they publish."""
    for s in range(tl.program_id(0) * C, packets, PROGRAMS * C):
        packet = s + tl.arange(0, C)
        clear(own + packet.to(tl.int64) * 16, slot, (packet < packets).to(tl.int32), N)
    lanes = lanes_for(PROGRAMS)
    await_flags(  # for longer than a program waits for packets, whose report names their sender
        words + lanes % PROGRAMS, epoch + 1, lanes < PROGRAMS, "eq", "acquire", "gpu",
        2 * tl.cast(timeout_ns, tl.int64), tl.cast(status, tl.int64), rank
    )  # fmt: skip


@triton.jit
def _send_tile(
    acc, peers, at, slot, me, mark, m, n, rows, first, column,
    N: tl.constexpr, DT: tl.constexpr, OWNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Send a tile, float32[BM, BN], to all members, or with OWNED each row to the member that owns it."""
    EACH: tl.constexpr = 128 // DT.primitive_bitwidth
    ACROSS: tl.constexpr = BN // EACH  # packets of a row
    words = words_of(tl.reshape(acc.to(DT), (BM * BN,)), BM * ACROSS)
    packet = tl.arange(0, BM * ACROSS)
    row, j = first + packet // ACROSS, column + packet % ACROSS * EACH
    flags = packet * 0
    mask = ((row < m) & (j < n)).to(tl.int32)
    raw = encode(words, mark, flags, ENC)
    if OWNED:
        owner = row // rows
        there = boxes.pick(peers, (owner + (N - 1) - me) % N, N)
        place = ((row - owner * rows).to(tl.int64) * n + j) // EACH * 16
        push(there + (at + me * slot) + place, raw, mask, flags, ENC)
    else:
        place = (row.to(tl.int64) * n + j) // EACH * 16 + (at + me * slot)
        for i in tl.static_range(N):
            push(peers[i] + place, raw, mask, flags, ENC)


@triton.jit
def _store(out, values, row, column, mask, down, right, ALIGNED: tl.constexpr):
    target = parts.wide(out, ALIGNED) + (row.to(tl.int64) * down + column.to(tl.int64) * right)
    tl.store(target, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _receive(
    out, bias, peers, at, slot, me, mark, m, n, rows, out_down, out_right, bias_step, timeout_ns, status, rank,
    N: tl.constexpr, FORM: tl.constexpr, DIM: tl.constexpr, DT: tl.constexpr, BIAS: tl.constexpr,
    ALIGNED: tl.constexpr, PROGRAMS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """Store what members have sent, or the sums; with FORM "two" send the sums to all, and store what comes then.

    Programs take their packets in turn, whoever has computed them.
    """
    EACH: tl.constexpr = 128 // DT.primitive_bitwidth
    begin, step = tl.program_id(0) * C, PROGRAMS * C
    before = me * rows if FORM == "two" or FORM == "rows" else 0  # rows before those that this rank owns
    owned = tl.minimum(tl.maximum(m - before, 0), rows)
    own = peers[N - 1] + at
    for s in range(begin, owned * (n // EACH), step):
        packet, element = s + tl.arange(0, C), s * EACH + tl.arange(0, C * EACH)
        mask = (packet < owned * (n // EACH)).to(tl.int32)
        is_there = element < owned * n
        row, column = element // n, element % n
        place = packet.to(tl.int64) * 16
        came = poll(own + place, slot, mark, mask, mask * 0, timeout_ns, status, rank, N, ENC, 0)
        acc = tl.zeros((C * EACH,), tl.float32)
        for i in tl.static_range(N):
            values = elements_of(packet_of(came, i, 4), DT, C * EACH)
            if FORM == "all":
                down, right = (i * m, 0) if DIM == 0 else (0, i * n)
                _store(out, values, row + down, column + right, is_there, out_down, out_right, ALIGNED)
            else:
                acc += values.to(tl.float32)
        if FORM != "all":
            if BIAS == "columns":
                acc += tl.load(bias + column.to(tl.int64) * bias_step, mask=is_there, other=0.0).to(tl.float32)
            elif BIAS == "rows":
                of_row = row if FORM == "rows" else before + row
                acc += tl.load(bias + of_row.to(tl.int64) * bias_step, mask=is_there, other=0.0).to(tl.float32)
            if FORM == "two":
                raw = encode(words_of(acc.to(DT), C), mark, mask * 0, ENC)
                for i in tl.static_range(N):
                    push(peers[i] + (at + (N + me) * slot) + place, raw, mask, mask * 0, ENC)
            else:
                _store(out, acc, row, column, is_there, out_down, out_right, ALIGNED)
        clear(own + place, slot, mask, N)
    if FORM == "two":
        for i in tl.static_range(N):  # a report names the sender, which is a constant of the assembly
            total = tl.minimum(tl.maximum(m - i * rows, 0), rows) * (n // EACH)
            for s in range(begin, total, step):
                packet, element = s + tl.arange(0, C), s * EACH + tl.arange(0, C * EACH)
                mask = (packet < total).to(tl.int32)
                mine = own + (N + i) * slot + packet.to(tl.int64) * 16
                came = poll(mine, slot, mark, mask, mask * 0, timeout_ns, status, rank, 1, ENC, 0, i)
                values, is_there = elements_of(came, DT, C * EACH), element < total * EACH
                _store(out, values, i * rows + element // n, element % n, is_there, out_down, out_right, ALIGNED)
                clear(mine, slot, mask, 1)


_RUNTIME = (*parts.RUNTIME, "rows", "slot", "kind", "box", "half")


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=parts.PER_CALL)
def packet_product(
    out, a, b, bias, counters, peers, partial, words, gathered, me, rank, kind, m, n, k, rows, inner, span, a_down,
    a_right, b_down, b_right, out_down, out_right, bias_step, tiles_m, tiles_n, slot, box, half, timeout_ns, status,
    a_scales, b_scales, a_scale_down, a_scale_right, b_scale_down, b_scale_right,
    N: tl.constexpr, FORM: tl.constexpr, DIM: tl.constexpr, DT: tl.constexpr, BIAS: tl.constexpr,
    A_ALIGNED: tl.constexpr, B_ALIGNED: tl.constexpr, OUT_ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr, A_CACHE: tl.constexpr,
    B_CACHE: tl.constexpr, STAGES: tl.constexpr, SCALES: tl.constexpr, SPLITS: tl.constexpr, TURNED: tl.constexpr,
    PROGRAMS: tl.constexpr, C: tl.constexpr, LOOKS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Multiply, and exchange tiles or A.  All programs have to be there at the same time.

    Args (beside those of `iris_triton.gemm.parts.tiles`):
        counters, peers, kind, box, half, N, LOOKS, EARLY: see `iris_triton.collectives.packets.exchange.exchange`.
        partial: float32, local memory for the tiles of all splits but the first.
        words: int32, this rank's: of programs, then of tiles and splits; an epoch and 1 when what they say is there.
        gathered: local memory for A of all members, m x k; None but for all_gather_matmul.
        rows, inner: what a member sends of A; else the rows that it owns, of m.
        span: inner dimension of a split.
        slot: bytes of the mailbox for what one member sends in one hop.
        FORM: "all" (tiles to all), "sum" (also, and they are summed), "rows" (rows to their owner, who sums them),
            "two" (the same, and the owner sends the sums to all), "a" (A to all).
        DT: type of what is summed or gathered.
        SPLITS, TURNED: programs that share a tile; see `add_product`.
        C: packets that are received at a time: one for each thread at least.
    """
    follow(EARLY)
    program = tl.program_id(0)
    groups: tl.constexpr = PROGRAMS // SPLITS
    group, split = program % groups, program // groups
    first = split * span
    end = tl.minimum(first + span, k)
    if FORM == "a":  # it comes with the epoch
        part = _load_part(parts.wide(a, A_ALIGNED), program * C, rows * inner, inner, a_down, a_right, C)
    epoch, found = boxes.look(counters, 1, me, N, LOOKS)
    at = tl.cast(box, tl.int64) + (epoch & 1).to(tl.int64) * half
    slot = tl.cast(slot, tl.int64)
    mark = boxes.mark_of(epoch)
    tile_words = words
    if FORM == "a":
        packets = rows * (inner // (16 // item_nbytes(a.dtype)))
        _send_part(part, program * C, packets, peers, at + me * slot, mark, N, C)
        for s in range((program + PROGRAMS) * C, packets, PROGRAMS * C):
            part = _load_part(parts.wide(a, A_ALIGNED), s, rows * inner, inner, a_down, a_right, C)
            _send_part(part, s, packets, peers, at + me * slot, mark, N, C)
        _store_parts(
            gathered, words, peers, at, slot, mark, epoch, rows, inner, k, timeout_ns, status, rank, N, DIM, PROGRAMS, C
        )
        claimed = boxes.advance(found, counters, epoch, 1, kind, peers, me, status, rank, N)
        _await_parts(words, peers[N - 1] + at, slot, epoch, packets, timeout_ns, status, rank, N, PROGRAMS, C)
        let_next_start(EARLY)
        tile_words += PROGRAMS
        left, left_down = gathered, k
    else:
        left, left_down = parts.wide(a, A_ALIGNED), a_down
    if SCALES == "blocks":
        a_scales += first // _SCALED_BLOCK * a_scale_right
        b_scales += first // _SCALED_BLOCK * b_scale_down
    for t in range(group, tiles_m * tiles_n, groups):
        down, right = parts.place(t, tiles_m, tiles_n, GROUP)
        row, column = down * BM, right * BN
        ROWS: tl.constexpr = BN if TURNED else BM
        acc = tl.zeros((ROWS, BM + BN - ROWS), tl.float32)
        acc = parts.add_product(
            acc, left + tl.cast(first, tl.int64) * (1 if FORM == "a" else a_right),
            parts.wide(b, B_ALIGNED) + tl.cast(first, tl.int64) * b_down, row, column, m, n, end - first,
            left_down, 1 if FORM == "a" else a_right, b_down, b_right, a_scales, b_scales, a_scale_down, a_scale_right,
            b_scale_down, b_scale_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES, SCALES, TURNED
        )  # fmt: skip
        lanes = tl.arange(0, ROWS)[:, None] * (BM + BN - ROWS) + tl.arange(0, BM + BN - ROWS)[None, :]
        if SPLITS > 1:
            apart = tl.cast(tiles_m * tiles_n, tl.int64) * (BM * BN)
            place = partial + tl.cast(t, tl.int64) * (BM * BN) + lanes
            if split > 0:
                tl.store(place + (split - 1) * apart, acc)
                publish(tile_words + (t * SPLITS + split), epoch + 1, "gpu")
            else:
                for i in tl.static_range(1, SPLITS):
                    await_flag(
                        tile_words + (t * SPLITS + i), epoch + 1, "eq", "acquire", "gpu", timeout_ns,
                        tl.cast(status, tl.int64), rank
                    )  # fmt: skip
                    acc += tl.load(place + (i - 1) * apart)
        if split == 0:
            tile = acc.trans() if TURNED else acc
            if FORM == "a" or FORM == "all":  # a member's bias is that of its product
                tile = parts.with_bias(tile, bias, row, column, m, n, bias_step, BIAS, BM, BN)
            if FORM == "a":
                parts.store_tile(parts.wide(out, OUT_ALIGNED), tile, row, column, m, n, out_down, out_right, BM, BN)
            else:
                _send_tile(
                    tile, peers, at, slot, me, mark, m, n, rows, row, column, N, DT, FORM == "rows" or FORM == "two",
                    BM, BN
                )  # fmt: skip
    if FORM != "a":  # only now: nothing waits for the epoch before
        claimed = boxes.advance(found, counters, epoch, 1, kind, peers, me, status, rank, N)
        _receive(
            out, bias, peers, at, slot, me, mark, m, n, rows, out_down, out_right, bias_step, timeout_ns, status, rank,
            N, FORM, DIM, DT, BIAS, OUT_ALIGNED, PROGRAMS, C
        )  # fmt: skip
        let_next_start(EARLY)
    boxes.end(counters, epoch + 1)
    boxes.confirm(counters, claimed, epoch, me, status, rank)


_MOST_ROWS, _FEW_ROWS, _MOST_SPLITS = 512, 128, 8
_EARLY_NBYTES = 32 << 20  # of B, for products whose A travels: of more, they are slower if they come up early (H200)
_SHARED_NBYTES = {"sm_90": 200_000, "sm_100": 200_000, "": 96_000}  # of a program, for its stages
_MANY = 4096  # elements of a tile from which on 8 warps are faster than 4 (H200)
_SMALL_STAGE = 16384  # bytes, of which more than 6 are faster (H200)
_HELD = 16  # packets that a thread receives at a time, of all members
_UNUSED = "block_size_m", "num_xcds", "chunk_size"  # fields of the config
_HOP_S, _WIRE = 1.0e-6, 3.4e11  # of the model: seconds, and bytes per second


class PacketProduct(Fused):
    """`packets`."""

    deterministic = True
    devices: tuple[DeviceType, ...] = (DeviceType.CUDA,)  # tests of the protocol emulate the assembly on others
    uses = tuple(name for name in USED_CONFIG if name not in _UNUSED)
    serves: ClassVar[dict[str, Any]] = {"layout": "torch"}

    def _problem(self, request: FusedRequest) -> str:
        if problem := super()._problem(request):
            return problem
        if request.target.type not in self.devices:
            return "its packets are assembly for NVIDIA GPUs"
        if request.group_size > boxes.MAX_MEMBERS:
            return f"it serves groups of up to {boxes.MAX_MEMBERS} ranks, and this one has {request.group_size}"
        if request.m > _MOST_ROWS:
            return f"it serves products of up to {_MOST_ROWS} rows"
        dtype = getattr(torch, request.dtype if self.op == "all_gather_matmul" else request.out_dtype)
        if not dtype.is_floating_point or dtype.itemsize not in (2, 4):
            return f"its packets carry floats of 16 and 32 bits, and not {dtype}"
        if self._sent(request)[1] * dtype.itemsize % boxes.PACKET:
            return "rows are no multiple of 16 bytes"
        tiles, warps = self._tiling(request), request.options["config"].get("num_warps", 1)
        if self.op != "all_gather_matmul" and warps > (most := self._most_warps(request, tiles.block_m, tiles.block_n)):
            return f"num_warps is {warps}, and the packets of a tile are enough for {most}"
        return ""

    def _most_warps(self, request: FusedRequest, rows: int, columns: int) -> int:
        """Return how many warps send a tile, at least a packet for each thread.

        With fewer, several threads would send the same packet, and one of them after it was received and cleared.
        """
        item: int = getattr(torch, request.out_dtype).itemsize
        return rows * columns * item // (32 * boxes.PACKET)

    def _sent(self, request: FusedRequest) -> tuple[int, int]:
        """Return rows and columns of what a member sends to one other: of the product, or of A."""
        size = request.group_size
        if self.op == "all_gather_matmul":
            by_rows = request.options["gather_dim"] == 0
            return (request.m // size, request.k) if by_rows else (request.m, request.k // size)
        return request.m // size if self.op == "matmul_reduce_scatter" else request.m, request.n

    def _form(self, request: FusedRequest) -> str:
        if self.op != "matmul_all_reduce":
            return {"matmul_reduce_scatter": "rows", "matmul_all_gather": "all", "all_gather_matmul": "a"}[self.op]
        item, size = getattr(torch, request.out_dtype).itemsize, request.group_size
        rows = -(-request.m // size)  # of the member that sends most in two hops: what it owns, twice
        saved = (size - 1) * (request.m - 2 * rows) * request.n * item
        return "two" if saved > _HOP_S * _WIRE else "sum"

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product, of few rows and 16 bits as a library's, then what goes over the links."""
        is_read = request.m <= _FEW_ROWS and request.dtype != "float32"  # B's reading is what takes time
        efficiency = None if is_read else self.efficiency.get(request.target.arch, self.efficiency[""])
        return product_s(request, efficiency) + moving_s(request) + fixed_s(request, launches=1, barriers=0)

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Fields of configs: tiles of more or fewer columns."""
        return [{"block_size_n": each} for each in (32, 64, 128, 256)]

    def _tiling(self, request: FusedRequest) -> Tiling:
        """Return the tiles, for programs that are there at the same time, of which SPLITS share one."""
        config, item = request.options["config"], getattr(torch, request.dtype).itemsize
        on_cpu = request.target.type is DeviceType.CPU
        most = min(config.get("num_sms", request.processors), boxes.MAX_PROGRAMS)
        most = most if on_cpu else min(most, request.processors)
        shared = _SHARED_NBYTES.get(request.target.arch, _SHARED_NBYTES["sm_90" if on_cpu else ""])
        rows = max(16, min(_FEW_ROWS, triton.next_power_of_2(request.m)))
        can_be_high = request.scales == "none" and 4 * 128 * (2 * rows + 128) <= shared  # by four stages
        can_be_high &= self.op == "all_gather_matmul" or request.m > 2 * rows
        if can_be_high and config.get("block_size_n", 64) in (64, 128) and -(-request.m // rows) % 2 == 0:
            rows *= 2  # B is read once for each tile of rows
        tiles_m = -(-request.m // rows)
        can_be_wide = rows >= 64 and 4 * 128 * (rows + 256) <= shared and request.scales != "blocks"  # by four stages
        widths = (64, 128, 256) if can_be_wide else (64, 128)  # A is read once for each tile of columns
        usual = next((each for each in widths if tiles_m * -(-request.n // each) <= most), widths[-1])
        columns = config.get("block_size_n", usual)
        deep = config.get("block_size_k", (256 if rows <= 32 and columns <= 64 else 128) // item)
        if request.scales == "blocks":
            deep = min(deep, SCALED_BLOCK)
        stage = (rows + columns) * deep * item
        stages = max(2, min(8 if stage <= _SMALL_STAGE else 6, shared // stage))
        tiles, unit = tiles_m * -(-request.n // columns), max(deep, SCALED_BLOCK if request.scales == "blocks" else 1)
        splits = max(1, min(most // tiles, _MOST_SPLITS, request.k // (4 * unit)))
        span = -(-request.k // (splits * unit)) * unit
        splits = -(-request.k // span)
        groups = -(-tiles // -(-tiles // (most // splits)))  # all have equally many tiles, or one less
        warps = min(8 if rows * columns >= _MANY else 4, self._most_warps(request, rows, columns))
        shape = rows, columns, deep, 1 if on_cpu else warps, stages
        tiled, programs = tiling(request, request.m, request.k, shape), groups * splits
        is_turned = request.scales == "none" and columns >= 64
        more = {"SPLITS": splits, "TURNED": is_turned, "PROGRAMS": programs, "span": span}
        return replace(tiled, constants={**tiled.constants, **more})

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        team, tiles = host.team, self._tiling(request)
        splits, programs = tiles.constants["SPLITS"], tiles.constants["PROGRAMS"]
        warps = tiles.options["num_warps"]
        form, size = self._form(request), team.size
        dtype = request.dtype if form == "a" else request.out_dtype
        each = boxes.PACKET // getattr(torch, dtype).itemsize
        rows, width = self._sent(request)
        if form == "two":
            rows = -(-request.m // size)
        packets = rows * width // each
        hops = 2 if form == "two" else 1
        least = 32 * warps  # of what is received at a time: no two threads hold the same packet
        share = -(-packets // programs)
        most_each = 1 << (_HELD // size).bit_length() - 1  # size is at most 8
        here = max(least, min(least * most_each, triton.next_power_of_2(share)))
        mailbox = boxes.mailbox_for(team, "sentinel", packets, hops * size)
        arguments = arguments_of(request, tiles, request.m, request.out_stride)
        every = arguments["tiles_m"] * arguments["tiles_n"]
        # A region: `reset` clears it together with the epochs.
        flags = team.region(f"flags of products at {mailbox.offset_bytes}", rounded(4 * (programs + every * splits)))
        words = flags.tensor.view(torch.int32)
        partial = gathered = None
        if splits > 1:
            nbytes = 4 * (splits - 1) * every * tiles.block_m * tiles.block_n
            partial = host.scratch(nbytes, "parts of sums")[:nbytes].view(torch.float32)
        if form == "a":
            gathered = host.scratch(size * packets * boxes.PACKET, "gathered").view(getattr(torch, dtype))
        is_small = form != "a" or request.n * request.k * getattr(torch, request.dtype).itemsize <= _EARLY_NBYTES
        early = early_launch(team.device) if is_small else {}
        arguments |= mailbox.arguments(team, programs, warps) | {
            "kind": request.options.get("kind", 0), "partial": partial, "words": words, "gathered": gathered,
            "rows": rows, "inner": width, "slot": packets * boxes.PACKET, "FORM": form,
            "DIM": request.options.get("gather_dim", 0), "DT": getattr(tl, dtype), "C": here,
            "EARLY": bool(early),
        }  # fmt: skip
        return Plan(bind(request, host, packet_product, programs, arguments, {**tiles.options, **early}), locks=words)
