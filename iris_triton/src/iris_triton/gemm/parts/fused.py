"""Host side of the fused algorithms: plans, staging of inputs and outputs, cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from iris_core.dispatch.products import SCALED
from iris_core.errors import UnsupportedError
from iris_core.providers.baseline import scales_shape
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceType
from iris_triton.collectives.parts.collective import barrier_arguments
from iris_triton.collectives.parts.sizes import rounded_up
from iris_triton.gemm.parts.shapes import USED_CONFIG, config_problem, dtype_problem
from iris_triton.info import TRITON_INFO
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from iris_core.dispatch.team import Host
    from iris_core.types import FusedRequest, PluginInfo
    from iris_triton.gemm.parts.shapes import Tiling

_XCDS = 8
"""Dies of an MI300X and its successors."""


@dataclass(slots=True)
class Plan:
    """A prepared call.

    Attributes:
        run: takes a stream (None for the current one), the output, A, B and, if there are any, the bias and the scales.
        staged_a: buffer to which A is copied before; None if A is read in place.
        staged_out: buffer that `run` writes and that is copied to the output; None if it writes the output itself.
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
        barriers: number of barriers in a call, for the model.
    """

    info: PluginInfo = TRITON_INFO

    uses: tuple[str, ...] = USED_CONFIG
    """Fields of the config that it fulfils."""

    scaled: tuple[str, ...] = SCALED

    scaled_sides: tuple[str, ...] = ("block_size_n", "block_size_k")
    """Of a tile, where blocks are scaled: no longer than a block."""

    serves: ClassVar[Mapping[str, Any]] = {}
    """Options of which it serves one value alone."""

    # for the model, where nothing was measured
    efficiency: ClassVar[Mapping[str, float]] = {"cpu": 0.02, "sm_90": 0.8, "": 0.5}
    """Of the products by device ("": any other), in relation to a library's; empty for a library's own products."""

    exposed = 0.0
    """The part of the transfers that the product does not hide."""

    copy_s = 0.0
    """Seconds that each copy to another member takes beside its bytes."""

    def __init__(self, op: str, name: str, *, barriers: int = 2) -> None:
        self.op, self.name, self.barriers = op, name, barriers

    def supports(self, request: FusedRequest) -> Availability:
        problem = self._problem(request)
        return Availability(not problem, problem)

    def _problem(self, request: FusedRequest) -> str:
        """Return why the algorithm does not support a request; empty if it does."""
        if request.group_size == 1:
            return "a single rank has no peers to communicate with"
        for name, value in self.serves.items():
            if request.options[name] != value:
                return f"it serves {name}={value!r} alone"
        return dtype_problem(request) or config_problem(request, self.uses, self.scaled_sides)

    def cost(self, request: FusedRequest) -> float:
        """Estimate seconds: product and transfers overlap, so the longer one counts."""
        target = request.target
        efficiency = self.efficiency.get(target.arch or str(target.type), self.efficiency.get(""))
        product, moving = product_s(request, efficiency), moving_s(request)
        fixed = fixed_s(request, launches=1, barriers=self.barriers) + self.copy_s * (request.group_size - 1)
        return max(product, moving) + moving * self.exposed + fixed

    def tunings(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Return the configs to measure, the default first; only that on the CPU, where times mean nothing."""
        if request.target.type is DeviceType.CPU:
            return [{}]
        options = request.options

        def is_possible(config: dict[str, Any]) -> bool:
            return not self._problem(replace(request, options={**options, "config": config | options["config"]}))

        return [{}, *filter(is_possible, self._offered(request))]

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        """Return at most five configs that may be faster than the default; the caller drops invalid ones.

        Here: tiles for more or fewer programs.
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

    def launch(
        self, plan: Plan, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
        *scales: torch.Tensor,
    ) -> None:  # fmt: skip
        if plan.staged_a is not None:
            a = plan.staged_a.copy_(a.detach())
        target = out if plan.staged_out is None else plan.staged_out
        plan.run(None, target, a, b, *(() if bias is None else (bias,)), *scales)
        if plan.staged_out is not None:
            out.detach().copy_(plan.staged_out)


def divided(scaled: bool, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
    """Return the bias, or None, and the scales, if a call has some, of what follows B in a launch."""
    bias, scales = (tensors[:-2], tensors[-2:]) if scaled else (tensors, ())
    return bias[0] if bias else None, *scales


def arguments_of(request: FusedRequest, tiles: Tiling, rows: int, out_stride: tuple[int, ...]) -> dict[str, Any]:
    """Return the common arguments of kernels by name; tiles do not cross multiples of `rows` rows."""
    tiles_m, tiles_n = tiles.tiles(rows, request.n)
    a_scale, b_scale = request.scale_strides
    if request.op == "all_gather_matmul" and request.scales != "none":
        a_scale = scales_shape(request)[1], 1  # of all members
    return {
        "m": request.m,
        "n": request.n,
        "k": request.k,
        "a_down": request.a_stride[0],
        "a_right": request.a_stride[1],
        "b_down": request.b_stride[0],
        "b_right": request.b_stride[1],
        "out_down": out_stride[0],
        "out_right": out_stride[1],
        "a_scale_down": a_scale[0],
        "a_scale_right": a_scale[1],
        "b_scale_down": b_scale[0],
        "b_scale_right": b_scale[1],
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        "A_ALIGNED": request.aligned[0],
        "B_ALIGNED": request.aligned[1],
        "OUT_ALIGNED": request.aligned[2],
        **tiles.constants,
    }


def bind(
    request: FusedRequest,
    host: Host,
    kernel: Any,
    programs: int,
    arguments: Mapping[str, Any],
    options: Mapping[str, Any],
) -> BoundKernel:
    """Bind a kernel to all that it takes, of the arguments or of what every kernel has, but the tensors of a call.

    These are the output, A, B and, if there are any, the bias and the scales: those of them that the kernel takes, in
    this order.
    """
    along = request.options["bias"]
    given = {**barrier_arguments(host.team), "bias": None, "bias_step": 0, "BIAS": along, **arguments}
    given |= {"a_scales": None, "b_scales": None, "SCALES": request.scales}
    if request.bias_stride is not None:
        given["bias_step"] = request.bias_stride[along == "columns"]
    tensors = ["out", "a", "b", *(["bias"] if request.bias_stride is not None else [])]
    tensors += ["a_scales", "b_scales"] if request.scales != "none" else []
    names = [name for name in tensors if name in kernel.arg_names]
    bound = {name: given[name] for name in kernel.arg_names if name not in names}
    result = BoundKernel(kernel, programs, bound, names, host.team.device, options)
    left, out = getattr(torch, request.dtype), getattr(torch, request.out_dtype)
    right = getattr(torch, request.b_dtype) if request.b_dtype else left
    scales = dict.fromkeys(("a_scales", "b_scales"), torch.float32)
    result.compile_ahead(out=out, a=left, b=right, bias=out, **scales)
    return result


def programs_for(request: FusedRequest, host: Host, tiles: int) -> int:
    """Return the number of programs for one rank's tiles: at most as many as can be resident at a time."""
    on_cpu = request.target.type is DeviceType.CPU
    most: int = request.options["config"].get("num_sms", 1 if on_cpu else host.processors)
    return max(1, min(most, tiles, host.team.max_programs, most if on_cpu else host.processors))


