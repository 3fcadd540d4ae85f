"""`fetch`: all_gather_matmul.  Some programs copy the shards of A into local memory, the others compute.

Chosen where a table or the model says so: a shard crosses the links once.  Programs that copy begin with the next
member's shard, and set a flag for each block of rows; the others begin with the own shard, and wait for flags.

Shards as in `pull_product`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from iris_core.types import DeviceType
from iris_triton.collectives.parts.barrier import meet_and_leave, publish
from iris_triton.collectives.parts.elements import as_words, item_nbytes
from iris_triton.gemm.parts.fused import Plan
from iris_triton.gemm.parts.shapes import USED_CONFIG, padded, tiling
from iris_triton.gemm.parts.tiles import (
    PER_CALL,
    RUNTIME,
    add_product,
    announce_and_meet,
    announced,
    own_program,
    place,
    store_tile,
    whole_rows,
    wide,
    with_bias,
)
from iris_triton.gemm.pull_product import GatherProduct
from iris_triton.language.flags import await_flag

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest


@triton.jit
def _fetch(
    a, buffer, flags, generation, control, bases, me, rank, rows, inner, a_down, width, timeout_ns, status,
    SIZE: tl.constexpr, FETCHERS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Copy the shards of the others into local memory, block of rows by block of rows."""
    row, epoch = announce_and_meet(control, bases, me, a, a_down, timeout_ns, status, rank, SIZE)
    blocks = tl.cdiv(rows, BM)
    i = tl.arange(0, BM)
    step = tl.arange(0, BK)
    for number in range(tl.program_id(0), (SIZE - 1) * blocks, FETCHERS):
        shard = (me + 1 + number // blocks) % SIZE
        block = number % blocks
        theirs, stride = announced(row, bases, shard, a, SIZE)
        source = as_words(theirs) + (block * BM + i.to(tl.int64))[:, None] * stride + step[None, :]
        mine = as_words(tl.multiple_of(buffer, 16)) + (tl.cast(shard, tl.int64) * rows + block * BM) * width
        target = mine + i.to(tl.int64)[:, None] * width + step[None, :]
        for k in range(0, inner, BK):
            mask = (block * BM + i[:, None] < rows) & (step[None, :] < inner - k)
            tl.store(target + k, tl.load(source + k, mask=mask, other=0), mask=mask)
        publish(flags + shard * blocks + block, generation, "gpu")
    meet_and_leave(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


@triton.jit
def _shard_at(
    a, a_down, buffer, width, flags, generation, shard, me, rows, block, blocks, rank, timeout_ns, status
):  # fmt: skip
    """(pointer, stride of rows) of a shard in local memory, when its block of rows is there."""
    own = shard == me
    if shard != me:
        await_flag(
            flags + shard * blocks + block, generation, "reached", "acquire", "gpu", timeout_ns,
            tl.cast(status, tl.int64), rank,
        )  # fmt: skip
    there = buffer.to(tl.int64) + tl.cast(shard, tl.int64) * rows * width * item_nbytes(a.dtype)
    where = tl.where(own, a.to(tl.int64), there).to(a.dtype)
    stride = tl.where(own, tl.cast(a_down, tl.int64), tl.cast(width, tl.int64))
    return tl.multiple_of(where, 16), whole_rows(stride, a)


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def fetch_product(
    out, a, b, bias, buffer, state, control, bases, me, rank, rows, n, inner, a_down, width, b_down, b_right, out_down,
    out_right, bias_step, tiles_m, tiles_n, timeout_ns, status,
    SIZE: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, FETCHERS: tl.constexpr, B_ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr,
    XCDS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Multiply the members' shards with B, while some programs copy them here.

    All programs have to be there at the same time: no more than the device has multiprocessors.

    Args (beside those of `pull_product`):
        buffer: local memory for SIZE * rows * width elements.
        state: int64 words of this plan alone, zero at first: how often each program has run, then the flags.
        width: elements from row to row of `buffer`; rows begin at multiples of 16 bytes.
        FETCHERS: programs that copy; the others compute.
    """
    program = tl.program_id(0)
    generation = tl.load(state + program) + 1
    flags = state + tl.num_programs(0)
    if program < FETCHERS:
        _fetch(
            a, buffer, flags, generation, control, bases, me, rank, rows, inner, a_down, width, timeout_ns, status,
            SIZE, FETCHERS, BM, BK,
        )  # fmt: skip
    else:
        per_shard = tiles_m * tiles_n
        blocks = tl.cdiv(rows, BM)
        total = per_shard
        if DIM == 0:
            total = per_shard * SIZE
        for i in range(own_program(FETCHERS, XCDS, CHUNK), total, tl.num_programs(0) - FETCHERS):
            acc = tl.zeros((BM, BN), tl.float32)
            down, right = place(i % per_shard, tiles_m, tiles_n, GROUP)
            if DIM == 0:
                shard = (me + i // per_shard) % SIZE
                where, stride = _shard_at(
                    a, a_down, buffer, width, flags, generation, shard, me, rows, down, blocks, rank, timeout_ns, status
                )
                acc = add_product(
                    acc, where, wide(b, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                    stride, 1, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
                )  # fmt: skip
                first = shard * rows
            else:
                for j in range(SIZE):
                    shard = (me + j) % SIZE
                    where, stride = _shard_at(
                        a, a_down, buffer, width, flags, generation, shard, me, rows, down, blocks, rank, timeout_ns,
                        status
                    )  # fmt: skip
                    part = b + tl.cast(shard, tl.int64) * inner * b_down
                    acc = add_product(
                        acc, where, wide(part, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                        stride, 1, b_down, b_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES,
                    )  # fmt: skip
                first = me * 0
            acc = with_bias(acc, bias, first + down * BM, right * BN, first + rows, n, bias_step, BIAS, BM, BN)
            store_tile(
                wide(out, OUT_ALIGNED), acc, first + down * BM, right * BN, first + rows, n, out_down, out_right, BM, BN
            )
    tl.store(state + program, generation)


_FETCHERS_GPU, _FETCHERS_CPU = 16, 1


class Fetch(GatherProduct):
    """all_gather_matmul: some programs copy the shards, the others compute."""

    uses = (*USED_CONFIG, "num_fetch_sms")

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Fields of configs: more or fewer programs that fetch."""
        square = {"block_size_m": 128, "block_size_n": 128, "num_warps": 8}
        return [{"num_fetch_sms": 8}, {"num_fetch_sms": 32}, square, {**square, "num_fetch_sms": 32}]

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies, but for the first block."""
        return self.model(request, meetings=3, share=0.9)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the copies, make the flags, bind the kernel."""
        rows, inner = self._shard(request)
        tiles = tiling(request, rows, inner)
        staged = self._staged(request, host)
        arguments = self._arguments(request, host, tiles, staged)
        size, on_cpu = host.team.size, request.target.type is DeviceType.CPU
        item = getattr(torch, request.dtype).itemsize
        blocks, width = -(-rows // tiles.block_m), padded(inner, item)
        fetchers, computing = self._programs(request, host, (size - 1) * blocks, arguments)
        need = size * rows * width * item
        buffer = host.scratch(need, "gathered")
        state = torch.zeros(fetchers + computing + size * blocks, dtype=torch.int64, device=host.team.device)
        if not on_cpu:
            torch.cuda.current_stream(state.device).synchronize()  # it may first be used on another stream
        arguments |= {
            "buffer": buffer[:need].view(getattr(torch, request.dtype)),
            "state": state,
            "width": width,
            "FETCHERS": fetchers,
        }
        kernel = self.bind(request, host, fetch_product, fetchers + computing, arguments, tiles.options)
        return Plan(kernel, staged_a=staged, aux_buffer=buffer[:need], locks=state[fetchers + computing :])

    def _programs(self, request: FusedRequest, host: Host, blocks: int, arguments: dict[str, Any]) -> tuple[int, int]:
        """How many programs fetch, and how many compute; all of them have to be there at the same time."""
        config = request.options["config"]
        on_cpu = request.target.type is DeviceType.CPU
        most = config.get("num_sms", 2 if on_cpu else host.processors)
        if not on_cpu:
            most = min(most, host.processors)
        fetchers = config.get("num_fetch_sms", _FETCHERS_CPU if on_cpu else _FETCHERS_GPU)
        fetchers = max(1, min(fetchers, blocks, host.team.max_programs, most - 1))
        shards = host.team.size if request.options["gather_dim"] == 0 else 1
        number = arguments["tiles_m"] * arguments["tiles_n"] * shards
        return fetchers, max(1, min(most - fetchers, number))
