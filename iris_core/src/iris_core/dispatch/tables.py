"""Files of measured tables: times of algorithms by device, number of ranks, operation, element type and size.

One format serves `ctx.ccl`, whose lines have the bytes of a call, and `ctx.ops`, whose lines have the shape of a
product.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from iris_core.dispatch.config import Config, FusedConfig
from iris_core.documents import read_document
from iris_core.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

FORMAT = 2
"""Version of the files' format."""

DISTRIBUTIONS = ("torch", "triton", "iris-core", "iris-allocators", "iris-triton", "iris-gluon")

ANY_DTYPE = "*"
TF32 = "tf32"
"""What tables call float32 where TF32 is allowed."""

HEAP, ORDINARY = "heap", "ordinary"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table: the time of one call by an algorithm.

    Attributes:
        dtype: torch's name of the element type, with scales " rows" or " blocks" behind it, TF32, or ANY_DTYPE.
        size: (bytes,) of a collective (see `size_of`), or (m, n, k) of the product that each rank computes.
        place: where the tensors lie; see `place_of`.
        gather_dim: as in the call; None for operations that gather nothing.
        config: fields of `Config` or `FusedConfig` that the call had.
        source: its file; empty where this process has measured it.
        group_size: number of ranks.
        measured: whether Iris measured the time; else it is a model's.
        note: how it was measured, or where a model's times come from.
        num_nodes: how many nodes the ranks were on.
    """

    op: str
    dtype: str
    size: tuple[int, ...]
    algorithm: str
    seconds: float
    place: str = HEAP
    gather_dim: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""
    group_size: int = 0
    measured: bool = True
    note: str = ""
    num_nodes: int = 1

    @property
    def point(self) -> tuple[Any, ...]:
        """The measured point: entries that have it equal were compared with each other."""
        dim = -1 if self.gather_dim is None else self.gather_dim
        return self.op, self.dtype, dim, self.place, self.size, self.num_nodes

    @property
    def where(self) -> str:
        """Size, place and number of ranks, for people."""
        size = f"{self.size[0]} bytes" if len(self.size) == 1 else " x ".join(map(str, self.size))
        nodes = f" on {self.num_nodes} nodes" if self.num_nodes > 1 else ""
        return f"{size}, {self.place} tensors, {self.group_size} ranks{nodes}"


# -- files ------------------------------------------------------------------------------------------------------------
_SIZES = {"nbytes", "m", "n", "k"}
_Text = Annotated[str, Field(min_length=1)]
_Size = Annotated[int, Field(ge=1, le=1 << 60)]
_Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


class _Row(BaseModel):
    """One line of a file: `nbytes`, or `m`, `n`, `k` and, of what gathers, `gather_dim`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    op: _Text
    dtype: _Text
    algorithm: _Text
    seconds: Annotated[float, Field(ge=1e-9, le=1e6)]
    nbytes: _Size | None = None
    m: _Size | None = None
    n: _Size | None = None
    k: _Size | None = None
    gather_dim: Annotated[int, Field(strict=True, ge=0, le=1)] | None = None  # Literal[0, 1] would take False
    place: Literal["heap", "ordinary", "input", "output"] = "heap"
    num_nodes: _Ranks = 1
    config: dict[str, Annotated[int, Field(ge=0, le=1 << 20)] | str] = Field(default_factory=dict)

    @property
    def size(self) -> tuple[int, ...]:
        return tuple(size for size in (self.nbytes, self.m, self.n, self.k) if size is not None)

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        shape = (self.m, self.n, self.k, None if self.nbytes is None else self.gather_dim)
        if shape.count(None) != (1 if self.nbytes is None else 4):
            raise ValueError("a line has `nbytes`, or `m`, `n` and `k`")
        kind: Any = FusedConfig if self.nbytes is None else Config
        try:
            kind(algorithm="a name", **self.config)
        except TypeError as error:
            raise ValueError(str(error)) from error
        return self


class _File(BaseModel):
    model_config = ConfigDict(strict=True)

    format: Literal[2]
    device: _Text
    group_size: _Ranks
    measured: bool
    note: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    entries: list[_Row]

    @model_validator(mode="after")
    def _model_says_whence(self) -> Self:
        if not (self.measured or self.note):
            raise ValueError("a table that was not measured says in `note` where its times come from")
        return self


_FILE = TypeAdapter(_File)


class Table(NamedTuple):
    """The measurements of one file, or the times of a model, on a device: torch's name of it, or "cpu"."""

    device: str
    group_size: int
    measured: bool
    versions: Mapping[str, str]
    entries: tuple[Entry, ...]


def read_table(path: Path) -> Table:
    """Read one file; SettingsError if it is damaged, or of another format."""
    try:
        file = read_document(path, _FILE)
    except ValueError as error:
        raise SettingsError(
            f"{path} is not a table of measurements: {error}. Delete it, and measure again with `iris tune`"
        ) from error
    of: dict[str, Any] = {"source": str(path), "group_size": file.group_size}
    of |= {"measured": file.measured, "note": file.note}
    own = _Row.model_fields.keys() - _SIZES
    entries = tuple(Entry(size=row.size, **of, **{each: getattr(row, each) for each in own}) for row in file.entries)
    return Table(file.device, file.group_size, file.measured, file.versions, entries)


def write_table(
    path: Path, device: str, group_size: int, versions: Mapping[str, str], entries: Iterable[Entry]
) -> None:
    """Write one file of measurements, as in `Table`, in place of what it was; its folder is made."""
    lines, usual = [], {"gather_dim": None, "place": HEAP, "num_nodes": 1}
    for entry in sorted(entries, key=lambda e: (*e.point, e.seconds)):
        names, usual = (
            "mnk" if len(entry.size) == 3 else ("nbytes",),
            {"gather_dim": None, "place": HEAP, "num_nodes": 1},
        )
        row: dict[str, Any] = {"op": entry.op, "dtype": entry.dtype, **dict(zip(names, entry.size, strict=True))}
        row |= {name: getattr(entry, name) for name, each in usual.items() if getattr(entry, name) != each}
        row |= {"algorithm": entry.algorithm, "seconds": float(f"{entry.seconds:.4g}")}
        lines.append(json.dumps(row | ({"config": dict(entry.config)} if entry.config else {})))
    of = {"format": FORMAT, "device": device, "group_size": group_size, "measured": True, "versions": dict(versions)}
    text = f'{json.dumps(of)[:-1]}, "entries": [\n' + ",\n".join(f"  {line}" for line in lines) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)  # a process that reads meanwhile sees the old one or the new one


def versions(names: Iterable[str] = DISTRIBUTIONS) -> dict[str, str]:
    """Return the versions of distributions by name, by default of what measurements depend on; without absent ones."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def merged(old: Iterable[Entry], new: Sequence[Entry]) -> list[Entry]:
    """Return the entries of two tables: of points that were measured again, only the new ones."""
    again = {entry.point for entry in new}
    return [*(entry for entry in old if entry.point not in again), *new]
