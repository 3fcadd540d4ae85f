"""All four operations for Hopper; see `iris_gluon.ops.kernels`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from iris_core.ops.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceType
from iris_gluon._plugin import GLUON_INFO
from iris_gluon.collectives.algorithms import WithScratch
from iris_gluon.gemm import GemmConfig, choose_config
from iris_gluon.ops.kernels import await_product, fetch_product, push_product, reduce_product
from iris_triton.copies import copies_obstacle, flag_writer
from iris_triton.ops.fused import Fused, Plan, peer_memory, programs_for, staging, staging_nbytes
from iris_triton.ops.shards import COPY_S, WIRE, Shards, gathered_rows, shards_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core.ops.host import Host
    from iris_core.types import FusedRequest, PluginInfo

_USED = ("block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_sms", "num_stages", "num_warps")
_UNIT = 8
"""Elements in 16 bytes: of what TMA wants multiples."""

_FETCHERS = 16
"""Programs that copy, by default: each has 48 KiB under way."""

_EFFICIENCY_GPU, _EFFICIENCY_CPU = 0.9, 0.002
"""Of the core while it communicates, for the model; the executor computes every warp's instructions."""


def _down(stride: tuple[int, ...]) -> int:
    """Elements from row to row, or from column to column of a matrix that lies by columns."""
    return stride[0] if stride[1] == 1 else stride[1]


class _Hopper(Fused):
    """What they have in common: the core multiplies matrices of 16-bit floats that lie by rows or by columns."""

    uses: tuple[str, ...] = _USED

    measured_only = True
    """Chosen by name, or where it was measured: the model knows too little of them."""

    @property
    def info(self) -> PluginInfo:
        """The backend's description."""
        return GLUON_INFO

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer:
            return answer
        target = request.target
        if target.type is not DeviceType.CPU and target.arch != "sm_90":
            return Availability.no(f"wgmma and TMA need NVIDIA Hopper (sm_90), and this is {target.arch or 'unknown'}")
        if request.dtype not in ("bfloat16", "float16") or request.out_dtype != request.dtype:
            return Availability.no(f"its core multiplies bfloat16 and float16, not {request.dtype}")
        for name, stride, aligned in (
            ("A", request.a_stride, request.aligned[0]),
            ("B", request.b_stride, request.aligned[1]),
        ):
            if 1 not in stride or _down(stride) <= 0 or _down(stride) % _UNIT or not aligned:
                return Availability.no(f"TMA needs dense rows, or columns, of {name} at multiples of 16 bytes")
        if request.n % _UNIT:
            return Availability.no(f"rows of the product must be multiples of 16 bytes, and N is {request.n}")
        try:
            self._gemm(request, 1)
        except ValueError as error:
            return Availability.no(str(error))
        return Availability.yes()

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        return [
            {"block_size_m": 128, "block_size_n": 128},
            {"group_size_m": 4},
            {"group_size_m": 16},
            {"block_size_m": 64, "block_size_n": 128, "num_warps": 4},
        ]

    @staticmethod
    def _gemm(request: FusedRequest, processors: int) -> GemmConfig:
        """How the core is launched: the choice by shape, with what the config says."""
        given = request.options["config"]
        chosen = choose_config(request.m, request.n, processors)
        if given.keys() & {"block_size_m", "block_size_n", "block_size_k", "num_stages", "num_warps"}:
            block_n = given.get("block_size_n", chosen.block_n)
            block_m = given.get("block_size_m", chosen.block_m)
            warps = given.get("num_warps", 8 if block_m >= 128 else 4)
            chosen = GemmConfig(
                block_m=block_m,
                block_n=block_n,
                block_k=given.get("block_size_k", chosen.block_k),
                stages=given.get("num_stages", chosen.stages if block_n == chosen.block_n else 4),
                parts=2 if block_n >= 128 else 1,
                num_warps=warps,
                maxnreg=168 if warps == 8 else 255,
            )
        return chosen

    @staticmethod
    def _arguments(request: FusedRequest, host: Host, gemm: GemmConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arguments of both kernels, options of the compiler)."""
        team, options, along = host.team, dict(gemm.options), request.options["bias"]
        compiler = {name: options.pop(name) for name in ("num_warps", "maxnreg")}
        options["GROUP"] = request.options["config"].get("group_size_m", gemm.group)
        return {
            "control": team.control.tensor.view(torch.int64),
            "bases": team.bases,
            "me": team.rank,
            "rank": team.world_rank,
            "m": request.m,
            "n": request.n,
            "k": request.k,
            "a_down": _down(request.a_stride),
            "b_down": _down(request.b_stride),
            "tiles_n": -(-request.n // gemm.block_n),
            "k_tiles": -(-request.k // gemm.block_k),
            "timeout_ns": team.timeout_ns,
            "status": team.status_ptr,
            "bias_step": 0 if request.bias_stride is None else request.bias_stride[along == "columns"],
            "SIZE": team.size,
            "BIAS": along,
            "TURNED_A": request.a_stride[1] != 1,
            "TURNED_B": request.b_stride[1] != 1,
            "BLOCK_M": gemm.block_m,
            "BLOCK_N": gemm.block_n,
            "BLOCK_K": gemm.block_k,
            **options,
        }, compiler

    @staticmethod
    def _names(request: FusedRequest, arguments: dict[str, Any], *names: str) -> tuple[str, ...]:
        """Names of the kernel's arguments that change from call to call; the bias is one of them if there is one."""
        if request.options["bias"] != "none":
            return (*names, "bias")
        arguments["bias"] = None
        return names

    @staticmethod
    def _efficiency(request: FusedRequest) -> float:
        return _EFFICIENCY_CPU if request.target.type is DeviceType.CPU else _EFFICIENCY_GPU


