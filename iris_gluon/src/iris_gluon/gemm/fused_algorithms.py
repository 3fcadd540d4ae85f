"""All four operations for Hopper; see `iris_gluon.gemm.fused_kernels`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceType
from iris_gluon.collectives.algorithms import WithScratch
from iris_gluon.gemm import GemmConfig, choose_config
from iris_gluon.gemm.fused_kernels import PUT_PARTS, await_product, push_product, put_product, reduce_product
from iris_gluon.info import GLUON_INFO
from iris_triton.copies import copies_obstacle
from iris_triton.gemm.fused import Fused, Plan, peer_memory, programs_for, staging, staging_nbytes
from iris_triton.gemm.shards import COPY_S, WIRE, Shards, Words, gathered_rows, own_rows, shards_of, words_of
from iris_triton.gemm.sums import bind_sum

if TYPE_CHECKING:
    from iris_core.dispatch.host import Host
    from iris_core.protocols import FusedOperation
    from iris_core.types import FusedRequest, PluginInfo
    from iris_triton.launcher import BoundKernel

_USED = ("block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_sms", "num_stages", "num_warps")
_FIELDS = {
    "block_size_m": "block_m",
    "block_size_n": "block_n",
    "block_size_k": "block_k",
    "num_stages": "stages",
    "num_warps": "num_warps",
}
"""Fields of a config that the core has, and their names there."""

_UNIT = 8
"""Elements in 16 bytes: of what TMA wants multiples."""

_PROCESSORS = 132
"""Of an H200, for what is worth measuring."""

_RUN = 1 << 20
"""Tiles in a row of one owner: all that it has."""

_PUTTERS = 16
"""Programs that copy, by default; each fills a multiprocessor."""

_FULL_BLOCK, _HALF_BLOCK = 128, 64
"""Rows of a tile: the usual ones, and where members own other rows than multiples of them."""

_RUN_FLOPS = 2.4e11
"""From so many multiplications on, the owners' tiles are sent in runs: between both sizes at which it was measured."""

_BESIDE_MEETING = {8: 160, 4: 240}
"""Registers of a thread, by warps that multiply: a warp of 32 each finds room beside them on a multiprocessor.  So
members can meet while the product runs, even if other kernels have taken the one that it leaves."""

_WAITING = 0.5
"""Of a tile, see `choose_config`: where rows arrive while the kernel runs."""

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
            self._other_width(request),
            {"block_size_m": 64, "block_size_n": 128, "num_warps": 4},
            {"group_size_m": 4},
            {"group_size_m": 16},
        ]

    def _other_width(self, request: FusedRequest) -> dict[str, Any]:
        """Tiles that are as wide as those are not that are chosen without a config."""
        plain = replace(request, options={**request.options, "config": {}})
        chosen = self._gemm(plain, _PROCESSORS)
        return {"block_size_n": 128 if chosen.block_n > 128 else 256}

    def _block_m(self, request: FusedRequest) -> int:
        """Rows of a tile, where the config does not say."""
        return _FULL_BLOCK

    def _gemm(self, request: FusedRequest, processors: int) -> GemmConfig:
        """How the core is launched: the choice by shape, with what the config says.

        Args:
            request: the call.
            processors: that compute.  A config that cannot be is none for any number.

        Raises:
            ValueError: there is no such config.
        """
        config = request.options["config"]
        given = {field: config[name] for name, field in _FIELDS.items() if name in config}
        return choose_config(
            request.m,
            request.n,
            processors,
            k=request.k,
            block_m=self._block_m(request),
            idle=_WAITING if request.op == "all_gather_matmul" else 0.0,
            given=given,
        )

    def _processors(self, request: FusedRequest, host: Host, *, meeting: bool, aside: int = 0) -> int:
        """Multiprocessors that compute: as many as there are programs for, but those that do something else."""
        most: int = min(request.options["config"].get("num_sms", host.processors), host.processors)
        if meeting:
            most = min(most, host.team.max_programs)
        return max(1, most - aside)

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
        gemm = self._gemm(request, self._processors(request, host, meeting=True))
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


