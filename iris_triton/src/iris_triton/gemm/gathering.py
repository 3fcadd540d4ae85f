"""all_gather_matmul and matmul_all_gather in one kernel; see `iris_triton.gemm.gather_kernels`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceType
from iris_triton.gemm.fused import (
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
from iris_triton.gemm.gather_kernels import fetch_product, pull_product, push_product
from iris_triton.gemm.shapes import USED_CONFIG, padded, tiling

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_triton.gemm.shapes import Tiling

_FETCHERS_GPU, _FETCHERS_CPU = 16, 1
_ROW_NBYTES = 16


class Push(Fused):
    """matmul_all_gather: every tile goes to all members as soon as it is computed."""

    def __init__(self) -> None:
        super().__init__("matmul_all_gather", "push")

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return tile_shapes(request)

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides what is sent, or the other way round."""
        hidden = max(product_s(request, efficiency(request)), moving_s(request))
        return hidden + fixed_s(request, launches=1, meetings=2)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory where the output cannot be reached, bind the kernel."""
        tiles = tiling(request, request.m, request.k)
        tiles_m, tiles_n = tiles.tiles(request.m, request.n)
        staged = memory = None
        if not request.reach_out:
            need = staging_nbytes(*request.out_shape, request.out_dtype)
            memory = peer_memory(host, need, f"{self.op} ({self.name})")[:need]
            staged = staging(memory, 0, *request.out_shape, request.out_dtype)
        arguments = common_arguments(request, host, tiles) | {
            "m": request.m,
            "k": request.k,
            "a_down": request.a_stride[0],
            "a_right": request.a_stride[1],
            "out_down": request.out_stride[0] if staged is None else staged.stride(0),
            "tiles_m": tiles_m,
            "tiles_n": tiles_n,
            "DIM": request.options["gather_dim"],
            "A_ALIGNED": request.aligned[0],
            "B_ALIGNED": request.aligned[1],
        }
        programs = programs_for(request, host, tiles_m * tiles_n, meeting=True)
        kernel = bind(request, host, push_product, programs, arguments, tiles)
        return Plan(kernel, staged_out=staged, aux_buffer=memory)


class _GatherProduct(Fused):
    """What the two ways to all_gather_matmul have in common."""

    def _shard(self, request: FusedRequest) -> tuple[int, int]:
        """Rows and columns of a shard."""
        size = request.group_size
        by_rows = request.options["gather_dim"] == 0
        return (request.m // size, request.k) if by_rows else (request.m, request.k // size)

    def _staged(self, request: FusedRequest, host: Host) -> torch.Tensor | None:
        """Memory for the own shard, where peers cannot reach A."""
        if request.reach_a:
            return None
        rows, inner = self._shard(request)
        need = staging_nbytes(rows, inner, request.dtype)
        return staging(peer_memory(host, need, f"{self.op} ({self.name})"), 0, rows, inner, request.dtype)

    def _arguments(
        self, request: FusedRequest, host: Host, tiles: Tiling, staged: torch.Tensor | None
    ) -> dict[str, Any]:
        rows, inner = self._shard(request)
        tiles_m, tiles_n = tiles.tiles(rows, request.n)
        by_rows = request.options["gather_dim"] == 0
        item = getattr(torch, request.dtype).itemsize
        apart = inner * request.b_stride[0] * item % _ROW_NBYTES == 0  # the parts of B that belong to the shards
        return common_arguments(request, host, tiles) | {
            "rows": rows,
            "inner": inner,
            "a_down": request.a_stride[0] if staged is None else staged.stride(0),
            "out_down": request.out_stride[0],
            "out_right": request.out_stride[1],
            "tiles_m": tiles_m,
            "tiles_n": tiles_n,
            "DIM": request.options["gather_dim"],
            "B_ALIGNED": request.aligned[1] and (by_rows or apart),
            "OUT_ALIGNED": request.aligned[2],
        }


class Pull(_GatherProduct):
    """all_gather_matmul: the kernel reads the shards where they lie."""

    def __init__(self) -> None:
        super().__init__("all_gather_matmul", "pull")

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return tile_shapes(request)

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: each column of tiles reads the shards again."""
        tiles = tiling(request, *self._shard(request))
        again = -(-request.n // tiles.block_n)
        hidden = max(product_s(request, efficiency(request)), again * moving_s(request))
        return hidden + fixed_s(request, launches=1, meetings=2)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory where A cannot be reached, bind the kernel."""
        rows, inner = self._shard(request)
        tiles = tiling(request, rows, inner)
        staged = self._staged(request, host)
        arguments = self._arguments(request, host, tiles, staged)
        shards = host.team.size if request.options["gather_dim"] == 0 else 1
        number = arguments["tiles_m"] * arguments["tiles_n"] * shards
        programs = programs_for(request, host, number, meeting=True)
        kernel = bind(request, host, pull_product, programs, arguments, tiles)
        return Plan(kernel, staged_a=staged, aux_buffer=staged)


class Fetch(_GatherProduct):
    """all_gather_matmul: some programs copy the shards, the others compute."""

    uses = (*USED_CONFIG, "num_fetch_sms")

    def __init__(self) -> None:
        super().__init__("all_gather_matmul", "fetch")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        config = request.options["config"]
        if answer and "num_sms" in config and config["num_sms"] <= config.get("num_fetch_sms", 1):
            return Availability.no("some programs fetch and the others compute: num_sms must be the larger number")
        return answer

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Fields of configs: more or fewer programs that fetch."""
        square = {"block_size_m": 128, "block_size_n": 128, "num_warps": 8}
        return [{"num_fetch_sms": 8}, {"num_fetch_sms": 32}, square, {**square, "num_fetch_sms": 32}]

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies, but for the first block."""
        hidden = max(product_s(request, efficiency(request) * 0.9), moving_s(request))
        return hidden + fixed_s(request, launches=1, meetings=3)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the copies, make the flags, bind the kernel."""
        rows, inner = self._shard(request)
        tiles = tiling(request, rows, inner)
        staged = self._staged(request, host)
        arguments = self._arguments(request, host, tiles, staged)
        size, on_cpu = host.team.size, request.target.type is DeviceType.CPU
        item = getattr(torch, request.dtype).itemsize
        blocks, width = -(-rows // tiles.block_m), padded(inner, item)
        fetchers, computing = self._programs(request, host, (size - 1) * blocks, arguments)
        need = size * rows * width * item
        buffer = host.scratch(need, "gathered")
        state = torch.zeros(fetchers + computing + size * blocks, dtype=torch.int64, device=host.team.device)
        if not on_cpu:
            torch.cuda.current_stream(state.device).synchronize()  # it may first be used on another stream
        arguments |= {
            "buffer": buffer[:need].view(getattr(torch, request.dtype)),
            "state": state,
            "width": width,
            "FETCHERS": fetchers,
        }
        kernel = bind(request, host, fetch_product, fetchers + computing, arguments, tiles)
        return Plan(kernel, staged_a=staged, aux_buffer=buffer[:need], locks=state[fetchers + computing :])

    def _programs(self, request: FusedRequest, host: Host, blocks: int, arguments: dict[str, Any]) -> tuple[int, int]:
        """How many programs fetch, and how many compute; all of them have to be there at the same time."""
        config = request.options["config"]
        on_cpu = request.target.type is DeviceType.CPU
        most = config.get("num_sms", 2 if on_cpu else host.processors)
        if not on_cpu:
            most = min(most, host.processors)
        fetchers = config.get("num_fetch_sms", _FETCHERS_CPU if on_cpu else _FETCHERS_GPU)
        fetchers = max(1, min(fetchers, blocks, host.team.max_programs, most - 1))
        shards = host.team.size if request.options["gather_dim"] == 0 else 1
        number = arguments["tiles_m"] * arguments["tiles_n"] * shards
        return fetchers, max(1, min(most - fetchers, number))
