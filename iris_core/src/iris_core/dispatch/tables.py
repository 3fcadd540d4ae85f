"""Files of measured tables: times of algorithms by device, number of ranks, operation, element type and size.

One format serves `ctx.ccl`, whose lines have the bytes of a call, and `ctx.ops`, whose lines have the shape of a
product.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
from collections.abc import (
    Iterable,
    Mapping,  # pydantic reads the types
    Sequence,
)
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

from iris_core.dispatch.config import Config, FusedConfig
from iris_core.documents import read_document
from iris_core.errors import SettingsError

FORMAT = 2
"""Version of the files' format."""

DISTRIBUTIONS = ("torch", "triton", "iris-core", "iris-allocators", "iris-triton", "iris-gluon")

ANY_DTYPE = "*"

HEAP, ORDINARY = "heap", "ordinary"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table: the time of one call by an algorithm."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    op: str
    dtype: str  #: torch's name of the element type, with scales " rows" or " blocks" behind it, TF32, or ANY_DTYPE
    #: (bytes,) of a collective (see `size_of`), or (m, n, k) of the product that each rank computes
    size: tuple[int, ...]
    algorithm: str
    seconds: Annotated[float, Field(ge=1e-9, le=1e6)]
    #: where the tensors lie; see `place_of`
    place: Annotated[str, Field(pattern="^(heap|ordinary|input|output)$")] = HEAP
    #: as in the call; None for operations that gather nothing
    gather_dim: Annotated[int, Field(ge=0, le=1)] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)  #: fields of `Config` or `FusedConfig` that the call had
    source: str = ""  #: its file; empty where this process has measured it
    group_size: int = 0  #: number of ranks
    measured: bool = True  #: whether Iris measured the time; else it is a model's
    note: str = ""  #: how it was measured, or where a model's times come from
    num_nodes: Annotated[int, Field(ge=1, le=1 << 60)] = 1  #: how many nodes the ranks were on
    #: what a call costs the CPU; where tables have none, it is less than `seconds`
    host_seconds: Annotated[float, Field(ge=0, le=1e6)] = 0.0

    @property
    def eager_seconds(self) -> float:
        """How long a call takes outside of graphs: the CPU may need longer than the device."""
        return max(self.seconds, self.host_seconds)

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
_Text = Annotated[str, Field(min_length=1)]


def _checked(row: Any) -> Any:
    """Return the fields of an `Entry`, whose types are checked next: `nbytes`, or `m`, `n` and `k`, are its size."""
    if not isinstance(row, dict):
        return row
    sizes = {name: each for name in ("nbytes", "m", "n", "k") if (each := row.pop(name, None)) is not None}
    for name, each in sizes.items():
        if isinstance(each, int | float) and not 1 <= each <= 1 << 60:
            raise ValueError(f"{name} must be from 1 to {1 << 60}, not {each}")
    if "".join(sizes) not in ("mnk", "nbytes") or ("nbytes" in sizes and row.get("gather_dim") is not None):
        raise ValueError("a line has `nbytes`, or `m`, `n` and `k`")
    kind: Any = Config if "nbytes" in sizes else FusedConfig
    try:
        kind(algorithm="a name", **row.get("config", {}))
    except TypeError as error:
        raise ValueError(str(error)) from error
    return row | {"size": tuple(sizes.values())}


class Table(BaseModel):
    """The measurements of one file, or the times of a model, on a device: torch's name of it, or "cpu"."""

    model_config = ConfigDict(strict=True)

    format: Literal[2]
    device: _Text
    group_size: Annotated[int, Field(ge=1, le=1 << 20)]
    measured: bool
    note: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    entries: list[Annotated[Entry, BeforeValidator(_checked)]]

    @model_validator(mode="after")
    def _model_says_whence(self) -> Self:
        if not (self.measured or self.note):
            raise ValueError("a table that was not measured says in `note` where its times come from")
        return self


_TABLE = TypeAdapter(Table)


def read_table(path: Path) -> Table:
    """Read one file; SettingsError if it is damaged, or of another format."""
    try:
        table = read_document(path, _TABLE)
    except ValueError as error:
        raise SettingsError(
            f"{path} is not a table of measurements: {error}. Delete it, and measure again with `iris tune`"
        ) from error
    of: dict[str, Any] = {"source": str(path), "group_size": table.group_size}
    of |= {"measured": table.measured, "note": table.note}
    table.entries = [replace(each, **of) for each in table.entries]
    return table


def write_table(path: Path, device: str, group_size: int, old: Iterable[Entry], new: Sequence[Entry]) -> None:
    """Write one file of measurements in place of what it was, and make its folder.

    Of `old` ones, those stay whose points were not measured again.
    """
    again = {entry.point for entry in new}
    entries = [*(entry for entry in old if entry.point not in again), *new]
    lines, usual = [], {"gather_dim": None, "place": HEAP, "num_nodes": 1}
    for entry in sorted(entries, key=lambda e: (*e.point, e.seconds)):
        names = "mnk" if len(entry.size) == 3 else ("nbytes",)
        row: dict[str, Any] = {"op": entry.op, "dtype": entry.dtype, **dict(zip(names, entry.size, strict=True))}
        row |= {name: getattr(entry, name) for name, each in usual.items() if getattr(entry, name) != each}
        row |= {"algorithm": entry.algorithm, "seconds": float(f"{entry.seconds:.4g}")}
        row |= {"host_seconds": float(f"{entry.host_seconds:.3g}")} if entry.eager_seconds > entry.seconds else {}
        lines.append(json.dumps(row | ({"config": dict(entry.config)} if entry.config else {})))
    of = {"format": FORMAT, "device": device, "group_size": group_size, "measured": True, "versions": versions()}
    text = f'{json.dumps(of)[:-1]}, "entries": [\n' + ",\n".join(f"  {line}" for line in lines) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)  # a process that reads meanwhile sees the old one or the new one
    finally:
        part.unlink(missing_ok=True)


def versions(names: Iterable[str] = DISTRIBUTIONS) -> dict[str, str]:
    """Return the versions of distributions by name, by default of what measurements depend on; without absent ones."""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
