"""Descriptions of algorithms of every device, and rough times for a choice where nothing was measured."""

from __future__ import annotations

from iris_core.dispatch.requests import POINT_TO_POINT, nodes_of
from iris_core.types import CollectiveRequest, DeviceType, FusedRequest, PluginInfo, PluginKind
from iris_core.world.scaling import Level, Machine

_FLOPS = {"sm_80": 2.5e14, "sm_90": 7.2e14, "sm_100": 1.4e15, "gfx942": 5e14, "gfx950": 1.2e15}
"""Of 16-bit floats per second, as a good library reaches them."""

_FLOAT32_PART = {DeviceType.CUDA: 1 / 15, DeviceType.HIP: 1 / 8}
"""Of that, for float32; for TF32 it is a half."""

_OTHER_GPU_FLOPS, _CPU_FLOPS = 1e14, 2e10
_GPU_LINK, _CPU_LINK = 3e11, 2e9
_GPU_LAUNCH_S = _GPU_BARRIER_S = 3e-6
_CPU_LAUNCH_S, _CPU_BARRIER_S = 1e-4, 1e-3
_CPU_LEVELS = Level(_CPU_BARRIER_S, _CPU_LINK), Level(1e-3, 1e9)
_GPU_MESSAGE_S, _CPU_MESSAGE_S = 1e-6, 1e-4
_LIKE = {"broadcast": "all_gather", "reduce": "reduce_scatter", "gather": "all_gather", "scatter": "reduce_scatter"}


def everywhere(name: str, summary: str) -> PluginInfo:
    """Return the description of algorithms that work on every device."""
    return PluginInfo(name=name, kind=PluginKind.COLLECTIVE, summary=summary, devices=frozenset(DeviceType))


def product_s(request: FusedRequest, efficiency: float | None = None) -> float:
    """Seconds for the product of one rank.

    `efficiency` is that of a kernel that gives whole tiles to multiprocessors, in relation to a library's; None for the
    library's, which also divides a product that has few tiles.
    """
    on_cpu = request.target.type is DeviceType.CPU
    flops = _CPU_FLOPS if on_cpu else _FLOPS.get(request.target.arch, _OTHER_GPU_FLOPS)
    if request.dtype == "float32" and not on_cpu:
        flops *= 1 / 2 if request.options["tf32"] else _FLOAT32_PART[request.target.type]
    seconds = 2.0 * request.m * request.n * request.k / flops
    if efficiency is None:
        return seconds
    if on_cpu:
        return seconds / efficiency
    rows, columns = (64, 128) if request.m <= 64 else (128, 256 if request.n >= 256 else 128)
    tiles = -(-request.m // rows) * -(-request.n // columns)
    tile_s = 2.0 * rows * columns * request.k * request.processors / flops
    # where tiles are fewer than multiprocessors, the others have nothing to do while one tile is computed
    return max(seconds, -(-tiles // request.processors) * tile_s) / efficiency


def moving_s(request: FusedRequest) -> float:
    """Seconds in which one rank's data goes over the links."""
    link = _CPU_LINK if request.target.type is DeviceType.CPU else _GPU_LINK
    size, nodes = request.group_size, len(nodes_of(request))
    if nodes > 1:
        nbytes = request.nbytes * (size if request.op == "matmul_all_gather" else 1)
        op = "all_gather" if "gather" in request.op else request.op.removeprefix("matmul_")
        return _machine(request, nodes).seconds(op, nbytes, flat=False)
    if request.op == "matmul_all_gather":
        return request.nbytes * (size - 1) / link
    shots = 2 if request.op == "matmul_all_reduce" else 1
    return shots * request.nbytes * (size - 1) / size / link


def fixed_s(request: FusedRequest, *, launches: int, barriers: int) -> float:
    """Seconds for launches of kernels, and for barriers in them."""
    if request.target.type is DeviceType.CPU:
        return launches * _CPU_LAUNCH_S + barriers * _CPU_BARRIER_S
    return launches * _GPU_LAUNCH_S + barriers * _GPU_BARRIER_S


def between_nodes_s(request: CollectiveRequest, *, flat: bool) -> float:
    """Seconds of a collective between nodes: as one of all members, or by levels; see `iris_core.world.scaling`.

    Each message to another member costs its sender a little: by levels they are fewer.
    """
    op, nodes, size = request.op, len(nodes_of(request)), request.group_size
    if op in POINT_TO_POINT:
        return _machine(request, nodes).seconds("all_gather", request.nbytes)
    has_part = op in ("all_gather", "gather") or (op == "scatter" and request.rank != request.options["root"])
    message_s = _CPU_MESSAGE_S if request.target.type is DeviceType.CPU else _GPU_MESSAGE_S
    messages = size - 1 if flat else size - size // nodes if op == "all_to_all" else size // nodes + nodes - 2
    whole = request.nbytes * (size if has_part else 1)
    return _machine(request, nodes).seconds(_LIKE.get(op, op), whole, flat=flat) + messages * message_s


def _machine(request: CollectiveRequest | FusedRequest, nodes: int) -> Machine:
    levels = _CPU_LEVELS if request.target.type is DeviceType.CPU else ()
    return Machine(nodes, max(1, request.group_size // nodes), *levels)
