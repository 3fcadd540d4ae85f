"""Measured tables of `ctx.ops`: which algorithm was the fastest, by device, group size, operation, dtype and shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from iris_core.dispatch.tables import (
    ANY_DTYPE,
    MAX_SIZE,
    Entry,
    Fields,
    File,
    Row,
    checked_by,
    joined,
    read_file,
    read_folders,
    write_rows,
)
from iris_core.ops.config import FusedConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from iris_core.types import FusedRequest

TF32 = "tf32"
"""What tables call float32 where TF32 is allowed."""

_SAME_SPEED = {"float16": "bfloat16", "bfloat16": "float16"}

NEAR, FAR = 1.0, 3.0
"""A measured shape speaks of those that differ by at most this power of two, up or down, in each dimension; where there
is none, one that differs by at most the second does, without its configs."""

M_WEIGHT, GROUP_WEIGHT = 2.0, 0.5
"""How far away another shape is: M decides how short a product is, and counts more; twice the ranks are half as far as
twice the size."""

DOUBT, GROUP_DOUBT, RELUCTANCE = 0.005, 0.1, 0.15
"""What was measured elsewhere only is said to take longer by the first part for each power of two, by the second for
each one between the numbers of ranks (more ranks, shorter pieces), and by the third where something was measured here:
that is left for a clear gain only."""


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

    def is_kind(self, request: FusedRequest) -> bool:
        """Whether a request is of this kind, whatever its shape."""
        same = (self.op, self.gather_dim) == (request.op, request.options.get("gather_dim"))
        return same and self.dtype in spoken_of(request) and all(request.shape)


@dataclass(frozen=True, slots=True)
class FusedTable:
    """The measurements of one file, or the times of a model.

    Attributes:
        device: torch's name of the device; "cpu" for the CPU.
        group_size: ranks that took part.
        measured: as in `iris_core.dispatch.tables.Entry`, like `note`.
        rows: what was measured.
        source: the file.
    """

    device: str
    group_size: int
    measured: bool
    rows: tuple[Measured, ...]
    source: str
    note: str = ""

    def points(self, request: FusedRequest) -> list[_Point]:
        """Return the places where something was measured that speaks of a request, in no order."""
        names, size = spoken_of(request), self.group_size
        rows = [row for row in self.rows if row.is_kind(request)]
        known = frozenset(row.algorithm for row in rows)
        by_place: dict[Any, list[Measured]] = {}
        for row in rows:
            by_place.setdefault((row.shape, row.dtype), []).append(row)
        found = []
        for (shape, dtype), there in by_place.items():
            apart = [abs(math.log2(mine / its)) for mine, its in zip(shape, request.shape, strict=True)]
            if max(apart) <= FAR:
                distance = math.hypot(M_WEIGHT * apart[0], *apart[1:])
                octaves = abs(math.log2(size / request.group_size))
                distance += GROUP_WEIGHT * octaves
                entries = [_entry(row, self, request) for row in sorted(there, key=lambda row: row.seconds)]
                is_here = size == request.group_size and max(apart) <= NEAR
                if not is_here:
                    where = "" if max(apart) <= NEAR else f"a product of {' x '.join(map(str, shape))}"
                    entries = [replace(e, config={}, note="; ".join(filter(None, (where, e.note)))) for e in entries]
                found.append(_Point(distance, octaves, names.index(dtype), shape, is_here, tuple(entries), known))
        return found


class _Point(NamedTuple):
    """What was measured with one shape.

    Attributes:
        distance: from what is asked, in powers of two.
        octaves: those between the numbers of ranks.
        rank_of_dtype: place of the rows' element type among those that speak of the request.
        shape: (m, n, k).
        is_here: it is near, with as many ranks.
        entries: the fastest first, as many seconds as such a product would take here in proportion.
        known: all algorithms that its table knows for such calls.
    """

    distance: float
    octaves: float
    rank_of_dtype: int
    shape: tuple[int, int, int]
    is_here: bool
    entries: tuple[Entry, ...]
    known: frozenset[str]


def _entry(row: Measured, table: FusedTable, request: FusedRequest) -> Entry:
    return Entry(
        op=row.op,
        dtype=row.dtype,
        max_nbytes=request.nbytes,
        algorithm=row.algorithm,
        seconds=row.seconds * math.prod(request.shape) / math.prod(row.shape),
        source=table.source,
        config=row.config,
        borrowed_from=None if table.group_size == request.group_size else table.group_size,
        measured=table.measured,
        note=table.note,
    )


def spoken_of(request: FusedRequest) -> tuple[str, ...]:
    """The names of element types whose rows speak of a request, the best one first.

    Its own, or TF32; then the other type of 16 bits, which takes as long; then all.
    """
    own = TF32 if request.options["tf32"] else request.dtype
    return (own, *([_SAME_SPEED[own]] if own in _SAME_SPEED else []), ANY_DTYPE)


class _FusedRow(Row):
    m: Annotated[int, Field(ge=1, le=MAX_SIZE)]
    n: Annotated[int, Field(ge=1, le=MAX_SIZE)]
    k: Annotated[int, Field(ge=1, le=MAX_SIZE)]
    gather_dim: Annotated[int, Field(strict=True, ge=0, le=1)] | None = None  # Literal[0, 1] would take False
    config: Annotated[Fields, checked_by(FusedConfig)] = Field(default_factory=dict)

    def measured(self) -> Measured:
        shape = self.m, self.n, self.k
        return Measured(self.op, self.dtype, shape, self.gather_dim, self.algorithm, self.seconds, self.config)


_FILE = TypeAdapter(File[_FusedRow])


def read_fused_table(path: Path) -> FusedTable:
    """Read one file.

    Raises:
        SettingsError: it is damaged, or of another format.
    """
    file = read_file(path, _FILE, "fused operations")
    rows = tuple(row.measured() for row in file.entries)
    return FusedTable(file.device, file.group_size, file.measured, rows, str(path), file.note)


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
        """Return what the tables say of a request, the fastest first.

        The nearest point counts; what its table does not know at all comes from the next ones, see
        `iris_core.dispatch.tables.joined`, as far as their products are about as long: what a launch, a copy or a
        meeting costs is much of a short one and little of a long one.
        """
        points = [point for tables in self._by_size.values() for table in tables for point in table.points(request)]
        points.sort(key=lambda point: (point.distance, point.rank_of_dtype))  # else as the folders lie
        found: list[Entry] = []
        known: set[str] = set()
        places: set[Any] = set()
        for point in points:
            place = (point.shape, point.distance, point.rank_of_dtype)
            if place in places:  # measured again since, in a folder that counts more
                continue
            places.add(place)
            if abs(math.log2(point.shape[0] / points[0].shape[0])) > NEAR:
                continue
            doubt = DOUBT * point.distance + GROUP_DOUBT * point.octaves + (RELUCTANCE if points[0].is_here else 0)
            found = joined(found, point.entries, known, 1 + doubt)
            known |= point.known
        return found
