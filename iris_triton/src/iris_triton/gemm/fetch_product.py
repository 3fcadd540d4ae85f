"""`fetch`: all_gather_matmul.  Some programs copy the shards of A into local memory, the others compute.

Chosen where a table or the model says so: a shard crosses the links once.  Programs that copy begin with the next
member's shard, and set a flag for each block of rows; the others begin with the own shard, and wait for flags.
Shards are rows (gather_dim 0) or columns (gather_dim 1) of A; their rows are dense and begin at multiples of 16 bytes.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl

from iris_core.dispatch.products import ROW_NBYTES
from iris_core.dispatch.team import Host, lasting
from iris_core.providers.baseline import bind_scales
from iris_core.types import DeviceType, FusedRequest
from iris_triton.collectives.parts.barrier import last_barrier, publish
from iris_triton.collectives.parts.elements import as_words, item_nbytes
from iris_triton.collectives.parts.sizes import rounded_up
from iris_triton.gemm.parts import tiles as parts
from iris_triton.gemm.parts.fused import USED_CONFIG, Fused, Plan, arguments_of, bind, peer_matrix, tiling
from iris_triton.language.flags import await_flag


@triton.jit
def _fetch(
    a, buffer, flags, generation, control, bases, me, rank, rows, inner, a_down, width, timeout_ns, status,
    SIZE: tl.constexpr, FETCHERS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Copy the peers' shards into local memory, one block of rows at a time."""
    row, epoch = parts.begin_call(control, bases, me, a, a_down, timeout_ns, status, rank, SIZE)
    blocks = tl.cdiv(rows, BM)
    i = tl.arange(0, BM)
    step = tl.arange(0, BK)
    for number in range(tl.program_id(0), (SIZE - 1) * blocks, FETCHERS):
        shard = (me + 1 + number // blocks) % SIZE
        block = number % blocks
        theirs, stride = parts.announced(row, bases, shard, a, SIZE)
        source = as_words(theirs) + (block * BM + i.to(tl.int64))[:, None] * stride + step[None, :]
        mine = as_words(tl.multiple_of(buffer, 16)) + (tl.cast(shard, tl.int64) * rows + block * BM) * width
        target = mine + i.to(tl.int64)[:, None] * width + step[None, :]
        for k in range(0, inner, BK):
            mask = (block * BM + i[:, None] < rows) & (step[None, :] < inner - k)
            tl.store(target + k, tl.load(source + k, mask=mask, other=0), mask=mask)
        publish(flags + shard * blocks + block, generation, "gpu")
    last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


@triton.jit
def _shard_at(
    a, a_down, buffer, width, flags, generation, shard, me, rows, block, blocks, rank, timeout_ns, status
):  # fmt: skip
    """Wait for a shard's block of rows; return (pointer, row stride) of the shard in local memory."""
    own = shard == me
    if shard != me:
        await_flag(
            flags + shard * blocks + block, generation, "reached", "acquire", "gpu", timeout_ns,
            tl.cast(status, tl.int64), rank,
        )  # fmt: skip
    there = buffer.to(tl.int64) + tl.cast(shard, tl.int64) * rows * width * item_nbytes(a.dtype)
    where = tl.where(own, a.to(tl.int64), there).to(a.dtype)
    stride = tl.where(own, tl.cast(a_down, tl.int64), tl.cast(width, tl.int64))
    return tl.multiple_of(where, 16), parts.whole_rows(stride, a)


@triton.jit(do_not_specialize=parts.RUNTIME, do_not_specialize_on_alignment=parts.PER_CALL)
def fetch_product(
    out, a, b, bias, buffer, state, control, bases, me, rank, rows, n, inner, a_down, width, b_down, b_right, out_down,
    out_right, bias_step, tiles_m, tiles_n, timeout_ns, status, a_scales, b_scales, a_scale_down, a_scale_right,
    b_scale_down, b_scale_right,
    SIZE: tl.constexpr, DIM: tl.constexpr, BIAS: tl.constexpr, FETCHERS: tl.constexpr, B_ALIGNED: tl.constexpr,
    OUT_ALIGNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr, A_CACHE: tl.constexpr, B_CACHE: tl.constexpr, STAGES: tl.constexpr,
    XCDS: tl.constexpr, CHUNK: tl.constexpr, SCALES: tl.constexpr
):  # fmt: skip
    """Multiply the members' shards with B, while some programs copy them into local memory.

    All programs have to be there at the same time: no more than the device has multiprocessors.  Two barriers of those
    that copy: the shards may be read; they were read.

    Args (beside those of `iris_triton.gemm.parts.tiles`):
        buffer: local memory for SIZE * rows * width elements.
        state: int64 words of this plan alone, zero at first: how often each program has run, then the flags.
        rows, inner: shape of a shard.
        width: elements from row to row of `buffer`; rows begin at multiples of 16 bytes.
        tiles_m, tiles_n: of a shard's rows if DIM is 0.
        DIM: gather_dim; 0 with scales, of which those of A are of all members' rows.
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
        for i in range(parts.own_program(FETCHERS, XCDS, CHUNK), total, tl.num_programs(0) - FETCHERS):
            acc = tl.zeros((BM, BN), tl.float32)
            down, right = parts.place(i % per_shard, tiles_m, tiles_n, GROUP)
            turn = (me + i // per_shard) % SIZE if DIM == 0 else me
            for j in range(1 if DIM == 0 else SIZE):
                shard = turn if DIM == 0 else (turn + j) % SIZE
                where, stride = _shard_at(
                    a, a_down, buffer, width, flags, generation, shard, me, rows, down, blocks, rank, timeout_ns, status
                )
                scales = a_scales
                if SCALES != "none":
                    scales += tl.cast(shard, tl.int64) * rows * a_scale_down
                part = b if DIM == 0 else b + tl.cast(shard, tl.int64) * inner * b_down
                acc = parts.add_product(
                    acc, where, parts.wide(part, B_ALIGNED), down * BM, right * BN, rows, n, inner,
                    stride, 1, b_down, b_right, scales, b_scales, a_scale_down, a_scale_right, b_scale_down,
                    b_scale_right, BM, BN, BK, EVEN_K, PRECISION, A_CACHE, B_CACHE, STAGES, SCALES,
                )  # fmt: skip
            first = turn * rows if DIM == 0 else me * 0
            acc = parts.with_bias(acc, bias, first + down * BM, right * BN, first + rows, n, bias_step, BIAS, BM, BN)
            parts.store_tile(
                parts.wide(out, OUT_ALIGNED), acc, first + down * BM, right * BN, first + rows, n, out_down, out_right,
                BM, BN,
            )  # fmt: skip
    tl.store(state + program, generation)


_FETCHERS = 16  # programs that copy for the others, by default; each fills a multiprocessor


class Fetch(Fused):
    """`fetch`, with `num_fetch_sms` programs that copy."""

    uses = (*USED_CONFIG, "num_fetch_sms")
    efficiency: ClassVar[Mapping[str, float]] = {"cpu": 0.02, "sm_90": 0.7, "": 0.45}  # of those that multiply

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Fields of configs: more or fewer programs that fetch."""
        square = {"block_size_m": 128, "block_size_n": 128, "num_warps": 8}
        return [{"num_fetch_sms": 8}, {"num_fetch_sms": 32}, square, {**square, "num_fetch_sms": 32}]

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        size, dim = host.team.size, request.options["gather_dim"]
        dtype = getattr(torch, request.dtype)
        rows, inner = shape = (request.m // size, request.k) if dim == 0 else (request.m, request.k // size)
        tiles = tiling(request, rows, inner)
        staged = None if request.reach_a else peer_matrix(request, host, self.name, shape, request.dtype)[1]
        blocks, width = -(-rows // tiles.block_m), rounded_up(inner, dtype.itemsize)
        need = size * rows * width * dtype.itemsize
        buffer = host.scratch(need, "gathered")[:need]
        arguments = arguments_of(request, tiles, rows, request.out_stride)
        config, on_cpu = request.options["config"], request.target.type is DeviceType.CPU
        most = config.get("num_sms", 2 if on_cpu else host.processors)
        most = most if on_cpu else min(most, host.processors)  # all of them are there at the same time
        fetchers = config.get("num_fetch_sms", 1 if on_cpu else _FETCHERS)
        fetchers = max(1, min(fetchers, (size - 1) * blocks, host.team.max_programs, most - 1))
        tiles_of_all = arguments["tiles_m"] * arguments["tiles_n"] * (size if dim == 0 else 1)
        computing = min(max(1, most - fetchers), tiles_of_all)
        words = fetchers + computing + size * blocks
        state = lasting(lambda: torch.zeros(words, dtype=torch.int64, device=host.team.device))
        if state.is_cuda:
            torch.cuda.current_stream(state.device).synchronize()  # it may first be used on another stream
        parts_aligned = dim == 0 or inner * request.b_stride[0] * dtype.itemsize % ROW_NBYTES == 0  # B's, of the shards
        arguments |= {
            "rows": rows,
            "inner": inner,
            "a_down": request.a_stride[0] if staged is None else staged.stride(0),
            "DIM": dim,
            "B_ALIGNED": request.aligned[1] and parts_aligned,
            "buffer": buffer.view(dtype),
            "state": state,
            "width": width,
            "FETCHERS": fetchers,
        }
        kernel = bind(request, host, fetch_product, fetchers + computing, arguments, tiles.options)
        gather: Any = None if request.scales == "none" else bind_scales(request, host)

        def run(stream: Any, *tensors: torch.Tensor) -> None:
            *others, a_scales, b_scales = tensors
            kernel(stream, *others, gather(a_scales), b_scales)

        return Plan(run if gather else kernel, staged_a=staged, aux_buffer=buffer, locks=state[fetchers + computing :])
