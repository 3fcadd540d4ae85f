"""Tiles, programs and options of a launch.

They depend only on values that are equal on all members; otherwise members would wait at different barriers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.config import AMDS_TILE
from iris_core.dispatch.products import SCALED_BLOCK
from iris_core.types import DeviceType

if TYPE_CHECKING:
    from collections.abc import Mapping

    from iris_core.types import DeviceTarget, FusedRequest

USED_CONFIG = (
    "block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_sms", "cache_modifier_a", "cache_modifier_b",
    "num_xcds", "chunk_size", "num_warps", "num_stages",
)  # fmt: skip
"""Fields of the config that every kernel makes use of."""

_LEAST_BLOCK = 16
"""Of tl.dot."""

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
    """Tiling of a product: tiles of block_m x block_n, the kernel's constexprs, the compiler's options."""

    block_m: int
    block_n: int
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the numbers of tile rows and tile columns."""
        return -(-rows // self.block_m), -(-columns // self.block_n)


def tiling(request: FusedRequest, rows: int, inner: int) -> Tiling:
    """Choose the tiling of a product by the request's config, else by its shape.

    Args:
        request: the call.
        rows: number of rows that tiles do not cross, such as a shard's.
        inner: length of the inner loop.
    """
    config = request.options["config"]
    if request.options["layout"] == "tiles":
        config = {**AMDS_TILE, **config}
    m, n, k, warps, stages = _preferred(request, rows, inner)
    m, n, k = (config.get(f"block_size_{side}", size) for side, size in zip("mnk", (m, n, k), strict=True))
    # tl.dot knows TF32 on NVIDIA; on AMD there is float32 itself in the matrix units
    precision = "tf32" if request.options["tf32"] and request.target.type is DeviceType.CUDA else "ieee"
    constants = {
        "BM": m,
        "BN": n,
        "BK": k,
        "GROUP": config.get("group_size_m", 8),
        "EVEN_K": inner % k == 0,
        "PRECISION": precision,
        "A_CACHE": config.get("cache_modifier_a", ""),
        "B_CACHE": config.get("cache_modifier_b", ""),
        "STAGES": config.get("num_stages", stages),
        "XCDS": config.get("num_xcds", 1),
        "CHUNK": config.get("chunk_size", 1),
    }
    return Tiling(m, n, constants, {"num_warps": config.get("num_warps", warps)})


def _preferred(request: FusedRequest, rows: int, inner: int) -> tuple[int, int, int, int, int]:
    """Return the default block_m, block_n, block_k, num_warps, num_stages."""
    if request.target.type is DeviceType.CPU:
        m, n, k = (max(_LEAST_BLOCK, min(_CPU_MOST, 1 << (x - 1).bit_length())) for x in (rows, request.n, inner))
        return m, n, k, 4, 1
    item = getattr(torch, request.dtype).itemsize
    block_k = 128 // item  # of one line
    if rows <= 64:
        return 64, 128, block_k, 4, 3
    is_wide = request.n >= 256 and request.scales != "blocks"  # whose sums are apart
    if request.target.type is DeviceType.CUDA and is_wide and item <= 2:
        return 128, 256, block_k, 8, 3
    return 128, 128, block_k, 8, 3 if request.target.type is DeviceType.CUDA else 2


def config_problem(request: FusedRequest, used: tuple[str, ...], scaled_sides: tuple[str, ...]) -> str:
    """Return why an algorithm that uses these fields does not support a config; empty if it does.

    `scaled_sides`: of a tile, those that may not be longer than a block with one scale.
    """
    config = request.options["config"]
    unused = [name for name in config if name not in used]
    if unused:
        return f"it has no use for {', '.join(unused)} of the config"
    for name in ("block_size_m", "block_size_n", "block_size_k"):
        value = config.get(name, _LEAST_BLOCK)
        if value < _LEAST_BLOCK or value & (value - 1):
            return f"{name} is {value}, and tl.dot takes powers of two from {_LEAST_BLOCK} on"
    if "num_fetch_sms" in used and "num_sms" in config and config["num_sms"] <= config.get("num_fetch_sms", 1):
        return "some programs fetch and the others compute: num_sms must be the larger number"
    for name in scaled_sides if request.scales == "blocks" else ():
        if config.get(name, SCALED_BLOCK) > SCALED_BLOCK:
            return f"{name} is {config[name]}, and scales are of blocks of {SCALED_BLOCK}"
    warps = config.get("num_warps", 4)
    if warps & (warps - 1):
        return f"num_warps is {warps}, which is no power of two"
    return ""


def dtype_problem(request: FusedRequest) -> str:
    """Return why the device cannot multiply the operands; empty if it can."""
    return fp8_problem(request.dtype, request.target)


def fp8_problem(dtype: str, target: DeviceTarget) -> str:
    """Return why a device does not know a type of 8-bit floats; empty if it does, or for another type."""
    known, on_cpu = _ARCH_FP8.get(dtype, ()), target.type is DeviceType.CPU
    if not known or ("sm_90" if on_cpu else target.arch) in known:
        return ""
    if on_cpu:
        return f"the CPU executor does not know {dtype}"
    return f"{target.arch} does not know {dtype}; these do: {', '.join(known)}"
