"""Writes the table of measured figures into README.md, from benchmarks/results: `python docs/figures.py`.

Nothing is typed by hand: each row names a file, a benchmark, a provider and parameters; its number is taken from there.
"""

from __future__ import annotations

import json
import pathlib
import re
import sys
from dataclasses import dataclass, field
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(?<=<!-- figures: docs/figures.py writes them -->\n).*?(?=\n<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Figure:
    """One row.

    Attributes:
        what: in words.
        file: under benchmarks/results, without ".json".
        benchmark, provider, params: which result of it.
        shown: how its number is written; a format string over the result's fields.
        beside: the same for the provider that it is compared with in that run, its best peer or `baseline`; may be
            empty.
    """

    what: str
    file: str
    benchmark: str
    provider: str
    shown: str
    beside: str = ""
    params: dict[str, Any] = field(default_factory=dict)


def collective(op: str, nbytes: int, size: str) -> Figure:
    """A row for a collective."""
    beside = "{provider}: {time_us:.1f} us"
    what = f"`ctx.ccl.{op}`, bf16, {size}"
    return Figure(what, "ccl-2", f"ccl.{op}", "iris", "{time_us:.1f} us", beside, {"nbytes": nbytes})


def fused(op: str) -> Figure:
    """A row for a fused operation."""
    params = {"weight": "14336x4096", "m": 8192}
    what = f"`ctx.ops.{op}`, bf16, 8192 rows, weight of 14336 x 4096"
    return Figure(what, "fused-2", f"fused.{op}", "iris", "{time_us:.0f} us", "{provider}: {time_us:.0f} us", params)


FIGURES = (
    Figure(
        "a kernel's stores to a peer, 256 MiB", "rma-4xtorch", "rma.pair", "push", "{gb_per_s:.0f} GB/s",
        "copy engine: {gb_per_s:.0f} GB/s", {"nbytes": 1 << 28},
    ),
    Figure(
        "a kernel's stores to a peer, 64 KiB", "rma-4xtorch", "rma.pair", "push", "{gb_per_s:.1f} GB/s",
        "copy engine: {gb_per_s:.1f} GB/s", {"nbytes": 1 << 16},
    ),
    Figure(
        "signal to a peer's waiting kernel, one way", "rma-4xtorch", "rma.latency", "signal", "{time_us:.2f} us",
        params={"sem": "relaxed"},
    ),
    Figure(
        "the same, handing data over (release)", "rma-4xtorch", "rma.latency", "signal", "{time_us:.2f} us",
        params={"sem": "release"},
    ),
    Figure(
        "`ctx.device_barrier()` in a CUDA graph (release)", "rma-4xtorch", "rma.barrier", "barrier", "{time_us:.2f} us",
        params={"sem": "release"},
    ),
    Figure(
        "GEMM core in Gluon, bf16, 8192 x 8192 x 8192", "gluon_gemm-1", "gluon_gemm.gemm", "gluon",
        "{tflop_per_s:.0f} TFLOP/s", "cuBLAS: {tflop_per_s:.0f} TFLOP/s",
        {"shape": "(8192, 8192, 8192)", "timer": "events"},
    ),
    Figure(
        "the same, 2000 x 3000 x 1000", "gluon_gemm-1", "gluon_gemm.gemm", "gluon",
        "{tflop_per_s:.0f} TFLOP/s", "cuBLAS: {tflop_per_s:.0f} TFLOP/s",
        {"shape": "(2000, 3000, 1000)", "timer": "graph"},
    ),
    Figure(
        "GEMM + all-scatter in one kernel, bf16, 8192 x 8192 x 8192", "gluon_gemm-4", "gluon_gemm.all_scatter",
        "gluon fused", "{time_us:.0f} us", "torch.matmul, then NCCL's all-gather: {time_us:.0f} us",
    ),
    collective("all_reduce", 1 << 12, "4 KiB"),
    collective("all_reduce", 1 << 20, "1 MiB"),
    collective("all_reduce", 1 << 26, "64 MiB"),
    collective("all_reduce", 1 << 30, "1 GiB"),
    collective("all_gather", 1 << 20, "1 MiB"),
    collective("all_gather", 1 << 28, "256 MiB"),
    collective("reduce_scatter", 1 << 20, "1 MiB"),
    collective("reduce_scatter", 1 << 28, "256 MiB"),
    collective("all_to_all", 1 << 20, "1 MiB"),
    collective("all_to_all", 1 << 28, "256 MiB"),
    fused("all_gather_matmul"),
    fused("matmul_reduce_scatter"),
    fused("matmul_all_reduce"),
)  # fmt: skip


def results(file: str) -> dict[str, Any]:
    """One file of results."""
    loaded: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    return loaded


def find(figure: Figure, provider: str) -> dict[str, Any]:
    """The one result of a provider that a row means; only what was verified counts."""
    found = [
        each
        for each in results(figure.file)["results"]
        if (each["benchmark"], each.get("provider")) == (figure.benchmark, provider)
        and all(each["params"].get(name) == value for name, value in figure.params.items())
    ]
    if len(found) != 1 or not found[0]["verified"]:
        raise LookupError(f"{figure.file}.json has {len(found)} results for {figure.what!r} by {provider!r}")
    return found[0]


def table() -> str:
    """The rows, and below them where and when they were measured."""
    lines = ["| | measured | beside it, in the same run | GPUs | results |", "|---|---|---|---|---|"]
    hosts: dict[str, set[str]] = {}
    for figure in FIGURES:
        own = find(figure, figure.provider)
        other = own.get("best_peer") or own.get("baseline")
        beside = figure.beside.format(**find(figure, other)) if figure.beside else ""
        file = f"[{figure.file}](benchmarks/results/{figure.file}.json)"
        lines.append(f"| {figure.what} | {figure.shown.format(**own)} | {beside} | {own['num_ranks']} | {file} |")
        machine = results(figure.file)["machine"]
        versions = machine["versions"]
        host = (
            f"{machine['gpu']}, driver {machine['driver']}, CUDA {versions['cuda']}, torch {versions['torch']}, "
            f"Triton {versions['triton']}"
        )
        hosts.setdefault(host, set()).add(machine["date"][:10])
    where = "; ".join(f"{host}; {', '.join(sorted(dates))}" for host, dates in hosts.items())
    return "\n".join(lines) + f"\n\n{where}. Every result was verified in the configuration that was timed."


def written(readme: str) -> str:
    """A README with the table as it should be."""
    return BLOCK.sub(lambda _: table(), readme)


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(written(path.read_text()))
    sys.exit(0)
