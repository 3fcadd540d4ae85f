"""The host's side of `iris_triton.gemm.sum_kernel`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from iris_core.types import DeviceType
from iris_triton.gemm.fused import programs_for
from iris_triton.gemm.sum_kernel import sum_slots
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest

_WARPS = {DeviceType.CUDA: 8, DeviceType.HIP: 4}
"""With which each thread has 16 bytes of a slot at a time, of 16-bit elements."""

_TILE_GPU, _TILE_CPU = 2048, 16384
"""Elements of a tile: on a GPU 8 of each thread; on the CPU an operation on a block costs the same for 1 and 1000."""

_MOST_COLUMNS = 1024
_ROW_NBYTES = 16


def bind_sum(
    request: FusedRequest,
    host: Host,
    slots: torch.Tensor,
    rows_each: int,
    out_stride: tuple[int, ...],
    *,
    tells: bool = False,
) -> BoundKernel:
    """Return the kernel that adds up the own slots; it takes the output and, if there is one, the bias.

    Args:
        request: matmul_reduce_scatter in the layout of torch, or matmul_all_reduce.
        host: what the library gives to algorithms.
        slots: memory of the slots, one of rows_each x request.n elements for each member.
        rows_each: rows of a slot.
        out_stride: of what the kernel writes.
        tells: matmul_all_reduce: members meet in front of the sums, and say where their outputs are; else a launch
            before has done so.
    """
    team, along = host.team, request.options["bias"]
    two_shot = request.op == "matmul_all_reduce"
    on_cpu = request.target.type is DeviceType.CPU
    total = request.m if two_shot else request.m // team.size
    first = team.rank * rows_each if two_shot else 0
    item = getattr(torch, request.out_dtype).itemsize
    columns = min(_MOST_COLUMNS, 1 << (request.n - 1).bit_length())
    down = max(1, (_TILE_CPU if on_cpu else _TILE_GPU) // columns)
    down = min(down, 1 << (rows_each - 1).bit_length())
    tiles_n = -(-request.n // columns)
    tiles = -(-rows_each // down) * tiles_n
    if two_shot or on_cpu:
        programs = programs_for(request, host, tiles, meeting=two_shot)
    else:
        programs = min(tiles, request.options["config"].get("num_sms", tiles))
    names: tuple[str, ...] = ("out",) if along == "none" else ("out", "bias")
    arguments = {
        "slots": slots,
        "control": team.control.tensor.view(torch.int64),
        "bases": team.bases,
        "me": team.rank,
        "rank": team.world_rank,
        "rows": min(rows_each, total - first),
        "n": request.n,
        "rows_each": rows_each,
        "first": first,
        "out_down": out_stride[0],
        "out_right": out_stride[1],
        "bias_step": 0 if request.bias_stride is None else request.bias_stride[along == "columns"],
        "tiles_n": tiles_n,
        "timeout_ns": team.timeout_ns,
        "status": team.status_ptr,
        "SIZE": team.size,
        "FORM": "two_shot" if two_shot else "rows",
        "TELLS": tells,
        "BIAS": along,
        "SLOTS_WIDE": request.n * item % _ROW_NBYTES == 0,
        "OUT_WIDE": request.aligned[2] and out_stride[1] == 1 and out_stride[0] * item % _ROW_NBYTES == 0,
        "BM": down,
        "BN": columns,
    }
    if along == "none":
        arguments["bias"] = None
    options = {} if on_cpu else {"num_warps": _WARPS[request.target.type]}
    return BoundKernel(sum_slots, programs, arguments, names, team.device, options)
