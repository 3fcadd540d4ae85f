"""all_gather, all_to_all and all_reduce by kernels in Gluon; see `iris_gluon.collectives.push` and `.reduce`.

What they serve, how requests are described to kernels and what they cost by the model is that of the portable
algorithms in Triton; here is what differs.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl

from iris_core.types import Availability, DeviceType
from iris_gluon import _compat
from iris_gluon.collectives.push import push
from iris_gluon.collectives.push_bulk import push_bulk
from iris_gluon.collectives.reduce import one_shot, two_shot
from iris_gluon.info import GLUON_INFO
from iris_triton.collectives.parts.portable import Plan, Portable
from iris_triton.collectives.parts.sizes import (
    MOST_PROGRAMS,
    VECTOR_NBYTES,
    Blocks,
    Layout,
    blocks_for,
    carrier_of,
    columns_first,
    layout_of,
    pieces,
    rounded_up,
)
from iris_triton.collectives.pull import PER_CALL
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from iris_core.dispatch.team import Region, Team
    from iris_core.types import CollectiveRequest, PluginInfo

_LANDING = "gluon landing"
"""Name of the region into which others store what their peers cannot address; all algorithms here meet before they do,
so they share it."""

_BOOL = {"sum": "max", "product": "min", "min": "min", "max": "max", "band": "min", "bor": "max", "bxor": "bxor"}
"""Reductions of bool, as those of bytes that are 0 or 1."""


_SMALL = 1 << 30
"""Tensors that reach less far are indexed by 32 bits, blocks behind their ends included."""


def is_wide(layout: Layout, item: int) -> bool:
    """Say whether a tensor consists of rows of whole 16-byte vectors, if it begins at one.

    Args:
        layout: where its elements lie.
        item: bytes of an element.
    """
    if layout.num_dims == 0:
        return True
    whole = (layout.sizes[-1], *layout.strides[:-1])
    return layout.strides[-1] == 1 and all(n * item % VECTOR_NBYTES == 0 for n in whole)


def _reach(layout: Layout) -> int:
    """Upper bound of the distances between elements, and of their number."""
    return sum(size * max(stride, 1) for size, stride in zip(layout.sizes, layout.strides, strict=True)) + math.prod(
        layout.sizes
    )


class _Gluon(Portable):
    """What the algorithms here have in common.  Gluon does not pipeline loops, so there are no stages to choose."""

    uses: tuple[str, ...] = (
        "comm_sms",
        "num_warps",
        "block_size_m",
        "block_size_n",
        "threads_per_warp",
        "waves_per_eu",
    )

    variants: tuple[str, ...] = ()
    """Values of the config's fields for variants that mean this algorithm where use_gluon is asked for."""

    @property
    def info(self) -> PluginInfo:
        """The backend's description."""
        return GLUON_INFO

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        config, target = request.options.get("config", {}), request.target
        lanes = config.get("threads_per_warp", target.warp_size)
        if lanes != target.warp_size:
            return Availability.no(f"threads_per_warp is {lanes}, and this device has {target.warp_size}")
        if "waves_per_eu" in config and target.type is not DeviceType.HIP:
            return Availability.no("waves_per_eu speaks of AMD GPUs")
        warps = config.get("num_warps", 1)
        if warps & (warps - 1):
            return Availability.no(f"num_warps is {warps}, which is no power of two")
        return super().supports(request)

    @staticmethod
    def _blocks(request: CollectiveRequest, team: Team, elements: int | None, item: int, *, reduces: bool) -> Blocks:
        """How to divide a launch, in blocks of a vector or more."""
        blocks = blocks_for(request, team, elements, item, reduces=reduces)
        options = dict(blocks.options)
        options.pop("num_stages", None)
        waves = request.options["config"].get("waves_per_eu")
        if waves:
            options["waves_per_eu"] = waves
        return Blocks(blocks.programs, max(blocks.block, VECTOR_NBYTES // item), options)

    @staticmethod
    def _arguments(
        team: Team, blocks: Blocks, landing: Region, capacity: int, inner: Layout, outer: Layout, item: int
    ) -> dict[str, Any]:
        """Arguments of all kernels."""
        return {
            "control": team.control.tensor.view(torch.int64),
            "landing": landing.tensor,
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "capacity": capacity,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "in_sizes": inner.sizes,
            "in_strides": inner.strides,
            "out_sizes": outer.sizes,
            "out_strides": outer.strides,
            "SIZE": team.size,
            "IN_DIMS": inner.num_dims,
            "IN_WIDE": is_wide(inner, item),
            "OUT_DIMS": outer.num_dims,
            "OUT_WIDE": is_wide(outer, item),
            "INDEX": gl.int32 if max(_reach(inner), _reach(outer)) < _SMALL else gl.int64,
            "BLOCK": blocks.block,
        }


# -- moving -----------------------------------------------------------------------------------------------------------
class Push(_Gluon):
    """all_gather or all_to_all by stores into the others' memory.

    Args:
        op: which of the two.
    """

    def __init__(self, op: str) -> None:
        super().__init__(op, "gluon_push")
        self.variants = ("persistent",)
        if op == "all_to_all":
            self.layouts = ("torch", "columns")

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings, what goes over the links, and copying what has landed."""
        out_nbytes = request.nbytes * (request.group_size if self.op == "all_gather" else 1)
        lands = request.options.get("uneven", False) or not request.direct_out  # what a rank alone knows must not count
        moved = out_nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, meetings=2, moved=moved, copied=out_nbytes * lands)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Make the table, and bind the kernel."""
        options = request.options
        carrier = carrier_of(request.dtype)
        item = carrier.dtype.itemsize
        table, part = _table(request, carrier.parts)
        layouts = []
        for shape, stride in ((request.shape, "in_stride"), (options["out_shape"], "out_stride")):
            extended = carrier.extend(shape, options[stride])
            if options["layout"] == "columns":
                extended = columns_first(*extended, team.size)
            layouts.append(layout_of(*extended))
        inner, outer = layouts
        landing, capacity = team.control, 1
        if options["uneven"] or not request.direct_out:  # of uneven calls, all members need it if one does
            landing, capacity = pieces(team, part, item, team.size, name=_LANDING)
        blocks = self._blocks(request, team, None if part is None else part * team.size, item, reduces=False)
        words = torch.tensor(table, dtype=torch.int64, device=team.device)
        arguments = self._arguments(team, blocks, landing, capacity, inner, outer, item) | {
            "table": words,
            "DIRECT": request.direct_out,
        }
        kernel = BoundKernel(push, blocks.programs, arguments, PER_CALL, team.device, blocks.options)
        return Plan(kernel, carrier, memory=words)


def _table(request: CollectiveRequest, parts: int) -> tuple[list[int], int | None]:
    """The table of the kernel, and the number of elements for a member, if all know it."""
    size, options = request.group_size, request.options
    total = math.prod(request.shape) * parts
    if options["uneven"]:
        row = math.prod(request.shape[1:]) * parts
        given, got = [row * n for n in options["in_splits"]], [row * n for n in options["out_splits"]]
        return [*_begins(given), *given, *_begins(got), *got], None
    part = total if request.op == "all_gather" else total // size
    each = [part] * size
    return [*([0] * size if request.op == "all_gather" else _begins(each)), *each, *_begins(each), *each], part


def _begins(numbers: Sequence[int]) -> list[int]:
    return [0, *itertools.accumulate(numbers)][:-1]


_LINE_NBYTES = 128
_CHUNK_NBYTES, _STAGES = 16 << 10, 4  # the best of benchmarks/results/gluon_bulk-2.json
_HOPPER = 90


class PushBulk(_Gluon):
    """all_gather or all_to_all of large messages by Hopper's copy unit, which leaves multiprocessors to others.

    Attributes:
        measured_only: it is chosen where a table says so, or by name.

    Args:
        op: which of the two.
    """

    uses = ("comm_sms", "num_warps", "threads_per_warp")
    measured_only = True
    drops_plans = False
    """The kernel's scratch memory comes with its first launch, and graphs know it."""

    def __init__(self, op: str) -> None:
        super().__init__(op, "gluon_bulk")

    def supports(self, request: CollectiveRequest) -> Availability:
        """Say whether this algorithm serves a call: dense tensors, the output on the heap, Hopper or newer."""
        if request.options.get("uneven"):
            return Availability.no("it sends parts of equal size")
        if request.options.get("layout", "torch") != "torch":
            return Availability.no(f"it does not serve layout={request.options['layout']!r}")
        if not request.direct_out or layout_of(request.shape, request.options["in_stride"]).num_dims:
            return Availability.no("it copies contiguous tensors, to outputs on the heap")
        target = request.target
        capability = target.arch.removeprefix("sm_").rstrip("af")
        hopper = target.type is DeviceType.CUDA and capability.isdigit() and int(capability) >= _HOPPER
        if target.type is not DeviceType.CPU and not hopper:
            return Availability.no(f"it needs the copy unit of NVIDIA's Hopper or newer, and this is {target.arch!r}")
        return super().supports(request)

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings, and what goes over the links."""
        out_nbytes = request.nbytes * (request.group_size if self.op == "all_gather" else 1)
        moved = out_nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, meetings=2, moved=moved)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel."""
        config = request.options["config"]
        carrier = carrier_of(request.dtype)
        count = math.prod(request.shape) * carrier.parts
        apart = 0
        if self.op == "all_to_all":
            count //= team.size
            apart = count
        on_cpu = request.target.type is DeviceType.CPU
        chunks = -(-count * carrier.dtype.itemsize // _CHUNK_NBYTES)
        most = config.get("comm_sms", 1 if on_cpu else MOST_PROGRAMS)
        arguments = {
            "control": team.control.tensor.view(torch.int64),
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "count": count,
            "apart": apart,
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "SIZE": team.size,
            "UNIT": _LINE_NBYTES // carrier.dtype.itemsize,
            "CHUNK_BYTES": _CHUNK_NBYTES,
            "STAGES": _STAGES,
        }
        options = {} if on_cpu else {"num_warps": config.get("num_warps", 1)}
        programs = max(1, min(most, team.max_programs, chunks))
        return Plan(WithScratch(push_bulk, programs, arguments, PER_CALL, team.device, options), carrier)


class WithScratch(BoundKernel):
    """A kernel that describes memory to the copy unit, in scratch memory of its own.

    Triton asks for that at every launch.  It gets the same each time, so nothing is allocated, and graphs may keep the
    address: launches of a team follow each other.
    """

    _scratch: torch.Tensor | None = None

    def __call__(self, stream: Any, *tensors: torch.Tensor) -> None:
        """Launch; see `BoundKernel`."""
        with _compat.scratch_from(self._allocate):
            super().__call__(stream, *tensors)

    def _allocate(self, nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < nbytes:
            # torch aligns to 512 bytes; descriptions need 128
            self._scratch = torch.empty(nbytes, dtype=torch.int8, device=f"cuda:{self._index}")
        return self._scratch


# -- reducing ---------------------------------------------------------------------------------------------------------
class _Reduction(_Gluon):
    """all_reduce in one of two forms.

    Args:
        name: the algorithm.
    """

    def __init__(self, name: str) -> None:
        super().__init__("all_reduce", name)

    def _bind(
        self,
        request: CollectiveRequest,
        team: Team,
        kernel: Any,
        landing: Region,
        capacity: int,
        handled: int,
        **more: Any,
    ) -> Plan:
        """Bind a kernel, of which a rank handles so many elements at least."""
        item = getattr(torch, request.dtype).itemsize
        op = request.options["reduction"]
        carrier = carrier_of("uint8") if request.dtype == "bool" else None
        if carrier is not None:
            op = _BOOL[op]
        inner = layout_of(request.shape, request.options["in_stride"])
        outer = layout_of(request.options["out_shape"], request.options["out_stride"])
        blocks = self._blocks(request, team, handled, item, reduces=True)
        arguments = self._arguments(team, blocks, landing, capacity, inner, outer, item)
        arguments |= {"OP": op, "count": math.prod(request.shape), **more}
        kernel = BoundKernel(kernel, blocks.programs, arguments, PER_CALL, team.device, blocks.options)
        return Plan(kernel, carrier)


class OneShot(_Reduction):
    """all_reduce in one step: everything to everybody."""

    variants = ("one_shot",)

    def __init__(self) -> None:
        super().__init__("gluon_one_shot")

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: two meetings; every input goes over the links to everybody, and is read where it lands."""
        moved = request.nbytes * (request.group_size - 1)
        return self.model(request, meetings=2, moved=moved, copied=request.nbytes * request.group_size)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel."""
        count, item = math.prod(request.shape), getattr(torch, request.dtype).itemsize
        landing, capacity = pieces(team, count, item, team.size, name=_LANDING)
        return self._bind(request, team, one_shot, landing, capacity, count)


class TwoShot(_Reduction):
    """all_reduce in two steps: each rank reduces its shard of all inputs, and stores it into all outputs."""

    variants = ("two_shot",)

    def __init__(self) -> None:
        super().__init__("gluon_two_shot")

    def cost(self, request: CollectiveRequest) -> float:
        """Estimate seconds: shards come, and results go; what lands is met for and copied."""
        lands = (not request.direct_in) + (not request.direct_out)
        moved = 2 * request.nbytes * (request.group_size - 1) / request.group_size
        return self.model(request, meetings=2 + (not request.direct_in), moved=moved, copied=request.nbytes * lands)

    def plan(self, request: CollectiveRequest, team: Team) -> Plan:
        """Bind the kernel."""
        count, item = math.prod(request.shape), getattr(torch, request.dtype).itemsize
        shard = rounded_up(-(-count // team.size), item)
        direct_in, direct_out = request.direct_in, request.direct_out
        landing, capacity = team.control, shard
        if not (direct_in and direct_out):
            number = team.size * ((not direct_in) + (not direct_out))
            landing, capacity = pieces(team, shard, item, number, halves=2 if direct_in else 1, name=_LANDING)
        return self._bind(
            request, team, two_shot, landing, capacity, shard, shard=shard, IN_DIRECT=direct_in, OUT_DIRECT=direct_out
        )
