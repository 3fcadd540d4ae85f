"""The host's side of the GEMM for Hopper: whether it fits, how it is launched, and a plain C = A @ B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from iris_core.dispatch.products import ROW_NBYTES, check_apart
from iris_core.errors import UnsupportedError
from iris_gluon import _compat
from iris_triton.launcher import BoundKernel

if TYPE_CHECKING:
    from collections.abc import Mapping

_DTYPES = (torch.bfloat16, torch.float16)
_FULL_ROWS = 128
"""Rows of a tile with which eight warps multiply; four do with half as many."""
_SHARED_BYTES = 227 * 1024
"""What a program can have on Hopper."""

_SMALL_TILE_COST = 1.07
"""Time of a step of a 128 x 128 tile in relation to half a step of a 128 x 256 tile: of the model."""

_LARGE_TILE_END, _SMALL_TILE_END = 300, 100
"""What the end of a tile costs, in elements of the inner dimension: the same warps multiply and store."""


@dataclass(frozen=True)
class GemmConfig:
    """How the kernel is launched.

    Attributes:
        block_m, block_n: rows and columns of a tile of C.
        block_k: step of the inner dimension.
        stages: steps that are in shared memory at the same time.
        parts: 1 or 2, parts in which a finished tile goes through shared memory.
        group: row tiles of a group; see `RowGroups`.
        num_warps: warps that multiply; one more loads.
        maxnreg: registers per thread before the warps share them out.

    Raises:
        ValueError: the numbers do not fit each other, or shared memory.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    parts: int = 2
    group: int = 8
    num_warps: int = 8
    maxnreg: int = 168

    def __post_init__(self) -> None:
        if self.parts not in (1, 2) or self.block_n not in (64, 128, 256) or self.block_k % 64:
            raise ValueError(f"{self}: parts must be 1 or 2, block_n 64, 128 or 256, block_k a multiple of 64")
        if self.num_warps not in (4, 8) or self.block_m % (16 * self.num_warps):
            raise ValueError(f"{self}: num_warps must be 4 or 8, with 16 rows of block_m or a multiple for each warp")
        if self.stages < 2 or self.group < 1:
            raise ValueError(f"{self}: needs two stages and a group of one row of tiles at least")
        if self.shared_bytes > _SHARED_BYTES:
            raise ValueError(
                f"{self} needs {self.shared_bytes} bytes of shared memory, and there are {_SHARED_BYTES}: take fewer "
                "stages, a smaller tile or two parts"
            )

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory, for elements of two bytes."""
        operands = self.stages * (self.block_m + self.block_n) * self.block_k * 2
        return operands + self.block_m * self.block_n // self.parts * 2 + 16 * self.stages + 128

    @property
    def options(self) -> Mapping[str, int]:
        """Keyword arguments of a launch."""
        return {
            "GROUP": self.group,
            "STAGES": self.stages,
            "PARTS": self.parts,
            "NUM_WARPS": self.num_warps,
            "num_warps": self.num_warps,
            "maxnreg": self.maxnreg,
        }

    def tiles(self, m: int, n: int) -> int:
        """Number of tiles of an m x n matrix."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def operands(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, Any]:
        """Descriptors of A and B; of their transposes where they lie by columns."""
        blocks = [self.block_m, self.block_k], [self.block_k, self.block_n]
        left, right = (
            descriptor(matrix.t(), block[::-1]) if by_columns(matrix) else descriptor(matrix, block)
            for matrix, block in zip((a, b), blocks, strict=True)
        )
        return left, right


def by_columns(matrix: torch.Tensor) -> bool:
    """Whether a matrix lies by columns, as the transpose of a row-major one does."""
    return matrix.stride(1) != 1 and matrix.stride(0) == 1


