"""Sum a member's slots in a separate launch, after the products, on all multiprocessors.

A slot holds the rows of a product that a member owns, as computed by one of the members.  They are summed in rank
order of the group in float32, the bias is added, and the sum is rounded once: results are reproducible.
The kernel is memory-bound, so tiles are small, a row or a few of them, and few multiprocessors idle at the end.

    "rows"      this rank's output has this rank's rows
    "two_shot"  members publish the addresses of their outputs; after a barrier each stores its rows into all outputs;
                after a second barrier the outputs are complete
"""

import torch
import triton
import triton.language as tl

from iris_core.dispatch.products import ROW_NBYTES
from iris_core.dispatch.team import Host
from iris_core.types import DeviceType, FusedRequest
from iris_triton.collectives.parts.barrier import last_barrier
from iris_triton.gemm.parts.fused import bind, programs_for
from iris_triton.gemm.parts.tiles import PER_CALL, begin_call, store_tile, store_to_all, whole_rows, wide, with_bias
from iris_triton.launcher import BoundKernel

RUNTIME = ("me", "rank", "rows", "rows_each", "first", "tiles_n", "timeout_ns", "status")
"""Arguments for whose values kernels are not compiled anew."""


@triton.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=PER_CALL)
def sum_slots(
    out, bias, slots, control, bases, me, rank, rows, n, rows_each, first, out_down, out_right, bias_step, tiles_n,
    timeout_ns, status,
    SIZE: tl.constexpr, FORM: tl.constexpr, BIAS: tl.constexpr, SLOTS_WIDE: tl.constexpr,
    OUT_WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Add up the slots.

    Args (beside those of `iris_triton.gemm.parts.tiles`):
        out: with FORM "two_shot", peers write to it, and its rows are dense and aligned.
        slots: SIZE matrices of rows_each x n dense elements.
        rows: how many of the rows are there; 0 or less for none.
        rows_each: rows of a slot.
        first: the own rows' place in `out` and in the bias: 0 with FORM "rows".
        FORM: see above.
        SLOTS_WIDE: rows of the slots begin at multiples of 16 bytes.
        OUT_WIDE: the same is true of the output's rows, which are dense.
    """
    if FORM == "two_shot":
        row, epoch = begin_call(control, bases, me, out, out_down, timeout_ns, status, rank, SIZE)
    width = n
    if SLOTS_WIDE:
        width = whole_rows(n, slots)
    apart = tl.cast(rows_each, tl.int64) * width
    tiles = tl.cdiv(tl.maximum(rows, 0), BM) * tiles_n
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        down, column = tile // tiles_n * BM, tile % tiles_n * BN
        i, j = down + tl.arange(0, BM), column + tl.arange(0, BN)
        mask = (i[:, None] < rows) & (j[None, :] < width)
        at = slots + (i.to(tl.int64)[:, None] * width + j[None, :])
        total = tl.zeros((BM, BN), tl.float32)
        for source in tl.static_range(SIZE):
            total += tl.load(at + source * apart, mask=mask, other=0.0).to(tl.float32)
        total = with_bias(total, bias, first + down, column, first + rows, n, bias_step, BIAS, BM, BN)
        if FORM == "two_shot":
            store_to_all(row, bases, me, out, total, first + down, column, first + rows, width, SIZE, BM, BN)
        else:
            target = wide(out, OUT_WIDE)
            if OUT_WIDE:
                store_tile(target, total, down, column, rows, width, whole_rows(out_down, out), 1, BM, BN)
            else:
                store_tile(target, total, down, column, rows, width, out_down, out_right, BM, BN)
    if FORM == "two_shot":
        last_barrier(row, bases, me, epoch, timeout_ns, status, rank, SIZE)


_OF_A_THREAD = 8  # elements of a tile on a GPU: 16 bytes of a slot at a time, of 16-bit elements

_TILE_GPU, _TILE_CPU = 2048, 16384  # elements of a tile; on the CPU a block of one costs as much as one of 1000
_MOST_COLUMNS = 1024


def bind_sum(
    request: FusedRequest, host: Host, slots: torch.Tensor, rows_each: int, out_stride: tuple[int, ...]
) -> BoundKernel:
    """Return the kernel that adds up the own slots; it takes the output and, if there is one, the bias.

    There is a slot of rows_each x request.n elements for each member; `out_stride` is of what the kernel writes.
    """
    two_shot, on_cpu = request.op == "matmul_all_reduce", request.target.type is DeviceType.CPU
    first = host.team.rank * rows_each if two_shot else 0
    total = request.m if two_shot else request.m // host.team.size
    item = getattr(torch, request.out_dtype).itemsize
    columns = min(_MOST_COLUMNS, 1 << (request.n - 1).bit_length())
    down = max(1, (_TILE_CPU if on_cpu else _TILE_GPU) // columns)
    down = min(down, 1 << (rows_each - 1).bit_length())
    tiles_n = -(-request.n // columns)
    tiles = -(-rows_each // down) * tiles_n
    programs = min(tiles, request.options["config"].get("num_sms", tiles))
    if two_shot or on_cpu:
        programs = programs_for(request, host, tiles)
    arguments = {
        "slots": slots,
        "rows": min(rows_each, total - first),
        "n": request.n,
        "rows_each": rows_each,
        "first": first,
        "out_down": out_stride[0],
        "out_right": out_stride[1],
        "tiles_n": tiles_n,
        "FORM": "two_shot" if two_shot else "rows",
        "SLOTS_WIDE": request.n * item % ROW_NBYTES == 0,
        "OUT_WIDE": request.aligned[2] and out_stride[1] == 1 and out_stride[0] * item % ROW_NBYTES == 0,
        "BM": down,
        "BN": columns,
    }
    warps = _TILE_GPU // _OF_A_THREAD // request.target.warp_size
    return bind(request, host, sum_slots, programs, arguments, {"num_warps": warps})
