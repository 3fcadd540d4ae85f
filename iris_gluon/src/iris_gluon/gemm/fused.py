"""Common parts of the fused products for Hopper: supported requests, and TMA descriptors of the operands.

The protocols are those of `iris_triton.gemm`.  Arrival flags are 0 between launches: the last program that has waited
for them clears them, so no separate clearing is needed, and a graph can be replayed.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from iris_core.dispatch.products import SCALED_BLOCK
from iris_core.dispatch.team import Host
from iris_core.types import DeviceType, FusedRequest
from iris_gluon.gemm.launch import GemmConfig, choose_config
from iris_gluon.gemm.sinks import AddBias, Scales
from iris_gluon.info import GLUON_INFO
from iris_triton.gemm.parts.fused import Fused, Tiling, arguments_of, bind, programs_for
from iris_triton.launcher import BoundKernel

RUNTIME = (
    "me", "rank", "m", "n", "k", "a_down", "b_down", "out_down", "out_right", "bias_step", "tiles_m", "tiles_n",
    "k_tiles", "rows_each", "chunk", "timeout_ns", "status", "a_scale_down", "a_scale_right", "b_scale_down",
    "b_scale_right",
)  # fmt: skip
"""Arguments for whose values kernels are not compiled anew: a 1 would be a constant, which no order can hold."""


@gluon.jit
def matrix_at(address, like, rows, columns, down, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Describe a matrix at an address (int64) for TMA, with elements like those of a pointer."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_N], like.dtype.element_ty)
    pointer = gl.multiple_of(address.to(like.dtype), 16)
    return tma.make_tensor_descriptor(pointer, [rows, columns], [down, 1], [BLOCK_M, BLOCK_N], layout)


@gluon.jit
def operand(
    matrix, rows, columns, down, BLOCK_ROWS: gl.constexpr, BLOCK_COLUMNS: gl.constexpr, TURNED: gl.constexpr
):  # fmt: skip
    """Describe an operand for TMA, by rows or, TURNED, by columns."""
    if TURNED:
        return matrix_at(matrix.to(gl.int64), matrix, columns, rows, gl.cast(down, gl.int64), BLOCK_COLUMNS, BLOCK_ROWS)
    else:
        return matrix_at(matrix.to(gl.int64), matrix, rows, columns, gl.cast(down, gl.int64), BLOCK_ROWS, BLOCK_COLUMNS)


@gluon.jit
def biased(sink, bias, step, m, n, BIAS: gl.constexpr):
    """Add the bias, if there is one, before the tiles go to the sink."""
    if BIAS == "none":
        return sink
    else:
        limit = n
        if BIAS == "rows":
            limit = m
        return AddBias(sink, bias, gl.cast(step, gl.int64), limit, BIAS)


@gluon.jit
def scales_of(like, a, b, a_down, a_right, b_down, b_right, m, n, KIND: gl.constexpr):
    """Return the scales of the operands; without some, an unused object, with a pointer to anything."""
    down, right = gl.cast(b_down, gl.int64), gl.cast(b_right, gl.int64)
    if KIND == "none":
        return Scales(like, like, down, right, down, right, m, n, KIND)
    else:
        return Scales(a, b, gl.cast(a_down, gl.int64), gl.cast(a_right, gl.int64), down, right, m, n, KIND)


_FIELDS = {f"block_size_{side}": f"block_{side}" for side in "mnk"}
_FIELDS |= {"group_size_m": "group", "num_stages": "stages", "num_warps": "num_warps"}
"""Fields of a config that the core has, and their names there."""

USED_CONFIG = (*_FIELDS, "num_sms")

UNIT = 8  # elements of 16 bits in 16 bytes: of what TMA wants multiples

_EIGHT = ("float8_e4m3fn", "float8_e5m2")

_PROCESSORS = 132  # of an H200, for what is worth measuring

_FULL_BLOCK, _HALF_BLOCK = 128, 64  # rows of a tile: as a rule, and where members own no multiple of them
_WAITING = 0.5  # of a tile, see `choose_config`: where rows arrive while the kernel runs


def unit_of(request: FusedRequest) -> int:
    """Elements of the operands in 16 bytes."""
    return 2 * UNIT if request.dtype in _EIGHT else UNIT


def _down(stride: tuple[int, ...]) -> int:
    """Elements from row to row, or from column to column of a matrix that lies by columns."""
    return stride[0] if stride[1] == 1 else stride[1]


class Hopper(Fused):
    """Products of 16-bit floats that lie by rows or by columns, and of 8-bit floats, A by rows and B by columns.

    They are chosen by name, or where they were measured: the model knows too little of them.
    """

    info = GLUON_INFO
    uses: tuple[str, ...] = USED_CONFIG
    scaled_sides: tuple[str, ...] = ("block_size_k",)
    measured_only = True
    efficiency: ClassVar[Mapping[str, float]] = {"cpu": 0.002, "": 0.9}

    rows_owned = True  # whether members own rows of the product, over which tiles do not reach

    def _problem(self, request: FusedRequest) -> str:
        if problem := super()._problem(request):
            return problem
        target = request.target
        if target.type is not DeviceType.CPU and target.arch != "sm_90":
            return f"wgmma and TMA need NVIDIA Hopper (sm_90), and this is {target.arch or 'unknown'}"
        halves, unit = ("bfloat16", "float16"), unit_of(request)
        if request.out_dtype not in halves or (request.out_dtype != request.dtype and unit == UNIT):
            given = f"{request.dtype} to {request.out_dtype}"
            return f"its core multiplies 16-bit and 8-bit floats to 16-bit floats, not {given}"
        if unit > UNIT and (request.a_stride[1], request.b_stride[0]) != (1, 1):
            return "wgmma reads 8-bit floats along the inner dimension: A must lie by rows, B by columns"
        for name, stride, aligned in zip("AB", (request.a_stride, request.b_stride), request.aligned[:2], strict=True):
            if 1 not in stride or _down(stride) <= 0 or _down(stride) % unit or not aligned:
                return f"TMA needs dense rows, or columns, of {name} at multiples of 16 bytes"
        if request.n % UNIT:
            return f"rows of the product must be multiples of 16 bytes, and N is {request.n}"
        try:
            block = self._gemm(request, 1).block_m
        except ValueError as error:
            return str(error)
        rows = request.m // request.group_size
        if self.rows_owned and rows % block:
            return f"a member's {rows} rows must be a multiple of the {block} rows of a tile"
        return ""

    def _offered(self, request: FusedRequest) -> list[dict[str, Any]]:
        plain = replace(request, options={**request.options, "config": {}})
        other_width = 128 if self._gemm(plain, _PROCESSORS).block_n > 128 else 256
        return [
            {"block_size_n": other_width},
            {"block_size_m": 64, "block_size_n": 128, "num_warps": 4},
            {"group_size_m": 4},
            {"group_size_m": 16},
        ]

    def _gemm(self, request: FusedRequest, processors: int) -> GemmConfig:
        """Return how the core is launched on `processors`: the choice by shape, with what the config says.

        Raises ValueError where there is no such config, which it then is for any number of processors.
        """
        config, (m, n, k) = request.options["config"], request.shape
        half = self.rows_owned and m // request.group_size % _FULL_BLOCK
        given = {"block_m": _HALF_BLOCK if half else _FULL_BLOCK}
        if unit_of(request) > UNIT:
            given |= {"block_k": SCALED_BLOCK, "item": 1}
        given |= {field: config[name] for name, field in _FIELDS.items() if name in config}
        if request.scales == "blocks":  # four warps for each 64 rows
            if given["block_k"] != SCALED_BLOCK or given["block_m"] > _FULL_BLOCK:
                raise ValueError(
                    f"scales of blocks need block_size_k {SCALED_BLOCK}, and block_size_m of at most {_FULL_BLOCK}"
                )
            given = {"num_warps": 4, **given, "maxnreg": 168 if given["block_m"] == _FULL_BLOCK else 255}
        idle = _WAITING if request.op == "all_gather_matmul" else 0.0
        return choose_config(m, n, processors, k=k * UNIT // unit_of(request), idle=idle, given=given)

    def _launch(self, request: FusedRequest, host: Host) -> tuple[GemmConfig, int]:
        """How the core is launched where nothing else is done beside it, and the number of programs."""
        gemm = self._gemm(request, programs_for(request, host, sys.maxsize))
        return gemm, programs_for(request, host, gemm.tiles(request.m, request.n))

    @staticmethod
    def _bind(
        request: FusedRequest, host: Host, kernel: Any, programs: int, gemm: GemmConfig, **arguments: Any
    ) -> BoundKernel:
        """Bind a kernel to all that it takes but the tensors of a call; `arguments` are those that others lack."""
        blocks = {"BLOCK_M": gemm.block_m, "BLOCK_N": gemm.block_n, "BLOCK_K": gemm.block_k}
        options = {"num_warps": gemm.num_warps, "maxnreg": gemm.maxnreg}
        tiles = Tiling(gemm.block_m, gemm.block_n, {**blocks, **gemm.options}, options)
        common = arguments_of(request, tiles, request.m, request.out_stride) | {
            "a_down": _down(request.a_stride),
            "b_down": _down(request.b_stride),
            "rows_each": request.m // request.group_size,
            "k_tiles": -(-request.k // gemm.block_k),
            "TURNED_A": request.a_stride[1] != 1,
            "TURNED_B": request.b_stride[1] != 1 or gemm.item == 1,
        }
        return bind(request, host, kernel, programs, common | arguments, options)
