"""Results and reports, and their JSON."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import pathlib
from collections.abc import Mapping  # noqa: TC003 - pydantic looks at it
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import pydantic

from iris_core.documents import read_document
from iris_core.errors import BenchmarkError

if TYPE_CHECKING:
    from collections.abc import Iterable

_STRICT = pydantic.ConfigDict(strict=True)
_Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Time = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, pydantic.Field(ge=0)]
_LIST = pydantic.Field(strict=False)  # JSON has no tuples

SCHEMA = 1
"""Version of the JSON; grows when a field changes its meaning or goes."""

METRICS = ("time_us", "gb_per_s", "bus_gb_per_s", "tflop_per_s", "ratio", "ratio_to_best_peer", "skew_pct")
"""Fields of a result that a target may be set for."""


_COLUMNS = (
    "timer", "time_us", "min_us", "skew_pct", "nbytes", "gb_per_s", "bus_gb_per_s", "tflop_per_s", "baseline", "ratio",
    "best_peer", "ratio_to_best_peer", "verified", "error", "skipped",
)  # fmt: skip
"""Fields of a result in CSV."""


@dataclass(frozen=True)
class Target:
    """What a result should reach.

    Attributes:
        metric: field of the result.
        bound: the number.
        at_least: whether the bound is a lower one.
        reached: whether it was reached; None where there is no such number (a provider that was skipped, say).
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT

    metric: str
    bound: _Number
    at_least: bool
    reached: bool | None = None

    @classmethod
    def make(cls, metric: str, *, at_least: float | None = None, at_most: float | None = None) -> Target:
        """Make a target out of one of two bounds.

        Raises:
            BenchmarkError: there is no such metric, or the bounds are none or two.
        """
        if metric not in METRICS:
            raise BenchmarkError(f"no metric is called {metric!r}; there are: {', '.join(METRICS)}")
        if at_least is not None and at_most is None:
            return cls(metric, float(at_least), True)
        if at_most is not None and at_least is None:
            return cls(metric, float(at_most), False)
        raise BenchmarkError(f"target for {metric}: give either at_least or at_most")

    def judged(self, result: Result) -> Target:
        """Return this target with its verdict on a result."""
        value = getattr(result, self.metric)
        if value is None:
            return dataclasses.replace(self, reached=None)
        return dataclasses.replace(self, reached=value >= self.bound if self.at_least else value <= self.bound)

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.at_least else '<='} {self.bound:g}"


@dataclass(frozen=True)
class Result:
    """What was measured for one provider at one point.

    Times are per operation.  A result with `error` or `skipped` has no numbers.

    Attributes:
        benchmark: name of the benchmark.
        provider: name of the provider; empty where the whole point was skipped.
        params: values of the axes.
        num_ranks: number of ranks; 0 for a benchmark without ranks.
        timer: "cpu", "events", "graph" or "reported".
        time_us: median over rounds of the slowest rank's time in microseconds.
        min_us: the fastest rank's median.
        skew_pct: how much less than the slowest rank's median that is, in percent; None where one rank took part.
        local_us: every rank's median; None for a rank that took no part.
        rounds_us: the slowest rank's time in every round.
        calls: calls that were timed together in a round.
        verified: whether a check of the data passed, before and after timing.
        nbytes: bytes that one operation moves, per rank.
        gb_per_s: nbytes by time_us, in 10^9 bytes per second.
        bus_gb_per_s: the same, of the bytes that must leave a rank; see `State.set_bytes`.
        flops: floating-point operations of one operation, per rank.
        tflop_per_s: flops by time_us, in 10^12 per second.
        baseline: the provider that `ratio` is in relation to.
        ratio: the baseline's time by this one's, median over rounds: 1.1 is 10 % faster.
        best_peer: the fastest of the other providers that were declared as peers.
        ratio_to_best_peer: its time by this one's, median over rounds.
        counters: further numbers by name.
        targets: what should be reached, and whether it was.
        error: what was wrong with the data.
        skipped: why there is no measurement.
    """

    __pydantic_config__: ClassVar[pydantic.ConfigDict] = _STRICT

    benchmark: str
    provider: str
    params: Mapping[str, Any]
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
        """Return the report as JSON text."""
        about = {"schema": SCHEMA, "name": self.name, "machine": dict(self.machine), "run": dict(self.run)}
        head = json.dumps(about, indent=2, allow_nan=False).removesuffix("\n}")
        rows = [json.dumps(result.to_json(), allow_nan=False) for result in self.results]
        listed = ",\n    ".join(rows)  # a line for each, so that a difference between two runs can be read
        return f'{head},\n  "results": [\n    {listed}\n  ]\n}}\n'

    def to_csv(self) -> str:
        """Return the results as CSV text: a line for each, a column for each parameter, number and counter."""
        params, counters = (
            list(dict.fromkeys(key for result in self.results for key in getattr(result, name)))
            for name in ("params", "counters")
        )
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        numbers = [
            "bytes_per_operation" if name == "nbytes" else name for name in _COLUMNS
        ]  # `nbytes` is often an axis
        writer.writerow(["benchmark", "provider", "num_ranks", *params, *numbers, *counters])
        for each in self.results:
            row = [each.benchmark, each.provider, each.num_ranks, *(each.params.get(key, "") for key in params)]
            row += ["" if (value := getattr(each, name)) is None else value for name in _COLUMNS]
            writer.writerow([*row, *(each.counters.get(key, "") for key in counters)])
        return text.getvalue()

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Report:
        """Read a file that `write` has written as JSON.

        Raises:
            BenchmarkError: it cannot be read, or is no report, or one of another schema.
        """
        try:
            return read_document(pathlib.Path(path), _DOCUMENT).report()
        except ValueError as error:
            raise BenchmarkError(f"{path} is not a report of benchmarks: {error}") from error

    def write(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the report as JSON, or as CSV if the name ends in .csv; folders are made as needed.

        Returns:
            The file.
        """
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.to_csv() if file.suffix == ".csv" else self.to_json())
        return file


def _row(content: Any) -> Any:
    """What `to_json` leaves out where it is empty, and fields without a default need."""
    return {"provider": "", "params": {}, **content} if isinstance(content, dict) else content


def _check_params(result: Result) -> Result:
    if not all(value is None or isinstance(value, str | int | float) for value in result.params.values()):
        raise ValueError("params must be numbers and text")
    return result


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
    results: tuple[Annotated[Result, pydantic.BeforeValidator(_row), pydantic.AfterValidator(_check_params)], ...]

    def report(self) -> Report:
        return Report(self.name, self.machine, self.run, self.results)


_DOCUMENT = pydantic.TypeAdapter(_Document)


def timed_again(results: Iterable[Result]) -> dict[str, str]:
    """Return providers that are others timed in another way, "iris eager" beside "iris", with the name of the other."""
    timers = {each.provider: each.timer for each in results}
    again = {}
    for name, timer in timers.items():
        firsts = [other for other in timers if name.startswith(f"{other} ") and timers[other] != timer]
        if firsts:
            again[name] = max(firsts, key=len)
    return again
