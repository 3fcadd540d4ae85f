"""The host's side of the GEMM for Hopper: how it is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FULL_ROWS = 128  # rows of a tile with which eight warps multiply; four do with half as many
_SHARED_BYTES = 227 * 1024  # what a program can have on Hopper
# of the model: a step of a 128 x 128 tile in relation to half a step of a 128 x 256 tile, and the ends of both tiles in
# elements of the inner dimension, as the same warps multiply and store
_SMALL_TILE_COST, _LARGE_TILE_END, _SMALL_TILE_END = 1.07, 300, 100


@dataclass(frozen=True)
class GemmConfig:
    """How the kernel is launched.

    Raises:
        ValueError: the numbers do not fit each other, or shared memory.
    """

    block_m: int = 128  #: block_m, block_n: rows and columns of a tile of C
    block_n: int = 256
    block_k: int = 64  #: step of the inner dimension; 128 of 8-bit floats
    stages: int = 4  #: steps that are in shared memory at the same time
    parts: int = 2  #: 1 or 2, parts in which a finished tile goes through shared memory
    group: int = 8  #: row tiles of a group; see `RowGroups`
    num_warps: int = 8  #: warps that multiply; one more loads
    maxnreg: int = 168  #: registers per thread before the warps share them out
    item: int = 2  #: bytes of an element of the operands; one of the result has 2

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
        """Bytes of shared memory."""
        operands = self.stages * (self.block_m + self.block_n) * self.block_k * self.item
        scales = 4 * self.block_n if self.item == 1 else 0
        return operands + self.block_m * self.block_n // self.parts * 2 + 16 * self.stages + 128 + scales

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
        """Return the number of tiles of an m x n matrix."""
        return -(-m // self.block_m) * -(-n // self.block_n)


def choose_config(
    m: int, n: int, processors: int, *, k: int = 8192, idle: float = 0.0, given: Mapping[str, int] | None = None
) -> GemmConfig:
    """Choose between tiles of 128 x 256 and 128 x 128 by the estimated time of the last multiprocessor.

    A tile takes the time of its steps and its epilogue; a large tile takes less than two small ones with as many steps.
    So large tiles are chosen for long inner dimensions, if the last wave leaves few multiprocessors idle.  With the
    constants above this chooses the faster one at every shape where both were measured (docs/ops.md).

    Args:
        m, n: shape of C.
        processors: multiprocessors that compute.
        k: the inner dimension, in elements of 16 bits.
        idle: time that a multiprocessor waits, in tiles: 0.5 if operands arrive while the kernel runs, as the last
            tiles cannot begin earlier.
        given: fields of the config that are fixed.

    Raises:
        ValueError: no config has the given fields, whatever the number of processors.
    """
    fields = {"block_m": _FULL_ROWS, **(given or {})}
    warps = fields.setdefault("num_warps", 8 if fields["block_m"] >= _FULL_ROWS else 4)
    fields.setdefault("maxnreg", 168 if warps == 8 else 255)
    widths = [fields["block_n"]] if "block_n" in fields else [256, 128]
    if fields["block_m"] > _FULL_ROWS:  # sums of a larger tile would not fit into registers
        widths = widths[-1:]
    found, refused = [], ""
    for width in widths:
        most, parts = (4, 2) if width > _FULL_ROWS else (5, 1)
        for stages in range(most, 1, -1):  # as many as shared memory allows
            try:
                found.append(GemmConfig(**{"block_n": width, "parts": parts, "stages": stages, **fields}))
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
