"""Rough times of products and of moving, for a choice where nothing was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_core.types import DeviceType

if TYPE_CHECKING:
    from iris_core.types import FusedRequest

_FLOPS = {"sm_80": 2.5e14, "sm_90": 6.5e14, "sm_100": 1.4e15, "gfx942": 5e14, "gfx950": 1.2e15}
"""Of 16-bit floats per second, as a good library reaches them."""

_FLOAT32_PART = {DeviceType.CUDA: 1 / 15, DeviceType.HIP: 1 / 8}
"""Of that, for float32; for TF32 it is a half."""

_OTHER_GPU_FLOPS, _CPU_FLOPS = 1e14, 2e10
_GPU_LINK, _CPU_LINK = 3e11, 2e9
_GPU_LAUNCH_S, _CPU_LAUNCH_S = 3e-6, 1e-4
_GPU_MEETING_S, _CPU_MEETING_S = 3e-6, 1e-3


def product_s(request: FusedRequest, efficiency: float = 1.0) -> float:
    """Seconds for the product of one rank.

    Args:
        request: the call.
        efficiency: of the kernel, in relation to a good library's.
    """
    on_cpu = request.target.type is DeviceType.CPU
    flops = _CPU_FLOPS if on_cpu else _FLOPS.get(request.target.arch, _OTHER_GPU_FLOPS)
    if request.dtype == "float32" and not on_cpu:
        flops *= 1 / 2 if request.options["tf32"] else _FLOAT32_PART[request.target.type]
    return 2.0 * request.m * request.n * request.k / (flops * efficiency)


def moving_s(request: FusedRequest) -> float:
    """Seconds in which one rank's data goes over the links."""
    link = _CPU_LINK if request.target.type is DeviceType.CPU else _GPU_LINK
    size = request.group_size
    if request.op == "matmul_all_gather":
        return request.nbytes * (size - 1) / link
    shots = 2 if request.op == "matmul_all_reduce" else 1
    return shots * request.nbytes * (size - 1) / size / link


def fixed_s(request: FusedRequest, *, launches: int, meetings: int) -> float:
    """Seconds for launches of kernels, and for meetings of ranks in them."""
    if request.target.type is DeviceType.CPU:
        return launches * _CPU_LAUNCH_S + meetings * _CPU_MEETING_S
    return launches * _GPU_LAUNCH_S + meetings * _GPU_MEETING_S