@dataclass(slots=True)
class _ReducePlan(Plan):
    """As `Plan`; and the kernel that adds up: it takes the output and, if there is one, the bias."""

    add: BoundKernel | None = None


class _RowsOwned(_Hopper):
    """What is common where members own rows of the product: tiles do not reach over them."""

    def _rows(self, request: FusedRequest) -> int:
        """Rows of a member."""
        return request.m // request.group_size

    def _block_m(self, request: FusedRequest) -> int:
        return _HALF_BLOCK if self._rows(request) % _FULL_BLOCK else _FULL_BLOCK

    def _rows_problem(self, request: FusedRequest) -> str:
        rows, block = self._rows(request), self._gemm(request, 1).block_m
        return f"a member's {rows} rows must be a multiple of the {block} rows of a tile" if rows % block else ""


class HopperReduce(_RowsOwned):
    """matmul_reduce_scatter or matmul_all_reduce: tiles go to slots of their owners by TMA, who add them up.

    `chunk_size` tiles in a row go to the same owner, then as many to the next one.

    Args:
        op: which of the two.
    """

    uses: tuple[str, ...] = (*_USED, "chunk_size")

    def __init__(self, op: str) -> None:
        super().__init__(op, "hopper_push" if op == "matmul_reduce_scatter" else "hopper_two_shot")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        if not answer or self.op == "matmul_all_reduce":
            return answer
        if request.options["layout"] != "torch":
            return Availability.no("members own rows, not runs of tiles")
        problem = self._rows_problem(request)
        return Availability.no(problem) if problem else answer

    def _block_m(self, request: FusedRequest) -> int:
        # the last members may own fewer rows of a product that all get
        return _FULL_BLOCK if self.op == "matmul_all_reduce" else super()._block_m(request)

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        other, *more = super()._offered(request)
        order = {"chunk_size": 1 if self._in_runs(request) else _RUN}
        return [other, order, {**other, **order}, *more[:2]]

    @staticmethod
    def _in_runs(request: FusedRequest) -> bool:
        return 2.0 * request.m * request.n * request.k > _RUN_FLOPS

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides what is sent, except in one step the sums."""
        moved = moving_s(request)
        meetings = 3 if self.op == "matmul_all_reduce" else 2
        hidden = max(product_s(request, self._efficiency(request)), moved)
        return hidden + moved / 4 + fixed_s(request, launches=2, meetings=meetings)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for the slots, bind the kernels."""
        gemm = self._gemm(request, self._processors(request, host, meeting=True))
        size, item = host.team.size, getattr(torch, request.dtype).itemsize
        two_shot = self.op == "matmul_all_reduce"
        tiles_each = math.ceil(math.ceil(request.m / gemm.block_m) / size)
        rows_each = tiles_each * gemm.block_m
        slots_nbytes = size * rows_each * request.n * item
        stages = two_shot and not request.reach_out
        need = slots_nbytes + stages * staging_nbytes(request.m, request.n, request.out_dtype)
        memory = peer_memory(host, need, f"{self.op} ({self.name})")
        slots = memory[:slots_nbytes].view(getattr(torch, request.out_dtype))
        staged = staging(memory, slots_nbytes, request.m, request.n, request.out_dtype) if stages else None
        stride = request.out_stride if staged is None else (staged.stride(0), staged.stride(1))
        arguments, compiler = self._arguments(request, host, gemm)
        del arguments["BIAS"], arguments["bias_step"]
        per_owner = tiles_each * int(arguments["tiles_n"])
        chunk = request.options["config"].get("chunk_size", _RUN if self._in_runs(request) else 1)
        arguments |= {
            "slots": slots,
            "out_down": stride[0],
            "rows_each": rows_each,
            "chunk": min(chunk, per_owner),
            "FORM": "two_shot" if two_shot else "rows",
        }
        programs = programs_for(request, host, per_owner * size, meeting=True)
        kernel = WithScratch(reduce_product, programs, arguments, ("out", "a", "b"), host.team.device, compiler)
        add = bind_sum(request, host, slots, rows_each, stride)
        return _ReducePlan(kernel, staged_out=staged, aux_buffer=memory[:need], add=add)

    def launch(
        self, plan: Plan, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Multiply, then add up."""
        assert isinstance(plan, _ReducePlan)
        assert plan.add is not None
        target = out if plan.staged_out is None else plan.staged_out
        plan.kernel(None, target, a, b)
        plan.add(None, target, *(() if bias is None else (bias,)))
        if plan.staged_out is not None:
            out.detach().copy_(plan.staged_out)


class _HopperGather(_RowsOwned):
    """What is common to all_gather_matmul with gather_dim 0: A of the others is brought into a matrix of all rows.

    Args:
        name: the algorithm.
    """

    def __init__(self, name: str) -> None:
        super().__init__("all_gather_matmul", name)

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        # Where its rows are not dense, A is copied before, so neither its strides nor its place matter.
        answer = super().supports(replace(request, a_stride=(_UNIT, 1), aligned=(True, *request.aligned[1:])))
        if not answer:
            return answer
        if request.options["gather_dim"] != 0:
            return Availability.no("it gathers rows of A (gather_dim=0)")
        if request.k % _UNIT:
            return Availability.no(f"rows of A must be multiples of 16 bytes, and K is {request.k}")
        if request.out_stride[1] != 1 or request.out_stride[0] % _UNIT or not request.aligned[2]:
            return Availability.no("TMA needs dense rows of the output that begin at multiples of 16 bytes")
        problem = self._rows_problem(request)
        return Availability.no(problem) if problem else answer

    def _product(self, request: FusedRequest, host: Host, gemm: GemmConfig) -> tuple[dict[str, Any], dict[str, Any]]:
        """(arguments of both kernels, options of the compiler)."""
        arguments, compiler = self._arguments(request, host, gemm)
        for name in ("m", "a_down", "TURNED_A"):
            del arguments[name]
        arguments |= {"out_down": request.out_stride[0], "rows_each": request.m // host.team.size}
        return arguments, compiler


@dataclass(slots=True)
class _PutPlan(Plan):
    """As `Plan`; `own` are the own rows of the gathered matrix, for an A that has to be copied."""

    own: torch.Tensor | None = None


class HopperFetch(_HopperGather):
    """Some programs (`num_fetch_sms`) put the own rows to the others, the others compute."""

    uses = (*_USED, "num_fetch_sms")

    def __init__(self) -> None:
        super().__init__("hopper_fetch")

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        answer = super().supports(request)
        config = request.options["config"]
        if answer and "num_sms" in config and config["num_sms"] <= config.get("num_fetch_sms", 1):
            return Availability.no("some programs fetch and the others compute: num_sms must be the larger number")
        return answer

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        other, half, *_ = super()._offered(request)
        return [{"num_fetch_sms": 8}, {"num_fetch_sms": 24}, other, {**other, "num_fetch_sms": 8}, half]

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the product hides the copies."""
        hidden = max(product_s(request, self._efficiency(request)), moving_s(request))
        return hidden + fixed_s(request, launches=1, meetings=1)

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Find memory for A of all and for the flags, bind the kernel."""
        size, on_cpu = host.team.size, request.target.type is DeviceType.CPU
        config = request.options["config"]
        most = config.get("num_sms", 2 if on_cpu else host.processors)
        most = most if on_cpu else min(most, host.processors)
        putters = config.get("num_fetch_sms", 1 if on_cpu else _PUTTERS)
        putters = max(1, min(putters, host.team.max_programs, most - 1))
        gemm = self._gemm(request, max(1, most - putters))
        blocks = request.m // size // gemm.block_m
        putters = min(putters, (size - 1) * blocks * PUT_PARTS.value)
        computing = max(1, min(most - putters, gemm.tiles(request.m, request.n)))
        memory, gathered, own = gathered_rows(request, host, f"{self.op} ({self.name})")
        words = words_of(host, size * blocks)
        arguments, compiler = self._product(request, host, gemm)
        arguments |= {"gathered": gathered, "flags": words.own, "PUTTERS": putters}
        names = self._names(request, arguments, "out", "a", "b")
        kernel = WithScratch(put_product, putters + computing, arguments, names, host.team.device, compiler)
        return _PutPlan(kernel, aux_buffer=memory, locks=words.own, own=own)

    def launch(
        self, plan: Plan, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Copy A where it is not dense, then launch."""
        assert isinstance(plan, _PutPlan)
        assert plan.own is not None
        plan.kernel(None, out, own_rows(a, plan.own), b, *(() if bias is None else (bias,)))


@dataclass(slots=True)
class _CopyPlan:
    """What is asked for in a launch.

    Attributes:
        shards: A of all members, and how it is gathered.
        kernel: takes the output, A, B and, if there is one, the bias.
        words: say which members' rows are there.
        aux_buffer, locks: see FusedWorkspace.
    """

    shards: Shards
    kernel: WithScratch
    words: Words
    aux_buffer: torch.Tensor
    locks: torch.Tensor


class HopperCopyEngine(_HopperGather):
    """Copy engines bring the others' rows, and write a word behind each member's, for which the product waits.

    The product begins with the own rows, where A lies.  It takes all multiprocessors but one, on which members meet
    beside it.

    Args:
        pushes: members put their rows to the others, instead of taking the others'; see `iris_triton.gemm.shards`.
    """

    def __init__(self, *, pushes: bool) -> None:
        super().__init__("hopper_copy_engine_push" if pushes else "hopper_copy_engine")
        self._pushes = pushes

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
        meetings = 1 if self._pushes else 2
        return hidden + moving / max(others, 1) + fixed_s(request, launches=others + 3, meetings=meetings)

    def host_seconds(self, request: FusedRequest) -> float:
        """Estimate what a call costs the CPU: a copy and a word for each member (hosts of H200s)."""
        return 0.0 if request.target.type is DeviceType.CPU else 3e-5 + 1.5e-5 * request.group_size

    def prepare(self, request: FusedRequest, host: Host) -> Any:
        """Find memory for A of all and for the words, bind the kernel."""
        on_cpu = request.target.type is DeviceType.CPU
        computing = self._processors(request, host, meeting=False)
        gemm = self._gemm(request, computing if on_cpu else max(1, min(computing, host.processors - 1)))
        shards = shards_of(request, host, f"{self.op} ({self.name})", pushes=self._pushes)
        words = words_of(host, host.team.size, request.target.type)
        arguments, compiler = self._product(request, host, gemm)
        compiler["maxnreg"] = min(compiler["maxnreg"], _BESIDE_MEETING[gemm.num_warps])
        del arguments["control"], arguments["bases"]
        arguments |= {"gathered": shards.matrix, "flags": words.own}
        if on_cpu:
            most = request.options["config"].get("num_sms", 2)
        else:
            most = min(request.options["config"].get("num_sms", host.processors), host.processors - 1)
        programs = max(1, min(most, gemm.tiles(request.m, request.n)))
        names = self._names(request, arguments, "out", "a", "b")
        kernel = WithScratch(await_product, programs, arguments, names, host.team.device, compiler)
        return _CopyPlan(shards, kernel, words, shards.memory, words.own)

    def launch(self, plan: Any, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Bring the rows beside the product.

        They are asked for first: the product waits for words that the copies bring, and a launch may return when its
        kernel is done (CUDA_LAUNCH_BLOCKING, profilers), or wait for all kernels (when one is loaded).
        """
        shards = plan.shards
        own = shards.begin(a)
        shards.move(own, plan.words.put if self._pushes else plan.words.taken)
        plan.kernel(None, out, own, b, *(() if bias is None else (bias,)))
        shards.end()


def operations() -> list[FusedOperation]:
    """Return the algorithms."""
    return [
        HopperReduce("matmul_all_reduce"),
        HopperReduce("matmul_reduce_scatter"),
        HopperPush(),
        HopperFetch(),
        HopperCopyEngine(pushes=False),
        HopperCopyEngine(pushes=True),
    ]
