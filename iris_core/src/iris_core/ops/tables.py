"""Measured tables of `ctx.ops`: which algorithm was the fastest, by device, group size, operation, dtype and shape."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from iris_core.ccl.tables import ANY_DTYPE, FORMAT, Entry, entries_for, read_folders, write_rows
from iris_core.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from iris_core.types import FusedRequest

TF32 = "tf32"
"""What tables call float32 where TF32 is allowed."""

_SAME_SPEED = {"float16": "bfloat16", "bfloat16": "float16"}

NEAR = 1.0
"""A measured shape speaks of those that differ by at most this factor of two, up or down, in each dimension."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One line of a table.

    Attributes:
        op: the operation.
        dtype: torch's name of the operands' element type, TF32, or ANY_DTYPE; see `spoken_of`.
        shape: (m, n, k) of the product that each rank computes.
        gather_dim: as in the call; None for operations that gather nothing.
        algorithm: name of an algorithm.
        seconds: what it took.
        config: fields of `FusedConfig` with which it took that.
    """

    op: str
    dtype: str
    shape: tuple[int, int, int]
    gather_dim: int | None
    algorithm: str
    seconds: float
    config: Mapping[str, Any]

    def distance(self, request: FusedRequest) -> float:
        """How far a request's shape is from this one, in powers of two; infinite if it is another kind of call."""
        same = (self.op, self.gather_dim) == (request.op, request.options.get("gather_dim"))
        if not same or self.dtype not in spoken_of(request) or not all(request.shape):
            return math.inf
        return max(abs(math.log2(mine / its)) for mine, its in zip(self.shape, request.shape, strict=True))


@dataclass(frozen=True, slots=True)
class FusedTable:
    """The measurements of one file.

    Attributes:
        device: torch's name of the device; "cpu" for the CPU.
        group_size: ranks that took part.
        rows: what was measured.
        source: the file.
    """

    device: str
    group_size: int
    rows: tuple[Measured, ...]
    source: str

    def lookup(self, request: FusedRequest) -> list[Entry]:
        """Return what was measured with the nearest shape, the fastest first; empty if none is near.

        Times of another shape are scaled by the multiplications.
        """
        near = [(row.distance(request), row) for row in self.rows]
        least = min((distance for distance, _ in near), default=math.inf)
        if least > NEAR:
            return []
        rows = [row for distance, row in near if distance == least]
        known = {row.dtype for row in rows}
        named = next(name for name in spoken_of(request) if name in known)
        work = math.prod(request.shape)
        return [
            Entry(
                op=row.op,
                dtype=row.dtype,
                max_nbytes=request.nbytes,
                algorithm=row.algorithm,
                seconds=row.seconds * work / math.prod(row.shape),
                source=self.source,
                config=row.config,
            )
            for row in sorted(rows, key=lambda row: row.seconds)
            if row.dtype == named
        ]


def spoken_of(request: FusedRequest) -> tuple[str, ...]:
    """The names of element types whose rows speak of a request, the best one first.

    Its own, or TF32; then the other type of 16 bits, which takes as long; then all.
    """
    own = TF32 if request.options["tf32"] else request.dtype
    return (own, *([_SAME_SPEED[own]] if own in _SAME_SPEED else []), ANY_DTYPE)


def read_fused_table(path: Path) -> FusedTable:
    """Read one file.

    Raises:
        SettingsError: it is no table, or one of another format.
    """
    try:
        content = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, this version reads {FORMAT}")
        rows = tuple(_row(each) for each in content["entries"])
        return FusedTable(str(content["device"]), int(content["group_size"]), rows, str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path} is not a table of fused operations: {type(error).__name__}: {error}") from error


def _row(row: Mapping[str, Any]) -> Measured:
    shape = int(row["m"]), int(row["n"]), int(row["k"])
    if min(shape) < 1:
        raise ValueError(f"m, n and k must be positive, not {shape}")
    dim = row.get("gather_dim")
    return Measured(
        op=str(row["op"]),
        dtype=str(row["dtype"]),
        shape=shape,
        gather_dim=None if dim is None else int(dim),
        algorithm=str(row["algorithm"]),
        seconds=float(row["seconds"]),
        config=dict(row.get("config", {})),
    )


def write_fused_table(
    path: Path, device: str, group_size: int, versions: Mapping[str, str], rows: Iterable[Measured]
) -> None:
    """Write one file, in place of what it was; its folder is made.

    Args:
        path: the file.
        device: as in `FusedTable`.
        group_size: as in `FusedTable`.
        versions: of what was measured with, by name.
        rows: in any order.
    """
    written = []
    for each in sorted(rows, key=lambda r: (r.op, r.dtype, r.shape, r.gather_dim or 0, r.seconds)):
        row: dict[str, Any] = {"op": each.op, "dtype": each.dtype}
        row |= dict(zip("mnk", each.shape, strict=True))
        row |= {} if each.gather_dim is None else {"gather_dim": each.gather_dim}
        row |= {"algorithm": each.algorithm, "seconds": float(f"{each.seconds:.4g}")}
        written.append(row | ({"config": dict(each.config)} if each.config else {}))
    write_rows(path, device, group_size, versions, written)


class FusedTables:
    """The tables of one machine.

    Args:
        folders: where the files lie; what comes first counts first.  A folder need not exist.
        device: name of this rank's device; tables of others are left out.
    """

    def __init__(self, folders: Iterable[Path], device: str) -> None:
        self._by_size = read_folders(folders, device, read_fused_table)

    def lookup(self, request: FusedRequest) -> list[Entry]:
        """Return what the tables say of a request, the most trusted entry first."""
        return entries_for(request, self._by_size)
