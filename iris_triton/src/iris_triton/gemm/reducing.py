"""matmul_reduce_scatter and matmul_all_reduce; see `iris_triton.gemm.reduce_kernel` and `.variant_kernels`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import UnsupportedError
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceType
from iris_triton.collectives.variants import ring_steps
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
from iris_triton.gemm.reduce_kernel import matmul_reduce
from iris_triton.gemm.shapes import USED_CONFIG, tiling
from iris_triton.gemm.variant_kernels import LOCK_WORDS, RING_WORDS, matmul_accumulate, matmul_ring

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest
    from iris_triton.gemm.shapes import Tiling

_WORD = 8
_SLOTS = 2
"""Of a mailbox: one is filled while the other one is read."""


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


class _Variant(Fused):
    """What the other ways to matmul_all_reduce have in common: chosen by name, or where they were measured."""

    measured_only = True

    def __init__(self, name: str) -> None:
        super().__init__("matmul_all_reduce", name)

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return tile_shapes(request)

    @staticmethod
    def _tiles(request: FusedRequest) -> Tiling:
        """How the product is divided: a tile and another one of float32 have to fit into registers."""
        if request.target.type is not DeviceType.CPU:
            config = {"block_size_n": 128, **request.options["config"]}
            request = replace(request, options={**request.options, "config": config})
        return tiling(request, request.m, request.k)

    @staticmethod
    def _arguments(request: FusedRequest, host: Host, tiles: Tiling) -> dict[str, Any]:
        tiles_m, tiles_n = tiles.tiles(request.m, request.n)
        return common_arguments(request, host, tiles) | {
            "m": request.m,
            "k": request.k,
            "a_down": request.a_stride[0],
            "a_right": request.a_stride[1],
            "tiles_m": tiles_m,
            "tiles_n": tiles_n,
            "per_owner": -(-tiles_m * tiles_n // host.team.size),
            "A_ALIGNED": request.aligned[0],
            "B_ALIGNED": request.aligned[1],
        }


class Accumulate(_Variant):
    """matmul_all_reduce into one sum for each tile: "atomic" or "spinlock".

    The members' products arrive in any order, so the last bits may differ from one run to the next; they are the same
    on all members.
    """

    repeatable = False

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: sums are float32 on their way, and a lock is drawn and given back for each tile."""
        item: int = getattr(torch, request.out_dtype).itemsize
        moved = moving_s(request) * 4 / item
        meetings = 3 + (request.group_size if self.name == "spinlock" else 0)
        hidden = max(product_s(request, efficiency(request)), moved)
        return hidden + moved + fixed_s(request, launches=1, meetings=meetings)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the sums, and the locks, bind the kernel.  Collective."""
        tiles = self._tiles(request)
        arguments = self._arguments(request, host, tiles)
        sums_nbytes = arguments["per_owner"] * tiles.block_m * tiles.block_n * 4
        stages = not request.reach_out
        need = sums_nbytes + stages * staging_nbytes(request.m, request.n, request.out_dtype)
        memory = peer_memory(host, need, f"{self.op} ({self.name})")
        staged = staging(memory, sums_nbytes, request.m, request.n, request.out_dtype) if stages else None
        locks = host.team.control
        if self.name == "spinlock":
            locks = host.team.region("ops locks", LOCK_WORDS * _WORD * host.team.max_programs)
        arguments |= {
            "sums": memory[:sums_nbytes].view(torch.float32),
            "locks": locks.tensor.view(torch.int64),
            "out_down": request.out_stride[0] if staged is None else staged.stride(0),
            "LOCKED": self.name == "spinlock",
        }
        programs = programs_for(request, host, arguments["per_owner"], meeting=True)
        kernel = bind(request, host, matmul_accumulate, programs, arguments, tiles)
        held = locks.tensor if self.name == "spinlock" else None
        return Plan(kernel, staged_out=staged, aux_buffer=memory[:need], locks=held)


class Ring(_Variant):
    """matmul_all_reduce round a ring, or `all_reduce_num_rings` of them."""

    uses = (*USED_CONFIG, "all_reduce_num_rings")

    def __init__(self) -> None:
        super().__init__("ring")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        config = request.options["config"]
        rings, programs = config.get("all_reduce_num_rings", 1), config.get("num_sms")
        if answer and programs is not None and programs < rings:
            return Availability.no(f"all_reduce_num_rings={rings} need as many programs, and num_sms={programs}")
        return answer

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: sums are float32 on their way; the first and the last message of a round are not hidden."""
        item: int = getattr(torch, request.out_dtype).itemsize
        size = request.group_size
        moved = moving_s(request) / 2 * (4 / item + 1)
        hidden = max(product_s(request, efficiency(request)), moved)
        return hidden + moved / 2 + fixed_s(request, launches=1, meetings=1 + 2 * (size - 1))

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the mailboxes, bind the kernel.  Collective."""
        tiles = self._tiles(request)
        team, rings = host.team, request.options["config"].get("all_reduce_num_rings", 1)
        arguments = self._arguments(request, host, tiles)
        # with fewer tiles than rings, some have nothing to do
        programs = programs_for(request, host, max(rings, arguments["per_owner"]), meeting=True)
        if request.target.type is DeviceType.CPU:
            programs = max(programs, min(rings, team.max_programs))
        if programs < rings:
            raise UnsupportedError(f"{self.op}: {rings} rings need as many programs, and there can be {programs}")
        need = programs * _SLOTS * tiles.block_m * tiles.block_n * 4
        memory = peer_memory(host, need, f"{self.op} ({self.name})")[:need]
        words = team.region("ops ring words", RING_WORDS * _WORD * team.max_programs)
        arguments |= {
            "mail": memory.view(torch.float32),
            "words": words.tensor.view(torch.int64),
            "steps": torch.tensor(ring_steps(team.size, rings), dtype=torch.int64, device=team.device),
            "slots": _SLOTS,
            "rings": rings,
            "out_down": request.out_stride[0],
            "out_right": request.out_stride[1],
            "OUT_ALIGNED": request.aligned[2],
        }
        kernel = bind(request, host, matmul_ring, programs, arguments, tiles)
        return Plan(kernel, aux_buffer=memory, locks=words.tensor)
