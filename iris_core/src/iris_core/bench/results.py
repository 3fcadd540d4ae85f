"""Results and reports, their JSON (docs/benchmarks.md describes the fields) and machine, and two reports compared."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import datetime
import io
import json
import os
import pathlib
import platform
import re
from collections.abc import Mapping  # pydantic reads the types
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import pydantic

from iris_core.documents import read_document
from iris_core.errors import BenchmarkError

_Number = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Time = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, pydantic.Field(ge=0)]

METRICS = ("time_us", "gb_per_s", "bus_gb_per_s", "tflop_per_s", "ratio", "ratio_to_best_peer", "skew_pct")
"""Fields of a result that a target may be set for."""
# Variables that can change a result; none that holds a path.
_SWITCH = re.compile(r"(CUDA|HIP|HSA|IRIS|NCCL|OMP|PYTORCH|TORCH|TRITON)_\w+=[\w.,:+-]*")


@dataclass(frozen=True)
class Target:
    """A bound for one field of a result, its metric: a lower one, or else (`at_least` is False) an upper one.

    `reached` is None where there is no such number, for example of a provider that was skipped.
    """

    metric: str
    bound: _Number
    at_least: bool
    reached: bool | None = None

    def judged(self, value: float | None) -> Target:
        """Return this target with its verdict on the number of a result."""
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

    benchmark: str
    provider: str = ""
    params: Mapping[str, str | bool | int | float | None] = field(default_factory=dict)
    num_ranks: _Count = 0
    timer: str = ""
    time_us: _Time | None = None
    min_us: _Time | None = None
    skew_pct: _Number | None = None
    local_us: tuple[_Time | None, ...] = ()
    rounds_us: tuple[_Time, ...] = ()
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
    targets: tuple[Target, ...] = ()
    error: str = ""
    skipped: str = ""


@dataclass(frozen=True)
class Report:
    """The results of a run, one for each provider at each point, and where they come from; the guide has the fields.

    `schema` grows when a field changes its meaning or goes.
    """

    name: str
    machine: dict[str, Any]
    run: dict[str, Any]
    results: tuple[Result, ...]
    schema: Literal[1] = 1

    def __post_init__(self) -> None:
        if not isinstance(self.machine.get("versions", {}), dict):
            raise ValueError("versions of the machine must be an object")

    @property
    def errors(self) -> list[Result]:
        """The results whose data was wrong."""
        return [result for result in self.results if result.error]

    def to_json(self) -> str:
        """Return the report as JSON text, with a line for each result, of the fields that have something to say."""
        about = {"schema": self.schema, "name": self.name, "machine": self.machine, "run": self.run}
        head = json.dumps(about, indent=2, allow_nan=False).removesuffix("\n}")
        fields = [dataclasses.asdict(result).items() for result in self.results]
        rows = [{name: value for name, value in items if value not in (None, "", (), {})} for items in fields]
        lines = ",\n    ".join(json.dumps(row, allow_nan=False) for row in rows)
        return f'{head},\n  "results": [\n    {lines}\n  ]\n}}\n'

    def to_csv(self) -> str:
        """Return the results as CSV text: a line for each, a column for each parameter, single number and counter."""
        rows = []
        for each in self.results:
            row = dataclasses.asdict(each)
            row["bytes_per_operation"] = row.pop("nbytes")  # `nbytes` is often an axis
            first = {"benchmark": each.benchmark, "provider": each.provider, "num_ranks": each.num_ranks, **each.params}
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
            return read_document(pathlib.Path(path), pydantic.TypeAdapter(cls))
        except ValueError as error:
            raise BenchmarkError(f"{path} is not a report of benchmarks: {error}") from error

    def write(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the report as JSON, or as CSV if the name ends in .csv, and return the file; folders are made."""
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.to_csv() if file.suffix == ".csv" else self.to_json())
        return file


# -- the machine ------------------------------------------------------------------------------------------------------
def describe() -> dict[str, Any]:
    """Describe this machine; call it before measuring, for the load is part of it."""
    import torch

    from iris_core.dispatch import tables

    names = (*tables.DISTRIBUTIONS, "numpy")
    versions = {"python": platform.python_version(), **dict.fromkeys(names), **tables.versions(names)}
    gpus = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    version = r"(\d+\.\d+(?:\.\d+)?)"
    switches = {name: value for name, value in os.environ.items() if _SWITCH.fullmatch(f"{name}={value}")}
    return {
        "cpu": _found(r"(?m)^model name\s*: *(.*)$", "/proc/cpuinfo") or platform.processor() or platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)), "load_average_1min": round(os.getloadavg()[0], 2),
        "gpu": ", ".join(sorted(gpus)) or None, "gpus": torch.cuda.device_count(),
        "driver": _found(version, "/proc/driver/nvidia/version") or _found(version, "/sys/module/amdgpu/version"),
        "kernel": platform.release().partition("-")[0],
        "versions": versions | {"cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)},
        "switches": dict(sorted(switches.items())),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _found(pattern: str, path: str) -> str | None:
    """Return the first match of a pattern's group in a file of the kernel; None if there is none."""
    with contextlib.suppress(OSError):
        if match := re.search(pattern, pathlib.Path(path).read_text()):
            return match.group(1).strip()
    return None


# -- two reports ------------------------------------------------------------------------------------------------------
REGRESSIONS = ("slower", "wrong", "gone")
VERDICTS = (*REGRESSIONS, "faster", "same", "new")


class Change(NamedTuple):
    """A provider at a point, in two reports: its new result (the old one where it is gone), and both times."""

    result: Result
    verdict: str
    old_us: float | None
    new_us: float | None


def compare(old: Report, new: Report, tolerance: float) -> list[Change]:
    """Compare what both reports have measured.

    A result counts as slower (faster) if its median is outside the tolerance and outside what its own rounds vary by:
    its fastest (slowest) round must be slower (faster) than the old median, too.  A tolerance of 0.05 is 5 %.
    """
    was, now = (
        {(r.benchmark, r.provider, str(sorted(r.params.items())), r.num_ranks): r for r in each.results if r.provider}
        for each in (old, new)
    )
    old_us = {key: was[key].time_us if key in was else None for key in now}
    changes = [Change(r, _verdict(old_us[key], r, tolerance), old_us[key], r.time_us) for key, r in now.items()]
    gone = [each for key, each in was.items() if key not in now and each.time_us is not None]
    return changes + [Change(each, "gone", each.time_us, None) for each in gone]


def _verdict(old_us: float | None, new: Result, tolerance: float) -> str:
    if new.error:
        return "wrong"
    if new.time_us is None:
        return "same" if old_us is None else "gone"
    if not old_us or not new.time_us:
        return "new"
    rounds = new.rounds_us or (new.time_us,)
    if new.time_us > old_us * (1 + tolerance) and min(rounds) > old_us:
        return "slower"
    return "faster" if old_us > new.time_us * (1 + tolerance) and max(rounds) < old_us else "same"


def differences(old: Report, new: Report) -> list[str]:
    """Return what differs between the machines and runs of two reports, so that their times may not be comparable."""
    was, now = ({**each.machine, **each.machine.get("versions", {}), **each.run} for each in (old, new))
    versions = sorted({**old.machine.get("versions", {}), **new.machine.get("versions", {})})
    names = ("cpu", "gpu", "gpus", "driver", *versions, "allocator", "backend")
    return [f"{n}: {was.get(n)} then, {now.get(n)} now" for n in names if was.get(n) != now.get(n)]
