"""Measured tables: which algorithm was the fastest, by device, group size, operation, dtype and size."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Protocol, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from iris_core.ccl.config import Config
from iris_core.documents import read_document
from iris_core.errors import SettingsError
from iris_core.logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
    from pathlib import Path

    from iris_core.ops.config import FusedConfig
    from iris_core.types import CollectiveRequest

FORMAT = 1
"""Version of the files' format."""

ANY_DTYPE = "*"

MAX_SIZE = 1 << 60
"""Largest number of bytes, or of rows, that a line may speak of."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a table.

    Attributes:
        op: the operation.
        dtype: torch's name of the element type, or ANY_DTYPE.
        max_nbytes: largest request (see `size_of`) that it speaks of; infinity if there is none.
        algorithm: name of an algorithm.
        seconds: what it took.
        source: file that it comes from.
        config: fields of `Config` with which it took that.
        borrowed_from: ranks it was measured with, if that is another number than the request's.
        measured: whether Iris took that time, with as many ranks as its file is of; else it is a model's.
        note: what its file says of how it was measured or where a model's times come from.
    """

    op: str
    dtype: str
    max_nbytes: float
    algorithm: str
    seconds: float
    source: str
    config: Mapping[str, Any] = field(default_factory=dict)
    borrowed_from: int | None = None
    measured: bool = True
    note: str = ""

    @property
    def reason(self) -> str:
        """Why it is taken, for people."""
        ranks = "" if self.borrowed_from is None else f" with {self.borrowed_from} ranks (none for so many)"
        how = "measured as the fastest" if self.measured else "the fastest by the model"
        return f"{how}{ranks} in {self.source}" + (f" ({self.note})" if self.note else "")


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


def size_of(request: CollectiveRequest) -> int | None:
    """Return the bytes by which a request is looked up, the same on all members: its `nbytes`, of scatter a part's.

    None where members cannot know each other's sizes: all_to_all with split sizes.
    """
    if request.options.get("uneven"):
        return None
    if request.op == "scatter" and request.rank == request.options.get("root"):
        return request.nbytes // request.group_size
    return request.nbytes


Fields = dict[str, Annotated[int, Field(ge=0, le=1 << 20)] | str]
"""Fields of a config, in a file."""


class Row(BaseModel):
    """One line of a file, as far as files of all kinds agree."""

    model_config = ConfigDict(strict=True)

    op: Annotated[str, Field(min_length=1)]
    dtype: Annotated[str, Field(min_length=1)]
    algorithm: Annotated[str, Field(min_length=1)]
    seconds: Annotated[float, Field(ge=1e-9, le=1e6)]


def checked_by(kind: type[Config] | type[FusedConfig]) -> AfterValidator:
    """Return a check of configs, which refuses what `kind` would not take from a caller."""

    def check(fields: dict[str, Any]) -> dict[str, Any]:
        try:
            kind(algorithm="a name", **fields)
        except (TypeError, ValueError) as error:
            raise ValueError(str(error)) from error
        return fields

    return AfterValidator(check)


class _CollectiveRow(Row):
    max_nbytes: Annotated[int, Field(ge=0, le=MAX_SIZE)] | None
    config: Annotated[Fields, checked_by(Config)] = Field(default_factory=dict)


R = TypeVar("R", bound=Row)


class File(BaseModel, Generic[R]):
    """A file with lines of one kind; `note` says where the times of one that was not measured come from."""

    model_config = ConfigDict(strict=True)

    format: Literal[1]
    device: Annotated[str, Field(min_length=1)]
    group_size: Annotated[int, Field(ge=1, le=1 << 20)]
    measured: bool
    note: str = ""
    entries: list[R]

    @model_validator(mode="after")
    def _model_says_whence(self) -> Self:
        if not (self.measured or self.note):
            raise ValueError("a table that was not measured says in `note` where its times come from")
        return self


_FILE = TypeAdapter(File[_CollectiveRow])


def read_file(path: Path, kind: TypeAdapter[File[R]], what: str) -> File[R]:
    """Read one file of any kind.

    Raises:
        SettingsError: it is damaged, or of another format.
    """
    try:
        return read_document(path, kind)
    except ValueError as error:
        raise SettingsError(
            f"{path} is not a table of {what}: {error}. Delete it, and measure again with `iris tune`"
        ) from error


