"""Measured tables: which algorithm was the fastest, by device, number of ranks, operation, element type, size or shape.

One format serves `ctx.ccl`, whose lines say up to how many bytes they speak of, and `ctx.ops`, whose lines have the
shape of a product.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from iris_core.dispatch.config import Config, FusedConfig, LaunchConfig
from iris_core.documents import read_document
from iris_core.errors import SettingsError
from iris_core.logs import logger
from iris_core.types import FusedRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from iris_core.types import CollectiveRequest

FORMAT = 1
"""Version of the files' format."""

ANY_DTYPE = "*"
TF32 = "tf32"
"""What tables call float32 where TF32 is allowed."""

MAX_SIZE = 1 << 60
"""Largest number of bytes, or of rows, that a line may speak of."""

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
class Entry:
    """One line of a table.

    Attributes:
        op: the operation.
        dtype: torch's name of the element type, of operands TF32, too, or ANY_DTYPE; see `spoken_of`.
        max_nbytes: largest collective (see `size_of`) that it speaks of; infinity if there is none.
        algorithm: name of an algorithm.
        seconds: what it took.
        source: file that it comes from.
        config: fields of `Config` or `FusedConfig` with which it took that.
        borrowed_from: ranks it was measured with, if that is another number than the request's.
        measured: whether Iris took that time, with as many ranks as its file is of; else it is a model's.
        note: what its file says of how it was measured or where a model's times come from.
        shape: (m, n, k) of the product that each rank computes; empty for a collective.
        gather_dim: as in the call; None for operations that gather nothing.
    """

    op: str
    dtype: str
    max_nbytes: float
    algorithm: str
    seconds: float
    source: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    borrowed_from: int | None = None
    measured: bool = True
    note: str = ""
    shape: tuple[int, ...] = ()
    gather_dim: int | None = None

    @property
    def reason(self) -> str:
        """Why it is taken, for people."""
        ranks = "" if self.borrowed_from is None else f" with {self.borrowed_from} ranks (none for so many)"
        how = "measured as the fastest" if self.measured else "the fastest by the model"
        return f"{how}{ranks} in {self.source}" + (f" ({self.note})" if self.note else "")

    @property
    def place(self) -> tuple[Any, ...]:
        """What it speaks of."""
        return self.op, self.dtype, -1 if self.gather_dim is None else self.gather_dim, self.shape or self.max_nbytes


@dataclass(frozen=True, slots=True)
class Table:
    """The measurements of one file, or the times of a model.

    Attributes:
        device: torch's name of the device, as `torch.cuda.get_device_name` tells it; "cpu" for the CPU.
        group_size: ranks that took part.
        measured: see `Entry`.
        entries: sorted by size, and for one size by time.
        source: the file.
    """

    device: str
    group_size: int
    measured: bool
    entries: tuple[Entry, ...]
    source: str

    def lookup(self, request: CollectiveRequest) -> list[Entry]:
        """Return the entries that speak of a request, the best one first; those of other dtypes are left out."""
        nbytes = size_of(request)
        if nbytes is None:
            return []
        covering = [e for e in self.entries if e.op == request.op and nbytes <= e.max_nbytes]
        own = [e for e in covering if e.dtype == request.dtype]
        return own or [e for e in covering if e.dtype == ANY_DTYPE]

    def points(self, request: FusedRequest) -> list[_Point]:
        """Return the places where something was measured that speaks of a request, in no order."""
        names, size = spoken_of(request), self.group_size
        kind = request.op, request.options.get("gather_dim")
        entries = [e for e in self.entries if (e.op, e.gather_dim) == kind and e.dtype in names]
        known = frozenset(entry.algorithm for entry in entries)
        by_place: dict[Any, list[Entry]] = {}
        for entry in entries if all(request.shape) else ():
            by_place.setdefault((entry.shape, entry.dtype), []).append(entry)
        octaves = abs(math.log2(size / request.group_size))
        found = []
        for (shape, dtype), there in by_place.items():
            apart = [abs(math.log2(mine / its)) for mine, its in zip(shape, request.shape, strict=True)]
            if max(apart) > FAR:
                continue
            is_here = octaves == 0 and max(apart) <= NEAR
            where = "" if max(apart) <= NEAR else f"a product of {' x '.join(map(str, shape))}"
            scale = math.prod(request.shape) / math.prod(shape)
            scaled = [
                replace(
                    entry,
                    seconds=entry.seconds * scale,
                    max_nbytes=request.nbytes,
                    borrowed_from=None if octaves == 0 else size,
                    config=entry.config if is_here else {},
                    note="; ".join(filter(None, (where, entry.note))),
                )
                for entry in sorted(there, key=lambda entry: entry.seconds)
            ]
            distance = math.hypot(M_WEIGHT * apart[0], *apart[1:]) + GROUP_WEIGHT * octaves
            found.append(_Point(distance, octaves, names.index(dtype), shape, is_here, tuple(scaled), known))
        return found