def choose_config(
    m: int,
    n: int,
    processors: int,
    *,
    k: int = 8192,
    block_m: int = 128,
    idle: float = 0.0,
    given: Mapping[str, int] | None = None,
) -> GemmConfig:
    """Choose between tiles of 128 x 256 and 128 x 128: that with which the last processor is done first.

    A tile takes as long as its steps and its end, and a large one somewhat less than two small ones with as many steps.
    So large ones are chosen for long inner dimensions, if the last round leaves few processors idle.  With the
    constants above this chooses what was faster at every shape where both were measured (docs/ops.md).

    Args:
        m, n: shape of C.
        processors: multiprocessors that compute.
        k: the inner dimension.
        block_m: rows of a tile, 128 or 64.
        idle: tiles for which a processor waits beside computing: half a one where operands arrive while the kernel
            runs, as nobody can begin the last ones before.
        given: fields of the config that are not to be chosen.

    Raises:
        ValueError: no config has the given fields, whatever the number of processors.
    """
    fields = {"block_m": block_m, **(given or {})}
    fields.setdefault("num_warps", 8 if fields["block_m"] >= _FULL_ROWS else 4)
    fields.setdefault("maxnreg", 168 if fields["num_warps"] == 8 else 255)
    large, small = {"block_n": 256, "stages": 4}, {"block_n": 128, "parts": 1, "stages": 5}
    if "block_n" in fields:
        forms = [large if fields["block_n"] > _FULL_ROWS else small]
    elif fields["block_m"] > _FULL_ROWS:  # sums of a larger tile would not fit into registers
        forms = [small]
    else:
        forms = [large, small]
    found, refused = [], ""
    for form in forms:
        for stages in range(form["stages"], 1, -1):  # as many as shared memory allows
            try:
                found.append(GemmConfig(**{**form, "stages": stages, **fields}))
                break
            except ValueError as error:
                refused = refused or str(error)
    if not found:
        raise ValueError(refused)
    return min(found, key=lambda each: (-(-each.tiles(m, n) // processors) + idle) * _tile_time(each, k))


def _tile_time(config: GemmConfig, k: int) -> float:
    """How long a tile takes, in relation to other ones with as many rows."""
    if config.block_n >= 2 * _FULL_ROWS:
        return float(k + _LARGE_TILE_END)
    return _SMALL_TILE_COST / 2 * (k + _SMALL_TILE_END)


def unsupported(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> str:
    """Say why the kernel for Hopper cannot multiply these; empty if it can.

    Args:
        a, b, c: the matrices; what matters is where they are, their type and their strides.
    """
    if a.device.type != "cuda" or torch.version.cuda is None:
        return f"wgmma and TMA need an NVIDIA Hopper GPU, and this is {_device_name(a)}"
    if torch.cuda.get_device_capability(a.device) != (9, 0):
        return f"wgmma needs NVIDIA Hopper (sm_90), and this is {_device_name(a)}"
    if not a.device == b.device == c.device:
        return f"the matrices must be on one device, not {a.device}, {b.device} and {c.device}"
    if not a.dtype == b.dtype == c.dtype or a.dtype not in _DTYPES:
        return f"the types must be equal, and bfloat16 or float16, not {a.dtype}, {b.dtype} and {c.dtype}"
    for name, matrix in (("A", a), ("B", b), ("C", c)):
        lines = "rows" if name == "C" else "rows (or columns)"
        turned = matrix.t() if name != "C" and by_columns(matrix) else matrix
        step = turned.stride(0) * matrix.element_size()
        if turned.stride(1) != 1 or step <= 0 or step % ROW_NBYTES:
            return (
                f"{name} has strides {tuple(matrix.stride())}: TMA needs {lines} without gaps between their elements, "
                f"which begin at multiples of {ROW_NBYTES} bytes"
            )
        if matrix.data_ptr() % ROW_NBYTES:
            return f"{name} begins at {matrix.data_ptr():#x}: TMA needs a multiple of {ROW_NBYTES} bytes"
    return ""


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, config: GemmConfig | None = None
) -> torch.Tensor:
    """Compute A @ B with the kernel for Hopper.

    Args:
        a: M x K, bfloat16 or float16, its rows or its columns dense.
        b: K x N, the same type, its rows or its columns dense: `weight.t()` of a linear layer will do.
        out: M x N, row major; a new tensor by default.
        config: of the launch; by default chosen by shape.

    Returns:
        The product; sums are float32, rounded once.

    Raises:
        ValueError: the shapes do not fit each other, or `out` shares memory with A or B.
        UnsupportedError: device, types or strides are not the kernel's; see `unsupported`.
    """
    from iris_gluon.gemm.hopper import gemm_kernel

    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0] or 0 in (*a.shape, *b.shape):
        raise ValueError(f"matmul needs M x K and K x N, none of them 0, not {tuple(a.shape)} and {tuple(b.shape)}")
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    if out is None:
        out = torch.empty(m, n, dtype=a.dtype, device=a.device)
    elif out.shape != (m, n):
        raise ValueError(f"out must be {m} x {n}, not {tuple(out.shape)}")
    reason = unsupported(a, b, out)
    if reason:
        raise UnsupportedError(f"iris_gluon.gemm.matmul: {reason}; torch.matmul works everywhere")
    check_apart("iris_gluon.gemm.matmul", out, a, b, None)
    processors = torch.cuda.get_device_properties(a.device).multi_processor_count
    config = config or choose_config(m, n, processors, k=k)
    part = [config.block_m, config.block_n // config.parts]
    tiles_m, tiles_n = -(-m // config.block_m), -(-n // config.block_n)
    with torch.cuda.device(a.device):  # the thread's current one may be another
        gemm_kernel[(min(tiles_m * tiles_n, processors),)](
            *config.operands(a, b), descriptor(out, part), tiles_m, tiles_n, -(-k // config.block_k), **config.options,
            TURNED_A=by_columns(a), TURNED_B=by_columns(b),
        )  # fmt: skip
    return out


def descriptor(matrix: torch.Tensor, block: list[int]) -> Any:
    """Describe a matrix for TMA, on the host.

    Args:
        matrix: two dimensions, row major.
        block: what one copy moves.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    element = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[matrix.dtype]
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, element))


def _device_name(tensor: torch.Tensor) -> str:
    on_gpu = tensor.device.type == "cuda"
    return torch.cuda.get_device_name(tensor.device) if on_gpu else f"the {tensor.device.type.upper()}"


class WithScratch(BoundKernel):
    """A bound kernel that describes memory to the copy unit, in scratch memory that all its launches share.

    Triton asks for it at every launch.  Nothing is allocated, and graphs may keep the address: launches of a team
    follow each other.
    """

    _scratch: torch.Tensor | None = None

    def __call__(self, stream: Any, *tensors: torch.Tensor) -> None:
        """Launch; see `BoundKernel`."""
        with _compat.scratch_from(self._allocate):
            super().__call__(stream, *tensors)

    def _allocate(self, nbytes: int, alignment: int, stream: int | None) -> torch.Tensor:
        if self._scratch is None or self._scratch.numel() < nbytes:
            # torch aligns to 512 bytes; descriptions need 128
            self._scratch = torch.empty(nbytes, dtype=torch.int8, device=f"cuda:{self._index}")
        return self._scratch
