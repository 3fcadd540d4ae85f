"""The host's side of the fused algorithms: plans, staging in and out, times where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from iris_core.errors import UnsupportedError
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceType
from iris_triton.collectives.parts.barrier import meeting_arguments
from iris_triton.gemm.parts.shapes import USED_CONFIG, config_problem, dtype_problem, padded
from iris_triton.info import TRITON_INFO
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from iris_core.dispatch.host import Host
    from iris_core.types import FusedRequest, PluginInfo
    from iris_triton.gemm.parts.shapes import Tiling

_EFFICIENCY_GPU, _EFFICIENCY_CPU = 0.5, 0.02
"""Of plain Triton's products in relation to a library's, for the model: careful where nothing was measured."""

_MEASURED_EFFICIENCY = {"sm_90": 0.8}
"""Large products on H200s, with what they wait for."""

_XCDS = 8
"""Dies of an MI300X and its successors."""


@dataclass(slots=True)
class Plan:
    """A prepared call.

    Attributes:
        run: takes a stream (None for the current one), the output, A, B and, if there is one, the bias.
        staged_a: where A is copied to before; None if peers, or the kernel, take it where it is.
        staged_out: what `run` writes, and is copied to the output afterwards; None if it writes the output.
        aux_buffer, locks: see FusedWorkspace.
    """

    run: Callable[..., None]
    staged_a: torch.Tensor | None = None
    staged_out: torch.Tensor | None = None
    aux_buffer: torch.Tensor | None = None
    locks: torch.Tensor | None = None


class Fused:
    """One fused algorithm; satisfies `iris_core.protocols.FusedOperation`.

    Args:
        op: the operation.
        name: the algorithm.
    """

    uses: tuple[str, ...] = USED_CONFIG
    """Fields of the config that it fulfils."""

    launcher = BoundKernel

    def __init__(self, op: str, name: str) -> None:
        self.op = op
        self.name = name

    @property
    def info(self) -> PluginInfo:
        """The backend's description."""
        return TRITON_INFO

    def supports(self, request: FusedRequest) -> Availability:
        """Say whether this algorithm serves a call."""
        if request.op != self.op:
            return Availability.no(f"it does {self.op}, not {request.op!r}")
        if request.group_size == 1:
            return Availability.no("a single rank has no peers to communicate with")
        problem = dtype_problem(request) or config_problem(request, self.uses)
        return Availability.no(problem) if problem else Availability.yes()

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: the longer one of product and transfers hides the other."""
        return self.model(request, meetings=2)

    @staticmethod
    def efficiency(request: FusedRequest) -> float:
        """Of the kernels' products on the device."""
        if request.target.type is DeviceType.CPU:
            return _EFFICIENCY_CPU
        return _MEASURED_EFFICIENCY.get(request.target.arch, _EFFICIENCY_GPU)

    def model(
        self,
        request: FusedRequest,
        *,
        meetings: int,
        launches: int = 1,
        moving: float | None = None,
        seen: float = 0.0,
        share: float = 1.0,
    ) -> float:
        """Return the seconds of a product and of its transfers, of which the longer one hides the other.

        Args:
            request: the call.
            meetings, launches: how many.
            moving: seconds of the transfers, if they are not the operands or results once.
            seen: the part of that time that nothing hides.
            share: of the multiprocessors that multiply.
        """
        moving = moving_s(request) if moving is None else moving
        hidden = max(product_s(request, self.efficiency(request) * share), moving)
        return hidden + moving * seen + fixed_s(request, launches=launches, meetings=meetings)

    def tunings(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Return launches that are worth measuring, the own choice first.  The CPU executor's times say nothing."""
        offered = [] if request.target.type is DeviceType.CPU else self._offered(request)
        given = request.options["config"]
        configs = [
            config
            for config in offered
            if self.supports(replace(request, options={**request.options, "config": {**config, **given}}))
        ]
        return [{}, *configs]

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Fields of configs, at most five, that may be faster than the own choice; impossible ones are left out.

        Here: tiles that keep more or fewer programs busy.
        """
        if request.options["layout"] == "tiles":  # the shape of tiles belongs to the result
            return []
        square = {"block_size_m": 128, "block_size_n": 128}
        on_amd = request.target.type is DeviceType.HIP
        deep = {} if on_amd else {"num_stages": 4}  # there is less shared memory
        found = [
            {**square, "num_warps": 8},
            {**square, "num_warps": 4, **deep},
            {"block_size_m": 64, "block_size_n": 256, "num_warps": 8},
            {"block_size_m": 64, "block_size_n": 128, "num_warps": 4},
        ]
        return [*found, {"num_xcds": _XCDS, "chunk_size": 4}] if on_amd else found

    def prepare(self, request: FusedRequest, host: Host) -> Plan:
        """Make a plan.  Collective: every member calls it."""
        raise NotImplementedError

    @staticmethod
    def common(request: FusedRequest, host: Host, tiles: Tiling, rows: int) -> dict[str, Any]:
        """Arguments of all kernels; tiles do not reach over `rows` rows."""
        tiles_m, tiles_n = tiles.tiles(rows, request.n)
        return meeting_arguments(host.team) | {
            "n": request.n,
            "a_down": request.a_stride[0],
            "b_down": request.b_stride[0],
            "b_right": request.b_stride[1],
            "tiles_m": tiles_m,
            "tiles_n": tiles_n,
            "bias_step": bias_step_of(request),
            "BIAS": request.options["bias"],
            "B_ALIGNED": request.aligned[1],
            **tiles.constants,
        }

    def product(self, request: FusedRequest, host: Host, tiles: Tiling, rows: int) -> dict[str, Any]:
        """Arguments of the kernels whose A is a matrix of this rank."""
        return self.common(request, host, tiles, rows) | {
            "m": request.m,
            "k": request.k,
            "a_right": request.a_stride[1],
            "A_ALIGNED": request.aligned[0],
        }

    def bind(
        self,
        request: FusedRequest,
        host: Host,
        kernel: Any,
        programs: int,
        arguments: dict[str, Any],
        options: Mapping[str, Any],
    ) -> BoundKernel:
        """Bind a kernel to all but the tensors of a call."""
        names = per_call(request, arguments, "out", "a", "b")
        return self.launcher(kernel, programs, arguments, names, host.team.device, options)

    def launch(
        self, plan: Plan, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Launch a plan on the current stream."""
        if plan.staged_a is not None:
            a = plan.staged_a.copy_(a.detach())
        target = out if plan.staged_out is None else plan.staged_out
        if bias is None:
            plan.run(None, target, a, b)
        else:
            plan.run(None, target, a, b, bias)
        if plan.staged_out is not None:
            out.detach().copy_(plan.staged_out)


def programs_for(request: FusedRequest, host: Host, tiles: int, *, meeting: bool) -> int:
    """Return the number of programs: never more than can be there at the same time.

    Args:
        request: the call.
        host: its team bounds the number of programs that meet.
        tiles: tiles of one rank.
        meeting: whether all of them meet those of the other members.
    """
    on_cpu = request.target.type is DeviceType.CPU
    most: int = request.options["config"].get("num_sms", 1 if on_cpu else host.processors)
    if not on_cpu:
        most = min(most, host.processors)
    if meeting:
        most = min(most, host.team.max_programs)
    return max(1, min(most, tiles))


def peer_memory(host: Host, nbytes: int, what: str) -> torch.Tensor:
    """Return memory that peers reach, at the same place on all members.

    Raises:
        UnsupportedError: there is not enough; on all members.
    """
    region = host.symmetric(nbytes)
    if region is None:
        raise UnsupportedError(
            f"{what} needs {nbytes} bytes that peers reach, and there is no room for them: open the context with a "
            "larger heap_size, or let the library choose the algorithm"
        )
    return region.tensor[:nbytes]


def staging_nbytes(shape: tuple[int, int], dtype: str) -> int:
    """Return the bytes of a matrix with dense rows that begin at multiples of 16 bytes."""
    item: int = getattr(torch, dtype).itemsize
    return shape[0] * padded(shape[1], item) * item


def staging(memory: torch.Tensor, shape: tuple[int, int], dtype: str) -> torch.Tensor:
    """Return such a matrix in raw memory."""
    return memory.view(getattr(torch, dtype)).view(shape[0], -1)[:, : shape[1]]


def staged_memory(
    request: FusedRequest, host: Host, name: str, nbytes: int, *, stages: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `nbytes` bytes that peers reach and, if it `stages`, a matrix like the output after them."""
    shape, dtype = request.out_shape, request.out_dtype
    need = nbytes + (staging_nbytes(shape, dtype) if stages else 0)
    memory = peer_memory(host, need, f"{request.op} ({name})")
    return memory, staging(memory[nbytes:], shape, dtype) if stages else None


def bias_step_of(request: FusedRequest) -> int:
    """Return the elements from one value of the bias to the next."""
    return 0 if request.bias_stride is None else request.bias_stride[request.options["bias"] == "columns"]


def per_call(request: FusedRequest, arguments: dict[str, Any], *names: str) -> tuple[str, ...]:
    """Return the names of the arguments that change from call to call; the bias is one of them if there is one."""
    if request.bias_stride is not None:
        return (*names, "bias")
    arguments["bias"] = None
    return names