def peer_memory(request: FusedRequest, host: Host, name: str, nbytes: int) -> torch.Tensor:
    """Return memory that peers can address, at the same heap offset on all members.

    Raises:
        UnsupportedError: there is not enough; on all members.
    """
    region = host.symmetric(nbytes)
    if region is None:
        raise UnsupportedError(
            f"{request.op} ({name}) needs {nbytes} bytes that peers reach, and there is no room for them: open the "
            "context with a larger heap_size, or let the library choose the algorithm"
        )
    return region.tensor[:nbytes]


def peer_matrix(
    request: FusedRequest, host: Host, name: str, shape: tuple[int, int], dtype: str, nbytes: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory that peers can address, and a matrix after its first `nbytes`, with rows aligned to 16 bytes."""
    element: torch.dtype = getattr(torch, dtype)
    width = rounded_up(shape[1], element.itemsize)
    memory = peer_memory(request, host, name, nbytes + shape[0] * width * element.itemsize)
    return memory, memory[nbytes:].view(element).view(shape[0], width)[:, : shape[1]]


def staged_memory(request: FusedRequest, host: Host, name: str, nbytes: int) -> tuple[Any, Any, tuple[int, ...]]:
    """Allocate memory that peers can address, also for an output that they write but cannot address.

    Returns:
        (`nbytes` bytes and more, the matrix to write to, its strides); None for what is not needed.
    """
    if request.op != "matmul_reduce_scatter" and not request.reach_out:
        memory, staged = peer_matrix(request, host, name, request.out_shape, request.out_dtype, nbytes)
        return memory, staged, staged.stride()
    return peer_memory(request, host, name, nbytes) if nbytes else None, None, request.out_stride