def read_table(path: Path) -> Table:
    """Read one file.

    Raises:
        SettingsError: it is damaged, or of another format.
    """
    file, entries = read_file(path, _FILE, "collectives"), []
    for row in file.entries:
        nbytes = math.inf if row.max_nbytes is None else row.max_nbytes
        fields = dict(row) | {"max_nbytes": nbytes, "measured": file.measured, "note": file.note}
        entries.append(Entry(**fields, source=str(path)))
    entries.sort(key=lambda entry: (entry.max_nbytes, entry.seconds))
    return Table(file.device, file.group_size, file.measured, tuple(entries), str(path))


def write_table(
    path: Path, device: str, group_size: int, versions: Mapping[str, str], entries: Iterable[Entry]
) -> None:
    """Write one file of measurements, in place of what it was; its folder is made.

    Args:
        path: the file.
        device: as in `Table`.
        group_size: as in `Table`.
        versions: of what was measured with, by name.
        entries: in any order.
    """
    ordered = sorted(entries, key=lambda e: (e.op, e.dtype, e.max_nbytes, e.seconds))
    rows = []
    for entry in ordered:
        row: dict[str, Any] = {
            "op": entry.op,
            "dtype": entry.dtype,
            "max_nbytes": None if math.isinf(entry.max_nbytes) else int(entry.max_nbytes),
            "algorithm": entry.algorithm,
            "seconds": float(f"{entry.seconds:.4g}"),
        }
        rows.append(row | ({"config": dict(entry.config)} if entry.config else {}))
    write_rows(path, device, group_size, versions, rows)


def write_rows(
    path: Path, device: str, group_size: int, versions: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write the file of a table of any kind; see `write_table`."""
    lines = [json.dumps(row) for row in rows]
    of = {"format": FORMAT, "device": device, "group_size": group_size, "measured": True, "versions": dict(versions)}
    head = json.dumps(of)
    text = f'{head[:-1]}, "entries": [\n' + ",\n".join(f"  {line}" for line in lines) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)  # whoever reads meanwhile sees the old one or the new one


class OfDevice(Protocol):
    """A table of any kind."""

    @property
    def device(self) -> str:
        """Name of the device."""

    @property
    def group_size(self) -> int:
        """Ranks that took part."""

    @property
    def measured(self) -> bool:
        """Whether its times were measured, with so many ranks."""


T = TypeVar("T", bound=OfDevice)


def read_folders(folders: Iterable[Path], device: str, read: Callable[[Path], T]) -> dict[int, list[T]]:
    """Read the tables of a device, of any kind.

    Args:
        folders: where the files lie; what comes first counts first.  A folder need not exist.
        device: name of the device; tables of others are left out.
        read: reads one file, or raises SettingsError; then there is a warning, and the file is left out.

    Returns:
        The tables by group size.
    """
    by_size: dict[int, list[T]] = {}
    for folder in folders:
        try:
            paths = sorted(path for path in folder.iterdir() if path.suffix == ".json")
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            logger.warning("tables in %s are left out: %s. IRIS_CACHE_DIR names another folder", folder, error.strerror)
            continue
        for path in paths:
            try:
                table = read(path)
            except SettingsError as error:  # measurements are advice: without them the model decides
                logger.warning("a table is left out: %s", error)
                continue
            if table.device == device:
                by_size.setdefault(table.group_size, []).append(table)
    return by_size


def entries_for(request: CollectiveRequest, by_size: Mapping[int, Sequence[Table]]) -> list[Entry]:
    """Return what tables say of a request, the most trusted entry first.

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


def joined(
    found: list[Entry],
    more: Sequence[Entry],
    known: Collection[str],
    doubt: float = 1.0,
) -> list[Entry]:
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


class Tables:
    """The tables of one machine.

    Args:
        folders: where the files lie; what comes first counts first.  A folder need not exist.
        device: name of this rank's device; tables of others are left out.
    """

    def __init__(self, folders: Iterable[Path], device: str) -> None:
        self._by_size = read_folders(folders, device, read_table)

    def lookup(self, request: CollectiveRequest) -> list[Entry]:
        """Return what the tables say of a request, the most trusted entry first."""
        return entries_for(request, self._by_size)
