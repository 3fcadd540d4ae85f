"""What the algorithms in Gluon have in common: whom they serve, and how requests are described to kernels.

Both, and what a call costs by the model, is that of the portable algorithms in Triton; here is what differs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from triton.experimental.gluon import language as gl

from iris_core.types import Availability, DeviceType
from iris_gluon.info import GLUON_INFO
from iris_triton.collectives.parts.barrier import meeting_arguments
from iris_triton.collectives.parts.portable import Portable
from iris_triton.collectives.parts.sizes import VECTOR_NBYTES, Blocks, Layout, blocks_for, layout_arguments

if TYPE_CHECKING:
    from iris_core.dispatch.team import Region, Team
    from iris_core.types import CollectiveRequest, PluginInfo

LANDING = "gluon landing"
"""Name of the region into which others store what their peers cannot address; all algorithms here meet before they do,
so they share it."""

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


class GluonCollective(Portable):
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
        team: Team, landing: Region, capacity: int, inner: Layout, outer: Layout, item: int
    ) -> dict[str, Any]:
        """Arguments of all kernels."""
        return meeting_arguments(team) | {
            "landing": landing.tensor,
            "capacity": capacity,
            **layout_arguments(inner, outer),
            "IN_WIDE": is_wide(inner, item),
            "OUT_WIDE": is_wide(outer, item),
            "INDEX": gl.int32 if max(_reach(inner), _reach(outer)) < _SMALL else gl.int64,
        }