class _Point(NamedTuple):
    """What was measured with one shape."""

    distance: float  # from what is asked, in powers of two
    octaves: float  # those between the numbers of ranks
    rank_of_dtype: int  # place of the entries' element type among those that speak of the request
    shape: tuple[int, ...]
    is_here: bool  # it is near, with as many ranks
    entries: tuple[Entry, ...]  # the fastest first, as many seconds as such a product would take here in proportion
    known: frozenset[str]  # all algorithms that its table knows for such calls


def size_of(request: CollectiveRequest) -> int | None:
    """Return the bytes by which a request is looked up, the same on all members: its `nbytes`, of scatter a part's.

    None where members cannot know each other's sizes: all_to_all with split sizes.
    """
    if request.options.get("uneven"):
        return None
    if request.op == "scatter" and request.rank == request.options.get("root"):
        return request.nbytes // request.group_size
    return request.nbytes


def spoken_of(request: FusedRequest) -> tuple[str, ...]:
    """The names of element types whose entries speak of a request, the best one first.

    Its own, or TF32; then the other type of 16 bits, which takes as long; then all.
    """
    own = TF32 if request.options["tf32"] else request.dtype
    return (own, *([_SAME_SPEED[own]] if own in _SAME_SPEED else []), ANY_DTYPE)


# -- files ------------------------------------------------------------------------------------------------------------
_Text = Annotated[str, Field(min_length=1)]
_Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
_Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


class _Row(BaseModel):
    """One line of a file: `max_nbytes` (null: any), or `m`, `n`, `k` and, of what gathers, `gather_dim`."""

    model_config = ConfigDict(strict=True)

    op: _Text
    dtype: _Text
    algorithm: _Text
    seconds: Annotated[float, Field(ge=1e-9, le=1e6)]
    max_nbytes: Annotated[int, Field(ge=0, le=MAX_SIZE)] | None = None
    m: _Size | None = None
    n: _Size | None = None
    k: _Size | None = None
    gather_dim: Annotated[int, Field(strict=True, ge=0, le=1)] | None = None  # Literal[0, 1] would take False
    config: dict[str, Annotated[int, Field(ge=0, le=1 << 20)] | str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _speaks_of_something(self) -> Self:
        has_bytes = "max_nbytes" in self.model_fields_set
        if (self.m, self.n, self.k, self.gather_dim if has_bytes else None).count(None) != (4 if has_bytes else 1):
            raise ValueError("a line has `max_nbytes`, or `m`, `n` and `k`")
        _check_config(Config if has_bytes else FusedConfig, tuple(self.config.items()))
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

    format: Literal[1]
    device: _Text
    group_size: _Ranks
    measured: bool
    note: str = ""
    entries: list[_Row]

    @model_validator(mode="after")
    def _model_says_whence(self) -> Self:
        if not (self.measured or self.note):
            raise ValueError("a table that was not measured says in `note` where its times come from")
        return self


_FILE = TypeAdapter(_File)


def read_table(path: Path) -> Table:
    """Read one file; SettingsError if it is damaged, or of another format."""
    try:
        file = read_document(path, _FILE)
    except ValueError as error:
        raise SettingsError(
            f"{path} is not a table of measurements: {error}. Delete it, and measure again with `iris tune`"
        ) from error
    entries = [
        Entry(
            row.op,
            row.dtype,
            math.inf if row.max_nbytes is None else row.max_nbytes,
            row.algorithm,
            row.seconds,
            str(path),
            row.config,
            measured=file.measured,
            note=file.note,
            shape=() if row.m is None or row.n is None or row.k is None else (row.m, row.n, row.k),
            gather_dim=row.gather_dim,
        )
        for row in file.entries
    ]
    entries.sort(key=lambda entry: (entry.max_nbytes, entry.seconds))
    return Table(file.device, file.group_size, file.measured, tuple(entries), str(path))


def write_table(
    path: Path, device: str, group_size: int, versions: Mapping[str, str], entries: Iterable[Entry]
) -> None:
    """Write one file of measurements, in place of what it was; its folder is made.

    `versions` are those of what was measured with, by name; device and group_size are as in `Table`.
    """
    lines = []
    for entry in sorted(entries, key=lambda e: (*e.place[:2], bool(e.shape), e.place[3], e.place[2], e.seconds)):
        row: dict[str, Any] = {"op": entry.op, "dtype": entry.dtype}
        if entry.shape:
            row |= dict(zip("mnk", entry.shape, strict=True))
            row |= {} if entry.gather_dim is None else {"gather_dim": entry.gather_dim}
        else:
            row["max_nbytes"] = None if math.isinf(entry.max_nbytes) else int(entry.max_nbytes)
        row |= {"algorithm": entry.algorithm, "seconds": float(f"{entry.seconds:.4g}")}
        lines.append(json.dumps(row | ({"config": dict(entry.config)} if entry.config else {})))
    of = {"format": FORMAT, "device": device, "group_size": group_size, "measured": True, "versions": dict(versions)}
    text = f'{json.dumps(of)[:-1]}, "entries": [\n' + ",\n".join(f"  {line}" for line in lines) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)  # whoever reads meanwhile sees the old one or the new one