class HopperPush(_Hopper):
    """matmul_all_gather: every tile goes to all members by TMA."""

    def __init__(self) -> None:
        super().__init__("matmul_all_gather", "hopper_push")

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides what is sent, or the other way round."""
        hidden = max(product_s(request, self._efficiency(request)), moving_s(request))
        return hidden + fixed_s(request, launches=1, meetings=2)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory where the output cannot be reached, bind the kernel."""
        gemm = self._gemm(request, host.processors)
        staged = memory = None
        if not request.reach_out:
            need = staging_nbytes(*request.out_shape, request.out_dtype)
            memory = peer_memory(host, need, f"{self.op} ({self.name})")[:need]
            staged = staging(memory, 0, *request.out_shape, request.out_dtype)
        arguments, compiler = self._arguments(request, host, gemm)
        arguments |= {
            "out_down": request.out_stride[0] if staged is None else staged.stride(0),
            "tiles_m": -(-request.m // gemm.block_m),
            "DIM": request.options["gather_dim"],
        }
        programs = programs_for(request, host, gemm.tiles(request.m, request.n), meeting=True)
        names = self._names(request, arguments, "out", "a", "b")
        kernel = WithScratch(push_product, programs, arguments, names, host.team.device, compiler)
        return Plan(kernel, staged_out=staged, aux_buffer=memory)


class HopperReduce(_Hopper):
    """matmul_reduce_scatter or matmul_all_reduce: tiles go to slots of their owners by TMA.

    Args:
        op: which of the two.
    """

    def __init__(self, op: str) -> None:
        super().__init__(op, "hopper_push" if op == "matmul_reduce_scatter" else "hopper_two_shot")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer or self.op == "matmul_all_reduce":
            return answer
        if request.options["layout"] != "torch":
            return Availability.no("members own rows, not runs of tiles")
        rows, block = request.m // request.group_size, self._gemm(request, 1).block_m
        if rows % block:
            return Availability.no(f"a member's {rows} rows must be a multiple of the {block} rows of a tile")
        return answer

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides what is sent, except in one step the sums."""
        moved = moving_s(request)
        meetings = 3 if self.op == "matmul_all_reduce" else 2
        hidden = max(product_s(request, self._efficiency(request)), moved)
        return hidden + moved / 4 + fixed_s(request, launches=1, meetings=meetings)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the slots, bind the kernel."""
        gemm = self._gemm(request, host.processors)
        size, item = host.team.size, getattr(torch, request.dtype).itemsize
        two_shot = self.op == "matmul_all_reduce"
        tiles_each = math.ceil(math.ceil(request.m / gemm.block_m) / size)
        rows_each = tiles_each * gemm.block_m
        slots_nbytes = size * rows_each * request.n * item
        stages = two_shot and not request.reach_out
        need = slots_nbytes + stages * staging_nbytes(request.m, request.n, request.out_dtype)
        memory = peer_memory(host, need, f"{self.op} ({self.name})")
        staged = staging(memory, slots_nbytes, request.m, request.n, request.out_dtype) if stages else None
        down, right = request.out_stride if staged is None else staged.stride()
        arguments, compiler = self._arguments(request, host, gemm)
        arguments |= {
            "slots": memory[:slots_nbytes].view(getattr(torch, request.out_dtype)),
            "out_down": down,
            "out_right": right,
            "rows_each": rows_each,
            "FORM": "two_shot" if two_shot else "rows",
            "OUT_WIDE": request.aligned[2] and right == 1 and down % _UNIT == 0,
        }
        names = self._names(request, arguments, "out", "a", "b")
        number = tiles_each * size * int(arguments["tiles_n"])
        programs = programs_for(request, host, number, meeting=True)
        kernel = WithScratch(reduce_product, programs, arguments, names, host.team.device, compiler)
        return Plan(kernel, staged_out=staged, aux_buffer=memory[:need])


class _HopperGather(_Hopper):
    """What is common to all_gather_matmul with gather_dim 0: A is copied into a matrix of all rows.

    Args:
        name: the algorithm.
    """

    def __init__(self, name: str) -> None:
        super().__init__("all_gather_matmul", name)

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        # A is copied into the gathered matrix, so neither its rows nor its place matter.
        answer = super().supports(replace(request, a_stride=(_UNIT, 1), aligned=(True, *request.aligned[1:])))
        if not answer:
            return answer
        if request.options["gather_dim"] != 0:
            return Availability.no("it gathers rows of A (gather_dim=0)")
        if request.k % _UNIT:
            return Availability.no(f"rows of A must be multiples of 16 bytes, and K is {request.k}")
        if request.out_stride[1] != 1 or request.out_stride[0] % _UNIT or not request.aligned[2]:
            return Availability.no("TMA needs dense rows of the output that begin at multiples of 16 bytes")
        rows, block = request.m // request.group_size, self._gemm(request, 1).block_m
        if rows % block:
            return Availability.no(f"a member's {rows} rows must be a multiple of the {block} rows of a tile")
        return answer

    def _product(self, request: FusedRequest, host: Host, gemm: GemmConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arguments of both kernels, options of the compiler)."""
        arguments, compiler = self._arguments(request, host, gemm)
        for name in ("m", "a_down", "TURNED_A"):
            del arguments[name]
        arguments |= {"out_down": request.out_stride[0], "rows_each": request.m // host.team.size}
        return arguments, compiler


class HopperFetch(_HopperGather):
    """Some programs copy the others' rows, the others compute."""

    uses = (*_USED, "num_fetch_sms")

    def __init__(self) -> None:
        super().__init__("hopper_fetch")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        config = request.options["config"]
        if answer and config.get("num_sms", 2) <= config.get("num_fetch_sms", 1):
            return Availability.no("some programs fetch and the others compute: num_sms must be the larger number")
        return answer

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        fetchers = [{"num_fetch_sms": n} for n in (8, 24)]
        return [*fetchers, *super()._offered(request)[:3]]

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies; the own rows are put to the others before."""
        hidden = max(product_s(request, self._efficiency(request)), moving_s(request))
        return hidden + fixed_s(request, launches=2, meetings=2)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for A of all, make the flags, bind the kernel."""
        gemm = self._gemm(request, host.processors)
        size = host.team.size
        memory, gathered, own = gathered_rows(request, host, f"{self.op} ({self.name})")
        blocks = request.m // size // gemm.block_m
        config, on_cpu = request.options["config"], request.target.type is DeviceType.CPU
        most = config.get("num_sms", 2 if on_cpu else host.processors)
        most = most if on_cpu else min(most, host.processors)
        fetchers = config.get("num_fetch_sms", 1 if on_cpu else _FETCHERS)
        fetchers = max(1, min(fetchers, (size - 1) * blocks, host.team.max_programs, most - 1))
        computing = max(1, min(most - fetchers, gemm.tiles(request.m, request.n)))
        state = torch.zeros(fetchers + computing + size * blocks, dtype=torch.int64, device=host.team.device)
        if not on_cpu:
            torch.cuda.current_stream(state.device).synchronize()  # it may first be used on another stream
        arguments, compiler = self._product(request, host, gemm)
        arguments |= {"gathered": gathered, "state": state, "FETCHERS": fetchers}
        names = self._names(request, arguments, "out", "b")
        kernel = WithScratch(fetch_product, fetchers + computing, arguments, names, host.team.device, compiler)
        return Plan(kernel, staged_a=own, aux_buffer=memory, locks=state[fetchers + computing :])

    def launch(
        self, plan: Plan, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Put the own rows to the others, then launch."""
        assert plan.staged_a is not None
        plan.staged_a.copy_(a.detach())
        plan.kernel(None, out, b, *(() if bias is None else (bias,)))


@dataclass(slots=True)
class _CopyPlan:
    """What is asked for in a launch.

    Attributes:
        shards: A of all members, and how it is gathered.
        kernel: takes the output, B and, if there is one, the bias.
        arrived: for each member whether its rows are there (int32).
        write: see `iris_triton.copies.flag_writer`.
        aux_buffer, locks: see FusedWorkspace.
    """

    shards: Shards
    kernel: WithScratch
    arrived: torch.Tensor
    write: Callable[[int, int, int, int], None]
    aux_buffer: torch.Tensor
    locks: torch.Tensor


class HopperCopyEngine(_HopperGather):
    """Copy engines bring the others' rows, and write a word behind each member's, for which the product waits.

    The product takes all multiprocessors but one, on which members meet when all has been taken.
    """

    def __init__(self) -> None:
        super().__init__("hopper_copy_engine")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        obstacle = copies_obstacle(request.target.type) if answer else ""
        return Availability.no(obstacle) if obstacle else answer

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies, but for the last one."""
        others = request.group_size - 1
        moving = moving_s(request)
        if request.target.type is not DeviceType.CPU:
            moving = request.nbytes * others / request.group_size / WIRE + others * COPY_S
        hidden = max(product_s(request, self._efficiency(request)), moving)
        return hidden + moving / max(others, 1) + fixed_s(request, launches=others + 4, meetings=2)

    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Find memory for A of all, make the words, bind the kernel."""
        gemm, device = self._gemm(request, host.processors), request.target.type
        shards = shards_of(request, host, f"{self.op} ({self.name})")
        arrived = torch.zeros(host.team.size, dtype=torch.int32, device=host.team.device)
        arguments, compiler = self._product(request, host, gemm)
        del arguments["control"], arguments["bases"]
        arguments |= {"gathered": shards.matrix, "flags": arrived}
        if device is DeviceType.CPU:
            most = request.options["config"].get("num_sms", 2)
        else:
            most = min(request.options["config"].get("num_sms", host.processors), host.processors - 1)
        programs = max(1, min(most, gemm.tiles(request.m, request.n)))
        names = self._names(request, arguments, "out", "b")
        kernel = WithScratch(await_product, programs, arguments, names, host.team.device, compiler)
        return _CopyPlan(shards, kernel, arrived, flag_writer(device), shards.memory, arrived)

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Give the own rows, take the others' beside the product."""
        shards, address, write = plan.shards, plan.arrived.data_ptr(), plan.write

        def behind(member: int, stream: Any) -> None:
            write(address + 4 * member, 1, 0, 0 if stream is None else stream.cuda_stream)

        plan.arrived.zero_()
        shards.give(a.detach())
        shards.take(behind)
        plan.kernel(None, out, b, *(() if bias is None else (bias,)))
        shards.end()
