"""Host side of the fused algorithms: tiles and options of a launch, plans, staging of inputs and outputs, cost model.

Tiles and programs depend only on values that are equal on all members; otherwise members would wait at different
barriers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from iris_core.dispatch.config import AMDS_TILE
from iris_core.dispatch.products import SCALED, SCALED_BLOCK
from iris_core.dispatch.team import Host
from iris_core.errors import UnsupportedError
from iris_core.providers.baseline import scales_shape
from iris_core.providers.model import fixed_s, moving_s, product_s
from iris_core.types import Availability, DeviceTarget, DeviceType, FusedRequest, PluginInfo
from iris_triton.collectives.parts.collective import barrier_arguments
from iris_triton.collectives.parts.sizes import rounded_up
from iris_triton.info import TRITON_INFO
from iris_triton.launcher import BoundKernel

USED_CONFIG = (  # fields of the config that every kernel makes use of
    "block_size_m", "block_size_n", "block_size_k", "group_size_m", "num_sms", "cache_modifier_a", "cache_modifier_b",
    "num_xcds", "chunk_size", "num_warps", "num_stages",
)  # fmt: skip

_LEAST_BLOCK = 16  # of tl.dot
_CPU_MOST = 128  # on the CPU an operation on a block costs the same for 1 and for 1000

_ARCH_FP8 = {
    "float8_e4m3fn": ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950"),
    "float8_e5m2": ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950"),
    "float8_e4m3fnuz": ("gfx942",),
    "float8_e5m2fnuz": ("gfx942",),
}
"""Targets whose matrix units multiply 8-bit floats; the CPU executor knows those of the first two."""

_WAYS = "down", "right"  # of strides
_XCDS = 8  # dies of an MI300X and its successors


# -- tiles ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiling of a product: tiles of block_m x block_n, the kernel's constexprs, the compiler's options."""

    block_m: int
    block_n: int
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the numbers of tile rows and tile columns."""
        return -(-rows // self.block_m), -(-columns // self.block_n)


def tiling(request: FusedRequest, rows: int, inner: int, usual: tuple[int, int, int, int, int] | None = None) -> Tiling:
    """Choose the tiling of a product, by the config, else as `usual`, else by its shape; see `_preferred`.

    Tiles do not cross multiples of `rows` rows.
    """
    config = request.options["config"]
    if request.options["layout"] == "tiles":
        config = {**AMDS_TILE, **config}
    m, n, k, warps, stages = usual or _preferred(request, rows, inner)
    m, n, k = (config.get(f"block_size_{side}", size) for side, size in zip("mnk", (m, n, k), strict=True))
    # tl.dot knows TF32 on NVIDIA; on AMD there is float32 itself in the matrix units
    precision = "tf32" if request.options["tf32"] and request.target.type is DeviceType.CUDA else "ieee"
    constants = {
        "BM": m, "BN": n, "BK": k, "GROUP": config.get("group_size_m", 8), "EVEN_K": inner % k == 0,
        "PRECISION": precision, "STAGES": config.get("num_stages", stages), "XCDS": config.get("num_xcds", 1),
        "CHUNK": config.get("chunk_size", 1), "A_CACHE": config.get("cache_modifier_a", ""),
        "B_CACHE": config.get("cache_modifier_b", ""),
    }  # fmt: skip
    return Tiling(m, n, constants, {"num_warps": config.get("num_warps", warps)})


def _preferred(request: FusedRequest, rows: int, inner: int) -> tuple[int, int, int, int, int]:
    """Return the default block_m, block_n, block_k, num_warps, num_stages."""
    if request.target.type is DeviceType.CPU:
        m, n, k = (max(_LEAST_BLOCK, min(_CPU_MOST, 1 << (x - 1).bit_length())) for x in (rows, request.n, inner))
        return m, n, k, 4, 1
    item = getattr(torch, request.dtype).itemsize
    block_k = 128 // item  # of one line
    if rows <= 64:
        return 64, 128, block_k, 4, 3
    is_wide = request.n >= 256 and request.scales != "blocks"  # whose sums are apart
    if request.target.type is DeviceType.CUDA and is_wide and item <= 2:
        return 128, 256, block_k, 8, 3
    return 128, 128, block_k, 8, 3 if request.target.type is DeviceType.CUDA else 2


def config_problem(request: FusedRequest, used: tuple[str, ...], scaled_sides: tuple[str, ...]) -> str:
    """Return why an algorithm that uses these fields does not support a config; empty if it does.

    `scaled_sides`: of a tile, those that may not be longer than a block with one scale.
    """
    config = request.options["config"]
    unused = [name for name in config if name not in used]
    if unused:
        return f"it has no use for {', '.join(unused)} of the config"
    for name in ("block_size_m", "block_size_n", "block_size_k"):
        value = config.get(name, _LEAST_BLOCK)
        if value < _LEAST_BLOCK or value & (value - 1):
            return f"{name} is {value}, and tl.dot takes powers of two from {_LEAST_BLOCK} on"
    if "num_fetch_sms" in used and "num_sms" in config and config["num_sms"] <= config.get("num_fetch_sms", 1):
        return "some programs fetch and the others compute: num_sms must be the larger number"
    for name in scaled_sides if request.scales == "blocks" else ():
        if config.get(name, SCALED_BLOCK) > SCALED_BLOCK:
            return f"{name} is {config[name]}, and scales are of blocks of {SCALED_BLOCK}"
    warps = config.get("num_warps", 4)
    if warps & (warps - 1):
        return f"num_warps is {warps}, which is no power of two"
    return ""


def fp8_problem(dtype: str, target: DeviceTarget) -> str:
    """Return why a device does not know a type of 8-bit floats; empty if it does, or for another type."""
    known, on_cpu = _ARCH_FP8.get(dtype, ()), target.type is DeviceType.CPU
    if not known or ("sm_90" if on_cpu else target.arch) in known:
        return ""
    if on_cpu:
        return f"the CPU executor does not know {dtype}"
    return f"{target.arch} does not know {dtype}; these do: {', '.join(known)}"


# -- algorithms -------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Plan:
    """A prepared call.

    `run` takes a stream (None for the current one), the output, A, B and, if there are any, the bias and the scales.
    """

    run: Callable[..., None]
    staged_a: torch.Tensor | None = None  # to which A is copied before; None if A is read in place
    staged_out: torch.Tensor | None = None  # what `run` writes and is copied to the output; None if it writes that
    aux_buffer: torch.Tensor | None = None  # see FusedWorkspace, as for the next one
    locks: torch.Tensor | None = None


class Fused:
    """One fused algorithm; satisfies `iris_core.protocols.FusedOperation`.  A call has `barriers`, for the model."""

    info: PluginInfo = TRITON_INFO

    uses: tuple[str, ...] = USED_CONFIG  # fields of the config that it fulfils
    scaled: tuple[str, ...] = SCALED
    scaled_sides: tuple[str, ...] = ("block_size_n", "block_size_k")  # of a tile: no longer than a scaled block
    serves: ClassVar[Mapping[str, Any]] = {}  # options of which it serves one value alone

    # for the model, where nothing was measured
    # of the products by device ("": any other), in relation to a library's; empty for a library's own products
    efficiency: ClassVar[Mapping[str, float]] = {"cpu": 0.02, "sm_90": 0.8, "": 0.5}
    exposed = 0.0  # the part of the transfers that the product does not hide
    copy_s = 0.0  # seconds that each copy to another member takes beside its bytes

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
        problem = fp8_problem(request.dtype, request.target)
        return problem or config_problem(request, self.uses, self.scaled_sides)

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
    sides = {"a": request.a_stride, "b": request.b_stride, "out": out_stride, "a_scale": a_scale, "b_scale": b_scale}
    return {
        **{name: getattr(request, name) for name in ("m", "n", "k")},
        **{f"{side}_{way}": step for side, stride in sides.items() for way, step in zip(_WAYS, stride, strict=False)},
        **dict(zip(("A_ALIGNED", "B_ALIGNED", "OUT_ALIGNED"), request.aligned, strict=False)),
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        **tiles.constants,
    }


def bind(
    request: FusedRequest, host: Host, kernel: Any, programs: int, arguments: Mapping[str, Any],
    options: Mapping[str, Any],
) -> BoundKernel:  # fmt: skip
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
    """Return memory that peers can address, at the same heap offset on all; UnsupportedError if there is none."""
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

    Returns `nbytes` bytes and more, the matrix to write to, and its strides; None for what is not needed.
    """
    if request.op != "matmul_reduce_scatter" and not request.reach_out:
        memory, staged = peer_matrix(request, host, name, request.out_shape, request.out_dtype, nbytes)
        return memory, staged, staged.stride()
    return peer_memory(request, host, name, nbytes) if nbytes else None, None, request.out_stride
