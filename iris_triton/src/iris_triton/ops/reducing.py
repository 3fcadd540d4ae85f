"""matmul_reduce_scatter and matmul_all_reduce in one kernel; see `iris_triton.ops.reduce_kernel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris_core.ops.model import fixed_s, moving_s, product_s
from iris_triton.ops.fused import (
    Fused,
    Plan,
    bind,
    common_arguments,
    efficiency,
    peer_memory,
    programs_for,
    staging,
    staging_nbytes,
    tile_shapes,
)
from iris_triton.ops.reduce_kernel import matmul_reduce
from iris_triton.ops.shapes import tiling

if TYPE_CHECKING:
    from iris_core.ops.host import Host
    from iris_core.types import FusedRequest


class Reduce(Fused):
    """A product that is added up by tiles: "push", "two_shot" or "one_shot"."""

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return tile_shapes(request)

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides what is sent, except in one step the sums."""
        moved = moving_s(request)
        if self.name == "one_shot":
            moved *= request.group_size / 2
        meetings = 3 if self.name == "two_shot" else 2
        hidden = max(product_s(request, efficiency(request)), moved)
        return hidden + moved / 4 + fixed_s(request, launches=1, meetings=meetings)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Divide the product into tiles, find memory for the slots, bind the kernel."""
        size = host.team.size
        form = self.name
        if self.op == "matmul_reduce_scatter":
            form = "rows" if request.options["layout"] == "torch" else "tiles"
        rows = request.m // size if form == "rows" else request.m
        tiles = tiling(request, rows, request.k)
        tiles_m, tiles_n = tiles.tiles(rows, request.n)
        total = tiles_m * tiles_n
        per_owner = total if form in ("rows", "one_shot") else -(-total // size)
        item = getattr(torch, request.out_dtype).itemsize
        slots_nbytes = size * per_owner * tiles.block_m * tiles.block_n * item
        stages = form == "two_shot" and not request.reach_out
        need = slots_nbytes + stages * staging_nbytes(request.m, request.n, request.out_dtype)
        memory = peer_memory(host, need, f"{self.op} ({self.name})")
        staged = staging(memory, slots_nbytes, request.m, request.n, request.out_dtype) if stages else None
        down, right = request.out_stride if staged is None else staged.stride()
        arguments = common_arguments(request, host, tiles) | {
            "slots": memory[:slots_nbytes].view(getattr(torch, request.out_dtype)),
            "m": request.m,
            "k": request.k,
            "a_down": request.a_stride[0],
            "a_right": request.a_stride[1],
            "out_down": down,
            "out_right": right,
            "tiles_m": tiles_m,
            "tiles_n": tiles_n,
            "per_owner": per_owner,
            "FORM": form,
            "A_ALIGNED": request.aligned[0],
            "B_ALIGNED": request.aligned[1],
            "OUT_ALIGNED": request.aligned[2],
        }
        programs = programs_for(request, host, per_owner * (1 if form == "one_shot" else size), meeting=True)
        kernel = bind(request, host, matmul_reduce, programs, arguments, tiles)
        return Plan(kernel, staged_out=staged, aux_buffer=memory[:need])
