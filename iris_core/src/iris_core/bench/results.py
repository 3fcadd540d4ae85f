"""Results and reports, and their JSON; docs/benchmarks.md describes the fields."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import pathlib
from collections.abc import Mapping  # noqa: TC003 - pydantic looks at it
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import pydantic

from iris_core.documents import read_document
from iris_core.errors import BenchmarkError

_STRICT = pydantic.ConfigDict(strict=True)
_Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Time = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, pydantic.Field(ge=0)]
_LIST = pydantic.Field(strict=False)  # JSON has no tuples

SCHEMA = 1
"""Version of the JSON; grows when a field changes its meaning or goes."""

METRICS = ("time_us", "gb_per_s", "bus_gb_per_s", "tflop_per_s", "ratio", "ratio_to_best_peer", "skew_pct")
"""Fields of a result that a target may be set for."""


@dataclass(frozen=True)
class Target:
    """A bound for one field of a result, its metric: a lower one, or else (`at_least` is False) an upper one.

    `reached` is None where there is no such number, for example of a provider that was skipped.
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT

    metric: str
    bound: _Number
    at_least: bool
    reached: bool | None = None

    @classmethod
    def make(cls, metric: str, *, at_least: float | None = None, at_most: float | None = None) -> Target:
        """Make a target out of exactly one of two bounds, for one of METRICS; a `BenchmarkError` otherwise."""
        if metric not in METRICS:
            raise BenchmarkError(f"no metric is called {metric!r}; there are: {', '.join(METRICS)}")
        bound = at_least if at_most is None else at_most
        if bound is None or (at_least is not None and at_most is not None):
            raise BenchmarkError(f"target for {metric}: give either at_least or at_most")
        return cls(metric, float(bound), at_most is None)

    def judged(self, result: Result) -> Target:
        """Return this target with its verdict on a result."""
        value = getattr(result, self.metric)
        reached = None if value is None else value >= self.bound if self.at_least else value <= self.bound
        return dataclasses.replace(self, reached=reached)

    def __str__(self) -> str:
        verdict = {None: "not measured", True: "reached", False: "MISSED"}[self.reached]
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.bound:g}: {verdict}"


@dataclass(frozen=True)
class Result:
    """Times of one provider at one point; see "What the JSON says" in the guide for the fields.

    Times are per operation, of the slowest rank.  A result with `error` or `skipped` has no numbers; `provider` is
    empty where the whole point was skipped, and `num_ranks` is 0 for a benchmark without ranks.
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT

    benchmark: str
    provider: str
    params: Mapping[str, str | bool | int | float | None]
    num_ranks: _Count
    timer: str = ""
    time_us: _Time | None = None
    min_us: _Time | None = None
    skew_pct: _Number | None = None
    local_us: Annotated[tuple[_Time | None, ...], _LIST] = ()
    rounds_us: Annotated[tuple[_Time, ...], _LIST] = ()
    calls: _Count = 0
    verified: bool = False
    nbytes: _Count | None = None
    gb_per_s: _Number | None = None
    bus_gb_per_s: _Number | None = None
    flops: _Number | None = None
    tflop_per_s: _Number | None = None
    baseline: str = ""
    ratio: _Number | None = None
    best_peer: str = ""
    ratio_to_best_peer: _Number | None = None
    counters: Mapping[str, _Number] = field(default_factory=dict)
    targets: Annotated[tuple[Target, ...], _LIST] = ()
    error: str = ""
    skipped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return what JSON shows: the fields that have something to say, so no empty texts and missing numbers."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, "", (), {})}


@dataclass(frozen=True)
class Report:
    """The results of a run and where they come from.

    Attributes:
        name: of the file or of the set of benchmarks.
        machine: hardware, driver, versions, switches, date and load; see `iris_core.bench.machine`.
        run: how it was run: ranks, plugins, rounds, clocks.
        results: one for each provider at each point.
    """

    name: str
    machine: Mapping[str, Any]
    run: Mapping[str, Any]
    results: tuple[Result, ...]

    @property
    def errors(self) -> list[Result]:
        """The results whose data was wrong."""
        return [result for result in self.results if result.error]

    @property
    def missed(self) -> list[Result]:
        """The results that missed a target."""
        return [result for result in self.results if any(each.reached is False for each in result.targets)]

    def to_json(self) -> str:
        """Return the report as JSON text, with a line for each result."""
        about = {"schema": SCHEMA, "name": self.name, "machine": dict(self.machine), "run": dict(self.run)}
        head = json.dumps(about, indent=2, allow_nan=False).removesuffix("\n}")
        rows = ",\n    ".join(json.dumps(result.to_json(), allow_nan=False) for result in self.results)
        return f'{head},\n  "results": [\n    {rows}\n  ]\n}}\n'

    def to_csv(self) -> str:
        """Return the results as CSV text: a line for each, a column for each parameter, single number and counter."""
        rows = []
        for each in self.results:
            row = dataclasses.asdict(each)
            row["bytes_per_operation"] = row.pop("nbytes")  # `nbytes` is often an axis
            first = {**{name: row[name] for name in ("benchmark", "provider", "num_ranks")}, **each.params}
            single = {name: value for name, value in row.items() if not isinstance(value, dict | list | tuple)}
            rows.append({**first, **single, **first, **each.counters})
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Report:
        """Read a file that `write` has written as JSON; a `BenchmarkError` if it is damaged, or of another schema."""
        try:
            found = read_document(pathlib.Path(path), _DOCUMENT)
        except ValueError as error:
            raise BenchmarkError(f"{path} is not a report of benchmarks: {error}") from error
        return cls(found.name, found.machine, found.run, found.results)

    def write(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the report as JSON, or as CSV if the name ends in .csv, and return the file; folders are made."""
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.to_csv() if file.suffix == ".csv" else self.to_json())
        return file


def _row(content: Any) -> Any:
    """What `to_json` leaves out where it is empty, and fields without a default need."""
    return {"provider": "", "params": {}, **content} if isinstance(content, dict) else content


def _check_machine(machine: dict[str, Any]) -> dict[str, Any]:
    if not (isinstance(machine.get("versions", {}), dict) and isinstance(machine.get("date", ""), str)):
        raise ValueError("versions must be an object, and date text")
    return machine


class _Document(pydantic.BaseModel):
    """The JSON of a report."""

    model_config = _STRICT

    schema_: Literal[1] = pydantic.Field(alias="schema")
    name: str
    machine: Annotated[dict[str, Any], pydantic.AfterValidator(_check_machine)]
    run: dict[str, Any]
    results: tuple[Annotated[Result, pydantic.BeforeValidator(_row)], ...]


_DOCUMENT = pydantic.TypeAdapter(_Document)