# -- looking up -------------------------------------------------------------------------------------------------------
class Tables:
    """The tables of one machine, from folders that need not exist: what comes first counts first."""

    def __init__(self, folders: Iterable[Path], device: str) -> None:
        self._by_size: dict[int, list[Table]] = {}
        for folder in folders:
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
                    self._by_size.setdefault(table.group_size, []).append(table)

    def lookup(self, request: CollectiveRequest | FusedRequest) -> list[Entry]:
        """Return what the tables say of a request, the most trusted entry of collectives, the fastest of others first.

        Of products the nearest point counts; what its table does not know at all comes from the next ones, see
        `joined`, as far as their products are about as long: what a launch, a copy or a meeting costs is much of a
        short one and little of a long one.
        """
        if not isinstance(request, FusedRequest):
            return entries_for(request, self._by_size)
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


def entries_for(request: CollectiveRequest, by_size: Mapping[int, Sequence[Table]]) -> list[Entry]:
    """Return what tables say of a collective, the most trusted entry first.

    Where nothing was measured with so many ranks, the nearest number speaks for them, without its configs: the order of
    the algorithms changes little from one number to the next, and any measurement is better than a model.  An algorithm
    that was not measured there at all comes from the next number, see `joined`.
    """
    size = request.group_size
    found: list[Entry] = []
    known: set[str] = set()
    for near in sorted(by_size, key=lambda each: (each != size, abs(math.log2(each / size)), -each)):
        entries = [entry for table in by_size[near] for entry in table.lookup(request)]
        if entries and near == size:
            return entries
        found = joined(found, [replace(each, config={}, borrowed_from=near) for each in entries], known)
        known |= {each.algorithm for table in by_size[near] for each in table.entries if each.op == request.op}
    return found


def joined(found: list[Entry], more: Sequence[Entry], known: Collection[str], doubt: float = 1.0) -> list[Entry]:
    """Add algorithms that were measured elsewhere only, so that they do not lose for not having been measured here.

    Times of two places compare only in relation to an algorithm that both have; where these disagree, the one counts
    by which the new ones take longest.

    Args:
        found: what is known already.
        more: measured elsewhere.
        known: algorithms that need nothing from there: where they are not found they were too slow.
        doubt: how much longer the new ones are said to take.

    Returns:
        The entries, the fastest first; without those of `more` that compare with nothing.
    """
    if not found:
        return list(more)
    here, there = ({each.algorithm: each for each in reversed(entries)} for entries in (found, more))
    both = here.keys() & there.keys()
    if not both:
        return found
    unit = max(here[name].seconds / there[name].seconds for name in both) * doubt
    new = [
        replace(each, seconds=each.seconds * unit)
        for name, each in there.items()
        if name not in known and name not in here
    ]
    return sorted([*found, *new], key=lambda each: each.seconds) if new else found
