"""Measured tables: which algorithm was the fastest, by device, number of ranks, operation, element type and size.

One format serves `ctx.ccl`, whose lines have the bytes of a call, and `ctx.ops`, whose lines have the shape of a
product.  The nearest measured point speaks for a request.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import math
import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from iris_core.dispatch.config import Config, FusedConfig, LaunchConfig
from iris_core.documents import read_document
from iris_core.errors import SettingsError
from iris_core.logs import logger
from iris_core.types import FusedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from iris_core.types import CollectiveRequest

FORMAT = 2
"""Version of the files' format."""

ANY_DTYPE = "*"
TF32 = "tf32"
"""What tables call float32 where TF32 is allowed."""

MAX_SIZE = 1 << 60
"""Largest number of bytes, or of rows, that a line may have."""

NEAR, CLOSE, FAR = 0.5, 1.0, 3.0
"""Powers of two by which each size of a measured point may differ from a request's: up to the first it says what is the
fastest, up to the second its configs serve, and up to the third it is better than an estimate."""

_LEAST_NBYTES = 1 << 10
"""Smaller collectives take as long as one of this size."""

_SAME_SPEED = {"float16": "bfloat16", "bfloat16": "float16"}

HEAP, ORDINARY = "heap", "ordinary"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table.

    Attributes:
        op: the operation.
        dtype: torch's name of the element type, of operands TF32, too, or ANY_DTYPE.
        size: (bytes,) of a collective (see `size_of`), or (m, n, k) of the product that each rank computes.
        algorithm: name of an algorithm.
        seconds: the time of one call.
        place: where the tensors lie; see `place_of`.
        gather_dim: as in the call; None for operations that gather nothing.
        config: fields of `Config` or `FusedConfig` with which it took that.
        source: file that it comes from; empty for what this process has measured.
        group_size: number of ranks that took part.
        measured: whether Iris measured the time; else it is a model's.
        note: how it was measured, or where a model's times come from, as its file says.
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

    @property
    def point(self) -> tuple[Any, ...]:
        """The measured point: entries that have it equal were compared with each other."""
        return self.op, self.dtype, -1 if self.gather_dim is None else self.gather_dim, self.place, self.size

    @property
    def where(self) -> str:
        """Size, place and number of ranks, for people."""
        size = f"{self.size[0]} bytes" if len(self.size) == 1 else " x ".join(map(str, self.size))
        return f"{size}, {self.place} tensors, {self.group_size} ranks"


class Found(NamedTuple):
    """The measured point that is the nearest to a request.

    Attributes:
        entries: the fastest first; empty if no point is near enough to speak for the request.
        is_near: it says what is the fastest: sizes, place and number of ranks are those of the request, or nearly so.
    """

    entries: tuple[Entry, ...] = ()
    is_near: bool = False

    @property
    def reason(self) -> str:
        """Why its first entry is taken, for people."""
        first = self.entries[0]
        how = "measured as the fastest" if first.measured else "the fastest by the model"
        where = "" if self.is_near else f" at {first.where}"
        source = f"in {first.source}" if first.source else "here"
        return f"{how}{where} {source}" + (f" ({first.note})" if first.note else "")


@dataclass(frozen=True, slots=True)
class Table:
    """The measurements of one file, or the times of a model.

    Attributes:
        device: torch's name of the device, as `torch.cuda.get_device_name` returns it; "cpu" for the CPU.
        group_size: number of ranks that took part.
        measured: see `Entry`.
        entries: the lines.
        versions: versions of what was measured with, by name.
        source: the file.
    """

    device: str
    group_size: int
    measured: bool
    entries: tuple[Entry, ...]
    source: str
    versions: Mapping[str, str] = field(default_factory=dict)


