"""`hopper_fetch`, `hopper_copy_engine`, `hopper_copy_engine_push`: all_gather_matmul, gather_dim 0.

Chosen on Hopper where a table says so.  Own rows are multiplied where A lies.  `put_product`: some programs put the own
rows of A to the others by TMA, and count their pieces there; the warp that loads waits for the counters.
`await_product`: copy engines bring the others' rows here, and a word after each shard, for which that warp waits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.providers.model import moving_s
from iris_core.types import DeviceType
from iris_gluon.bulk import put_bulk
from iris_gluon.gemm.fused import RUNTIME, UNIT, USED_CONFIG, Hopper, biased, matrix_at, operand
from iris_gluon.gemm.hopper import multiply_tiles
from iris_gluon.gemm.order import ShardsInTurn
from iris_gluon.gemm.sinks import StoreTile
from iris_gluon.layouts import default_layout
from iris_triton.collectives.parts.barrier import at_member, last_epoch, leave, meet, row_of
from iris_triton.copies import copies_obstacle
from iris_triton.gemm.parts.fused import Plan
from iris_triton.gemm.parts.shards import COPY_S, WIRE, gathered_rows, own_rows, shards_of, words_of
from iris_triton.gemm.parts.tiles import PER_CALL

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_gluon.gemm.launch import GemmConfig
    from iris_triton.gemm.parts.shards import Shards, Words

PUT_PARTS = gl.constexpr(4)
"""Pieces in which the rows of a tile are put, by a program each: so the first rows arrive early."""

_CLEARED = gl.constexpr(128)
"""Words that are cleared at a time."""


@gluon.jit
def _put(
    own, gathered, flags, control, bases, me, rank, rows_each, k, timeout_ns, status,
    SIZE: gl.constexpr, PUTTERS: gl.constexpr, BLOCK_M: gl.constexpr
):  # fmt: skip
    """Put the own rows to the others, first to the member before this one, which begins with them.

    Programs of this member count the pieces of a block together, in words that no other member adds to.  They are 0
    before, because all members have come to this call, behind the last one, which has cleared them.
    """
    row = row_of(control, SIZE)
    epoch = last_epoch(row, SIZE) + 1
    meet(row, bases, me, epoch, timeout_ns, status, rank, SIZE)
    blocks = rows_each // BLOCK_M
    each = blocks * PUT_PARTS
    ROWS: gl.constexpr = BLOCK_M // PUT_PARTS
    for number in range(gl.program_id(0), (SIZE - 1) * each, PUTTERS):
        member = (me + SIZE - 1 - number // each) % SIZE
        piece = number % each
        begin = gl.cast(piece, gl.int64) * ROWS * k
        there = gathered + gl.cast(me, gl.int64) * rows_each * k + begin
        put_bulk(own + begin, there, ROWS * k, me, member, bases, 16384, 4)
        counter = at_member(flags + me * blocks + piece // PUT_PARTS, bases, me, member)
        gl.atomic_add(counter, 1, sem="release", scope="sys")
    leave(row, epoch, SIZE)


@gluon.jit
def _clear(flags, count, programs):
    """Set words back to 0 behind the last of the programs that have waited for them; word `count` counts these."""
    if gl.atomic_add(flags + count, 1, sem="acq_rel", scope="gpu") == programs - 1:
        lane = gl.arange(0, _CLEARED, layout=default_layout([_CLEARED]))
        for first in range(0, count + 1, _CLEARED):
            gl.store(flags + first + lane, 0, mask=first + lane <= count)


@gluon.jit
def _multiply_shards(
    out, own, b, bias, gathered, flags, full, tiles_per_flag, me, rank, n, k, b_down, out_down, bias_step, rows_each,
    tiles_n, k_tiles, timeout_ns, status,
    SIZE: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr,
    ASIDE: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B, each when its flag says that it is there; see `ShardsInTurn`.

    The first ASIDE programs do something else.
    """
    tiles_each = rows_each // BLOCK_M
    order = ShardsInTurn(
        tiles_each, tiles_n, me, flags, gl.cast(full, gl.int32), tiles_per_flag, gl.cast(timeout_ns, gl.int64),
        gl.cast(status, gl.int64), rank, GROUP, SIZE,
    )  # fmt: skip
    rows = rows_each * SIZE
    sink = StoreTile(matrix_at(out.to(gl.int64), out, rows, n, gl.cast(out_down, gl.int64), BLOCK_M, BLOCK_N // PARTS))
    multiply_tiles(
        operand(gathered, rows, k, k, BLOCK_M, BLOCK_K, False), operand(b, k, n, b_down, BLOCK_K, BLOCK_N, TURNED_B),
        order, biased(sink, bias, bias_step, rows, n, BIAS), tiles_each * SIZE * tiles_n, k_tiles, STAGES, PARTS,
        NUM_WARPS, ASIDE, False, TURNED_B, operand(own, rows_each, k, k, BLOCK_M, BLOCK_K, False),
    )  # fmt: skip
    _clear(flags, rows // BLOCK_M // tiles_per_flag, gl.num_programs(0) - ASIDE)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def put_product(
    out, a, b, bias, gathered, flags, control, bases, me, rank, n, k, b_down, out_down, bias_step, rows_each, tiles_n,
    k_tiles, timeout_ns, status,
    SIZE: gl.constexpr, PUTTERS: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr,
    NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B.

    All programs have to be there at the same time, on all members: no more than a device has multiprocessors.  One
    meeting: peers may be written to.  That a member's own rows have been taken is not asked, for it gives them itself,
    and what it gets is complete when it has waited for every flag.

    Args (beside those of `push_product`):
        a: the own rows, rows_each x k, dense.
        gathered: symmetric memory for SIZE * rows_each rows of k elements.
        flags: symmetric memory for an int32 for each row of tiles and one more, 0 between launches.
        rows_each: rows of a member, a multiple of BLOCK_M.
        PUTTERS: programs that copy; the others compute.
        BIAS: what the bias lies along: "columns", "rows" (of the gathered matrix) or "none".
    """
    if gl.program_id(0) < PUTTERS:
        _put(a, gathered, flags, control, bases, me, rank, rows_each, k, timeout_ns, status, SIZE, PUTTERS, BLOCK_M)
    else:
        _multiply_shards(
            out, a, b, bias, gathered, flags, PUT_PARTS, gl.cast(1, gl.int32), me, rank, n, k, b_down, out_down,
            bias_step, rows_each, tiles_n, k_tiles, timeout_ns, status, SIZE, BIAS, TURNED_B, BLOCK_M, BLOCK_N, BLOCK_K,
            GROUP, STAGES, PARTS, NUM_WARPS, PUTTERS,
        )  # fmt: skip


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def await_product(
    out, a, b, bias, gathered, flags, me, rank, n, k, b_down, out_down, bias_step, rows_each, tiles_n, k_tiles,
    timeout_ns, status,
    SIZE: gl.constexpr, BIAS: gl.constexpr, TURNED_B: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, NUM_WARPS: gl.constexpr
):  # fmt: skip
    """Multiply the rows of all members with B, each member's when they are there.  No program waits for another one.

    Args (beside those of `put_product`):
        flags: an int32 for each member, 1 when its rows are there, and one more; 0 between launches.
    """
    _multiply_shards(
        out, a, b, bias, gathered, flags, 1, rows_each // BLOCK_M, me, rank, n, k, b_down, out_down, bias_step,
        rows_each, tiles_n, k_tiles, timeout_ns, status, SIZE, BIAS, TURNED_B, BLOCK_M, BLOCK_N, BLOCK_K, GROUP, STAGES,
        PARTS, NUM_WARPS, 0,
    )  # fmt: skip


_PUTTERS = 16
"""Programs that copy, by default; each fills a multiprocessor."""

_BESIDE_MEETING = {8: 160, 4: 240}
"""Registers of a thread, by warps that multiply: a warp of 32 each finds room beside them on a multiprocessor.  So
members can meet while the product runs, even if other kernels have taken the one that it leaves."""


class _HopperGather(Hopper):
    """The common part: A of the others is brought into a matrix of all rows."""

    def _problem(self, request: FusedRequest) -> str:
        if request.options["gather_dim"] != 0:
            return "it gathers rows of A (gather_dim=0)"
        if request.k % UNIT:
            return f"rows of A must be multiples of 16 bytes, and K is {request.k}"
        if request.out_stride[1] != 1 or request.out_stride[0] % UNIT or not request.aligned[2]:
            return "TMA needs dense rows of the output that begin at multiples of 16 bytes"
        # Where its rows are not dense, A is copied before, so neither its strides nor its place matter.
        return super()._problem(replace(request, a_stride=(UNIT, 1), aligned=(True, *request.aligned[1:])))

    def _product(self, request: FusedRequest, host: Host, gemm: GemmConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arguments of both kernels, options of the compiler)."""
        arguments, compiler = self._arguments(request, host, gemm)
        return arguments | {"out_down": request.out_stride[0], "rows_each": request.m // host.team.size}, compiler


class HopperFetch(_HopperGather):
    """`hopper_fetch`: some programs (`num_fetch_sms`) put the own rows to the others, the others compute."""

    uses = (*USED_CONFIG, "num_fetch_sms")

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        other, half, *_ = super()._offered(request)
        return [{"num_fetch_sms": 8}, {"num_fetch_sms": 24}, other, {**other, "num_fetch_sms": 8}, half]

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies."""
        return self.model(request, meetings=1)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for A of all and for the flags, bind the kernel."""
        size, on_cpu = host.team.size, request.target.type is DeviceType.CPU
        config = request.options["config"]
        most = config.get("num_sms", 2 if on_cpu else host.processors)
        most = most if on_cpu else min(most, host.processors)
        putters = config.get("num_fetch_sms", 1 if on_cpu else _PUTTERS)
        putters = max(1, min(putters, host.team.max_programs, most - 1))
        gemm = self._gemm(request, max(1, most - putters))
        blocks = request.m // size // gemm.block_m
        putters = min(putters, (size - 1) * blocks * PUT_PARTS.value)
        computing = max(1, min(most - putters, gemm.tiles(request.m, request.n)))
        memory, gathered, own = gathered_rows(request, host, self.name)
        flags = words_of(host, size * blocks).own
        arguments, compiler = self._product(request, host, gemm)
        arguments |= {"gathered": gathered, "flags": flags, "PUTTERS": putters}
        kernel = self.bind(request, host, put_product, putters + computing, arguments, compiler)

        def run(stream: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor) -> None:
            kernel(stream, out, own_rows(a, own), b, *bias)

        return Plan(run, aux_buffer=memory, locks=flags)


def beside_copies(shards: Shards, words: Words, kernel: Callable[..., None]) -> Callable[..., None]:
    """Return what brings the rows and launches a kernel that waits for them.

    They are asked for first: the product waits for words that the copies bring, and a launch may return when its kernel
    is done (CUDA_LAUNCH_BLOCKING, profilers), or wait for all kernels (when one is loaded).
    """

    def run(stream: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *bias: torch.Tensor) -> None:
        kernel(stream, out, shards.move(a, words), b, *bias)
        shards.end()

    return run


class HopperCopyEngine(_HopperGather):
    """`hopper_copy_engine`, `hopper_copy_engine_push`: the product waits for words of the copy engines.

    It takes all multiprocessors but one, on which members meet beside it.

    Args:
        pushes: see `iris_triton.gemm.parts.shards`.
    """

    def __init__(self, op: str, name: str, *, pushes: bool) -> None:
        super().__init__(op, name)
        self._pushes = pushes

    def _problem(self, request: FusedRequest) -> str:
        return super()._problem(request) or copies_obstacle(request.target.type)

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies, but for the last one."""
        others = request.group_size - 1
        moving = moving_s(request)
        if request.target.type is not DeviceType.CPU:
            moving = request.nbytes * others / request.group_size / WIRE + others * COPY_S
        meetings = 1 if self._pushes else 2
        return self.model(request, meetings=meetings, launches=others + 3, moving=moving, seen=1 / max(others, 1))

    def host_seconds(self, request: FusedRequest) -> float:
        """Estimate what a call costs the CPU: a copy and a word for each member (hosts of H200s)."""
        return 0.0 if request.target.type is DeviceType.CPU else 3e-5 + 1.5e-5 * request.group_size

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for A of all and for the words, bind the kernel."""
        on_cpu = request.target.type is DeviceType.CPU
        computing = self._processors(request, host, most=host.processors if on_cpu else max(1, host.processors - 1))
        gemm = self._gemm(request, computing)
        shards, words = shards_of(request, host, self.name, pushes=self._pushes)
        arguments, compiler = self._product(request, host, gemm)
        compiler["maxnreg"] = min(compiler["maxnreg"], _BESIDE_MEETING[gemm.num_warps])
        del arguments["control"], arguments["bases"]
        arguments |= {"gathered": shards.matrix, "flags": words.own}
        most = request.options["config"].get("num_sms", 2) if on_cpu else computing
        programs = max(1, min(most, gemm.tiles(request.m, request.n)))
        kernel = self.bind(request, host, await_product, programs, arguments, compiler)
        return Plan(beside_copies(shards, words, kernel), aux_buffer=shards.memory, locks=words.own)
