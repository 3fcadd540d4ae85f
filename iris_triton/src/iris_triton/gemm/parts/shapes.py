"""Tiles, programs and options of a launch.

They depend on nothing that may differ between members, or members would wait for each other at different places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.products import FP8, ROW_NBYTES
from iris_core.types import DeviceType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from iris_core.types import FusedRequest

USED_CONFIG = (
    "block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_sms", "cache_modifier_a", "cache_modifier_b",
    "num_xcds", "chunk_size", "num_warps", "num_stages",
)  # fmt: skip
"""Fields of the config that every kernel makes use of."""

LEAST_BLOCK = 16
"""Of tl.dot."""

TILE = (256, 64)
"""Rows and columns of a tile of layout "tiles", where the config does not say."""

_CPU_MOST = 128  # on the CPU an operation on a block costs the same for 1 and for 1000

_ARCH_FP8 = {
    "float8_e4m3fn": ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950"),
    "float8_e5m2": ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950"),
    "float8_e4m3fnuz": ("gfx942",),
    "float8_e5m2fnuz": ("gfx942",),
}
"""Targets whose matrix units multiply 8-bit floats; the CPU executor knows those of the first two."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is divided.

    Attributes:
        block_m, block_n, block_k: a tile, and the step of the inner dimension.
        group: row tiles that are taken together.
        constants: constexprs of the kernels.
        options: num_warps and the like.
    """

    block_m: int
    block_n: int
    block_k: int
    group: int
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """Tiles below each other, and beside each other."""
        return -(-rows // self.block_m), -(-columns // self.block_n)


def tiling(request: FusedRequest, rows: int, inner: int) -> Tiling:
    """Return how to divide a product.

    Args:
        request: the call; its config counts.
        rows: rows that belong together: tiles do not reach over them.
        inner: length of the inner loop.
    """
    config = request.options["config"]
    on_cpu = request.target.type is DeviceType.CPU
    m, n, k, warps, stages = _preferred(request, rows, inner)
    if request.options["layout"] == "tiles":
        m, n = TILE
    m, n = config.get("block_size_m", m), config.get("block_size_n", n)
    k = config.get("block_size_k", k)
    # tl.dot knows TF32 on NVIDIA; on AMD there is float32 itself in the matrix units
    precision = "tf32" if request.options["tf32"] and request.target.type is DeviceType.CUDA else "ieee"
    group = config.get("group_size_m", 1 if request.options["layout"] == "tiles" else 8)
    stages = config.get("num_stages", stages)
    constants = {
        "BM": m,
        "BN": n,
        "BK": k,
        "GROUP": group,
        "EVEN_K": inner % k == 0,
        "PRECISION": precision,
        "A_CACHE": config.get("cache_modifier_a", ""),
        "B_CACHE": config.get("cache_modifier_b", ""),
        "STAGES": stages,
        "XCDS": config.get("num_xcds", 1),
        "CHUNK": config.get("chunk_size", 1),
    }
    options = {} if on_cpu else {"num_warps": config.get("num_warps", warps)}
    return Tiling(m, n, k, group, constants, options)


def _preferred(request: FusedRequest, rows: int, inner: int) -> tuple[int, int, int, int, int]:
    """block_m, block_n, block_k, num_warps, num_stages without a config."""
    if request.target.type is DeviceType.CPU:
        return _fitting(rows, _CPU_MOST), _fitting(request.n, _CPU_MOST), _fitting(inner, _CPU_MOST), 4, 1
    item = getattr(torch, request.dtype).itemsize
    block_k = 128 // item  # of one line
    if rows <= 64:
        return 64, 128, block_k, 4, 3
    if request.target.type is DeviceType.CUDA and request.n >= 256 and item <= 2:
        return 128, 256, block_k, 8, 3
    return 128, 128, block_k, 8, 3 if request.target.type is DeviceType.CUDA else 2


def _fitting(size: int, most: int) -> int:
    return max(LEAST_BLOCK, min(most, 1 << (max(size, 1) - 1).bit_length()))


def config_problem(request: FusedRequest, used: tuple[str, ...]) -> str:
    """Why a config cannot be fulfilled; empty if it can.

    Args:
        request: the call.
        used: fields that the algorithm makes use of.
    """
    config = request.options["config"]
    unused = [name for name in config if name not in used]
    if unused:
        return f"it has no use for {', '.join(unused)} of the config"
    for name in ("block_size_m", "block_size_n", "block_size_k"):
        value = config.get(name, LEAST_BLOCK)
        if value < LEAST_BLOCK or value & (value - 1):
            return f"{name} is {value}, and tl.dot takes powers of two from {LEAST_BLOCK} on"
    if "num_fetch_sms" in used and "num_sms" in config and config["num_sms"] <= config.get("num_fetch_sms", 1):
        return "some programs fetch and the others compute: num_sms must be the larger number"
    warps = config.get("num_warps", 4)
    if warps & (warps - 1):
        return f"num_warps is {warps}, which is no power of two"
    return ""


def dtype_problem(request: FusedRequest) -> str:
    """Why operands cannot be multiplied on the device; empty if they can."""
    if request.dtype not in FP8:
        return ""
    known = _ARCH_FP8[request.dtype]
    if request.target.type is DeviceType.CPU:
        return "" if "sm_90" in known else f"the CPU executor does not know {request.dtype}"
    if request.target.arch in known:
        return ""
    return f"{request.target.arch} does not multiply {request.dtype}; these do: {', '.join(known)}"


def padded(columns: int, item: int) -> int:
    """Elements from row to row of dense rows that begin at multiples of 16 bytes."""
    unit = max(1, ROW_NBYTES // item)
    return -(-columns // unit) * unit
