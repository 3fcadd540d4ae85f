"""`hopper_fetch`, `hopper_copy_engine`, `hopper_copy_engine_push`: all_gather_matmul, gather_dim 0.

Chosen on Hopper, by name or where a table says so.

`put_product`: some programs put the own rows of A to the others by TMA, and count their pieces there; the others begin
with the own rows, and the warp that loads waits for counters.
`await_product`: copy engines bring the others' rows of A here, and a word behind each shard; the warp that loads waits
for it.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris_core.providers.model import moving_s
from iris_core.types import Availability, DeviceType
from iris_gluon.bulk import put_bulk
from iris_gluon.gemm.fused import RUNTIME, UNIT, USED_CONFIG, RowsOwned, biased, matrix_at, operand
from iris_gluon.gemm.hopper import multiply_tiles
from iris_gluon.gemm.order import ShardsInTurn
from iris_gluon.gemm.sinks import StoreTile
from iris_gluon.layouts import default_layout
from iris_triton.collectives.parts.barrier import at_member, last_epoch, leave, meet, row_of
from iris_triton.copies import copies_obstacle
from iris_triton.gemm.parts.fused import Plan
from iris_triton.gemm.parts.shards import COPY_S, WIRE, Shards, Words, gathered_rows, own_rows, shards_of, words_of
from iris_triton.gemm.parts.tiles import PER_CALL

if TYPE_CHECKING:
    import torch

    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_gluon.gemm.launch import GemmConfig

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


class _HopperGather(RowsOwned):
    """What is common to all_gather_matmul with gather_dim 0: A of the others is brought into a matrix of all rows.

    Args:
        name: the algorithm.
    """

    def __init__(self, name: str) -> None:
        super().__init__("all_gather_matmul", name)

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        # Where its rows are not dense, A is copied before, so neither its strides nor its place matter.
        answer = super().supports(replace(request, a_stride=(UNIT, 1), aligned=(True, *request.aligned[1:])))
        if not answer:
            return answer
        if request.options["gather_dim"] != 0:
            return Availability.no("it gathers rows of A (gather_dim=0)")
        if request.k % UNIT:
            return Availability.no(f"rows of A must be multiples of 16 bytes, and K is {request.k}")
        if request.out_stride[1] != 1 or request.out_stride[0] % UNIT or not request.aligned[2]:
            return Availability.no("TMA needs dense rows of the output that begin at multiples of 16 bytes")
        problem = self._rows_problem(request)
        return Availability.no(problem) if problem else answer

    def _product(self, request: FusedRequest, host: Host, gemm: GemmConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arguments of both kernels, options of the compiler)."""
        arguments, compiler = self._arguments(request, host, gemm)
        for name in ("m", "a_down", "TURNED_A"):
            del arguments[name]
        arguments |= {"out_down": request.out_stride[0], "rows_each": request.m // host.team.size}
        return arguments, compiler


@dataclass(slots=True, kw_only=True)
class _PutPlan(Plan):
    """As `Plan`; `own` are the own rows of the gathered matrix, for an A that has to be copied."""

    own: torch.Tensor


class HopperFetch(_HopperGather):
    """Some programs (`num_fetch_sms`) put the own rows to the others, the others compute."""

    uses = (*USED_CONFIG, "num_fetch_sms")

    def __init__(self) -> None:
        super().__init__("hopper_fetch")

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
        memory, gathered, own = gathered_rows(request, host, f"{self.op} ({self.name})")
        words = words_of(host, size * blocks)
        arguments, compiler = self._product(request, host, gemm)
        arguments |= {"gathered": gathered, "flags": words.own, "PUTTERS": putters}
        kernel = self.bind(request, host, put_product, putters + computing, arguments, compiler)
        return _PutPlan(kernel, aux_buffer=memory, locks=words.own, own=own)

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Copy A where it is not dense, then launch."""
        plan.kernel(None, out, own_rows(a, plan.own), b, *(() if bias is None else (bias,)))


@dataclass(slots=True, kw_only=True)
class _CopyPlan(Plan):
    """As `Plan`; `shards` is A of all members, and `words` say which members' rows are there."""

    shards: Shards
    words: Words


class HopperCopyEngine(_HopperGather):
    """Copy engines bring the others' rows, and write a word behind each member's, for which the product waits.

    The product begins with the own rows, where A lies.  It takes all multiprocessors but one, on which members meet
    beside it.

    Args:
        pushes: see `iris_triton.gemm.parts.shards`.
    """

    def __init__(self, *, pushes: bool) -> None:
        super().__init__("hopper_copy_engine_push" if pushes else "hopper_copy_engine")
        self._pushes = pushes

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        obstacle = copies_obstacle(request.target.type) if answer else ""
        return Availability.no(obstacle) if obstacle else answer

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

    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Find memory for A of all and for the words, bind the kernel."""
        on_cpu = request.target.type is DeviceType.CPU
        computing = self._processors(request, host, meeting=False)
        if not on_cpu:
            computing = max(1, min(computing, host.processors - 1))
        gemm = self._gemm(request, computing)
        shards = shards_of(request, host, f"{self.op} ({self.name})", pushes=self._pushes)
        words = words_of(host, host.team.size, request.target.type)
        arguments, compiler = self._product(request, host, gemm)
        compiler["maxnreg"] = min(compiler["maxnreg"], _BESIDE_MEETING[gemm.num_warps])
        del arguments["control"], arguments["bases"]
        arguments |= {"gathered": shards.matrix, "flags": words.own}
        most = request.options["config"].get("num_sms", 2) if on_cpu else computing
        programs = max(1, min(most, gemm.tiles(request.m, request.n)))
        kernel = self.bind(request, host, await_product, programs, arguments, compiler)
        return _CopyPlan(kernel, shards=shards, words=words, aux_buffer=shards.memory, locks=words.own)

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Bring the rows beside the product.

        They are asked for first: the product waits for words that the copies bring, and a launch may return when its
        kernel is done (CUDA_LAUNCH_BLOCKING, profilers), or wait for all kernels (when one is loaded).
        """
        shards = plan.shards
        own = shards.begin(a)
        shards.move(own, plan.words.put if self._pushes else plan.words.taken)
        plan.kernel(None, out, own, b, *(() if bias is None else (bias,)))
        shards.end()