def size_of(request: CollectiveRequest | FusedRequest) -> tuple[int, ...] | None:
    """Return the size by which a request is looked up, the same on all members.

    None where members cannot know each other's sizes: all_to_all with split sizes.
    """
    if isinstance(request, FusedRequest):
        return request.shape
    if request.options.get("uneven"):
        return None
    # of scatter a part's
    parts = request.group_size if request.op == "scatter" and request.rank == request.options.get("root") else 1
    return (max(request.nbytes // parts, _LEAST_NBYTES),)


def place_of(request: CollectiveRequest | FusedRequest) -> str:
    """Return where the tensors lie that all members have alike: "heap", "ordinary", or the one that is on the heap."""
    if isinstance(request, FusedRequest):
        on_heap = request.reach_a if request.op == "all_gather_matmul" else request.reach_out
        return HEAP if on_heap or request.op == "matmul_reduce_scatter" else ORDINARY
    has_in, has_out = request.op not in ("broadcast", "scatter"), request.op not in ("broadcast", "gather", "reduce")
    into, out = request.direct_in or not has_in, request.direct_out or not has_out
    return {(True, True): HEAP, (False, False): ORDINARY, (True, False): "input", (False, True): "output"}[into, out]


def dtypes_of(request: CollectiveRequest | FusedRequest) -> tuple[str, ...]:
    """Return the names of element types whose entries speak for a request, the best one first.

    Its own, or TF32; then the other type of 16 bits, which takes as long; then any.
    """
    own = TF32 if request.options.get("tf32") else request.dtype
    return (own, *([_SAME_SPEED[own]] if own in _SAME_SPEED else []), ANY_DTYPE)


def entry_for(request: CollectiveRequest | FusedRequest, algorithm: str, seconds: float, **more: Any) -> Entry:
    """Return the line of a request that an algorithm has served; the request has a size."""
    size = size_of(request)
    assert size is not None
    dim = request.options.get("gather_dim")
    place = place_of(request)
    return Entry(
        request.op, dtypes_of(request)[0], size, algorithm, seconds, place, dim, group_size=request.group_size, **more
    )


# -- files ------------------------------------------------------------------------------------------------------------
_Text = Annotated[str, Field(min_length=1)]
_Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
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
    config: dict[str, Annotated[int, Field(ge=0, le=1 << 20)] | str] = Field(default_factory=dict)

    @property
    def size(self) -> tuple[int, ...]:
        sizes = (self.m, self.n, self.k) if self.nbytes is None else (self.nbytes,)
        return tuple(size for size in sizes if size is not None)

    @model_validator(mode="after")
    def _has_a_size(self) -> Self:
        shape = (self.m, self.n, self.k, None if self.nbytes is None else self.gather_dim)
        if shape.count(None) != (1 if self.nbytes is None else 4):
            raise ValueError("a line has `nbytes`, or `m`, `n` and `k`")
        _check_config(FusedConfig if self.nbytes is None else Config, tuple(self.config.items()))
        return self


@functools.cache
def _check_config(kind: Callable[..., LaunchConfig], fields: tuple[tuple[str, Any], ...]) -> None:
    """Refuse what a config would not take from a caller; tables say the same again and again."""
    try:
        kind(algorithm="a name", **dict(fields))
    except TypeError as error:
        raise ValueError(str(error)) from error


class _File(BaseModel):
    """`note` says where the times of a file that was not measured come from."""

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


def file_name(device: str, group_size: int) -> str:
    """Return the name of the file of a table."""
    return f"{re.sub('[^a-z0-9]+', '-', device.lower()).strip('-')}-{group_size}.json"


def read_table(path: Path) -> Table:
    """Read one file; SettingsError if it is damaged, or of another format."""
    try:
        file = read_document(path, _FILE)
    except ValueError as error:
        raise SettingsError(
            f"{path} is not a table of measurements: {error}. Delete it, and measure again with `iris tune`"
        ) from error
    where: dict[str, Any] = {"source": str(path), "group_size": file.group_size}
    where |= {"measured": file.measured, "note": file.note}
    entries = tuple(
        Entry(row.op, row.dtype, row.size, row.algorithm, row.seconds, row.place, row.gather_dim, row.config, **where)
        for row in file.entries
    )
    return Table(file.device, file.group_size, file.measured, entries, str(path), file.versions)


def write_table(
    path: Path, device: str, group_size: int, versions: Mapping[str, str], entries: Iterable[Entry]
) -> None:
    """Write one file of measurements, in place of what it was; its folder is made.

    `versions` are those of what was measured with, by name; device and group_size are as in `Table`.
    """
    lines = []
    for entry in sorted(entries, key=lambda e: (*e.point, e.seconds)):
        row: dict[str, Any] = {"op": entry.op, "dtype": entry.dtype}
        row |= dict(zip("mnk" if len(entry.size) == 3 else ("nbytes",), entry.size, strict=True))
        row |= {} if entry.gather_dim is None else {"gather_dim": entry.gather_dim}
        row |= {} if entry.place == HEAP else {"place": entry.place}
        row |= {"algorithm": entry.algorithm, "seconds": float(f"{entry.seconds:.4g}")}
        lines.append(json.dumps(row | ({"config": dict(entry.config)} if entry.config else {})))
    of = {"format": FORMAT, "device": device, "group_size": group_size, "measured": True, "versions": dict(versions)}
    text = f'{json.dumps(of)[:-1]}, "entries": [\n' + ",\n".join(f"  {line}" for line in lines) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text)
    part.replace(path)  # a process that reads meanwhile sees the old one or the new one


def versions() -> dict[str, str]:
    """Return the versions of what measurements depend on, by name; without what is not installed."""
    found = {}
    for name in ("torch", "triton", "iris-core", "iris-allocators", "iris-triton", "iris-gluon"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def merged(old: Iterable[Entry], new: Sequence[Entry]) -> list[Entry]:
    """Return the entries of two tables: of points that were measured again, only the new ones."""
    again = {entry.point for entry in new}
    return [*(entry for entry in old if entry.point not in again), *new]


# -- looking up -------------------------------------------------------------------------------------------------------
class Tables:
    """The tables of one machine, from folders that need not exist; of two that measured the same, the first counts.

    Args:
        cache: the first folder, where new measurements are kept.
        shipped: the other ones.
        device: as in `Table`; files of others are left out.
    """

    def __init__(self, cache: Path, shipped: Iterable[Path], device: str) -> None:
        self._cache, self._device = cache, device
        self._points: dict[tuple[Any, ...], list[Entry]] = {}
        for folder in (cache, *shipped):
            try:
                paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                way = "IRIS_CACHE_DIR names another folder"
                logger.warning("tables in %s are left out: %s. %s", folder, error.strerror, way)
                continue
            for path in paths:
                try:
                    table = read_table(path)
                except SettingsError as error:  # measurements are advice: without them the model decides
                    logger.warning("a table is left out: %s", error)
                    continue
                if table.device == device:
                    self._add(table.entries)

    def _add(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._points.setdefault((entry.group_size, entry.source, *entry.point), []).append(entry)

    def add(self, entries: Sequence[Entry], *, write: bool) -> None:
        """Add what this process has measured at a point, before all files; `write` also keeps it in the cache."""
        known, self._points = self._points, {}
        self._add(entries)
        self._points = {**self._points, **{key: each for key, each in known.items() if key not in self._points}}
        if not write:
            return
        path = self._cache / file_name(self._device, entries[0].group_size)
        try:
            old = read_table(path).entries if path.exists() else ()
            write_table(path, self._device, entries[0].group_size, versions(), merged(old, entries))
        except (OSError, SettingsError) as error:
            logger.warning("what was measured is not kept: %s", error)

    def nearest(self, request: CollectiveRequest | FusedRequest) -> Found:
        """Return the measured point that is the nearest to a request: in ranks first, then place, dtype and sizes."""
        size, dtypes, place = size_of(request), dtypes_of(request), place_of(request)
        kind = request.op, request.options.get("gather_dim")
        best: tuple[tuple[Any, ...], bool, list[Entry]] | None = None
        for entries in self._points.values() if size and all(size) else ():
            first = entries[0]
            if (first.op, first.gather_dim) != kind or first.dtype not in dtypes or len(first.size) != len(size or ()):
                continue
            apart = [abs(math.log2(mine / its)) for mine, its in zip(size or (), first.size, strict=True)]
            octaves = abs(math.log2(first.group_size / request.group_size))
            if max(apart) <= FAR:
                elsewhere = octaves, first.place != place
                key = *elsewhere, max(apart) > NEAR, dtypes.index(first.dtype), math.hypot(*apart)
                if best is None or key < best[0]:
                    best = key, not any(elsewhere) and max(apart) <= CLOSE, entries
        if best is None:
            return Found()
        (*apart_from, _, _), keeps_configs, entries = best
        ordered = sorted(entries, key=lambda entry: entry.seconds)
        if not keeps_configs:
            ordered = [replace(each, config={}) for each in ordered]
        return Found(tuple(ordered), not any(apart_from))
