"""Makes a measured table for ctx.ops (docs/ops.md) of results of benchmarks/fused.py.

    python benchmarks/fused_table.py RESULTS.json TABLE.json

Of every shape, all named algorithms that were verified in CUDA graphs become rows, so that the next best one is known
where the fastest cannot serve a call.
"""

from __future__ import annotations

import pathlib
import sys
from typing import TYPE_CHECKING

from iris_core.bench import Report
from iris_core.ops.tables import Measured, write_fused_table

if TYPE_CHECKING:
    from iris_core.bench import Result

PREFIX, UNFUSED = "iris ", "cublas+iris"


def row(result: Result) -> Measured | None:
    """Return the row of one result; None if it is none of a named algorithm, or was not verified."""
    name = "unfused" if result.provider == UNFUSED else result.provider.removeprefix(PREFIX)
    if name == result.provider or name.endswith(" eager") or not result.verified or result.time_us is None:
        return None
    op = result.benchmark.rpartition(".")[2]
    n, k = map(int, str(result.params["weight"]).split("x"))
    m, size = int(result.params["m"]), result.num_ranks
    gathers = op == "all_gather_matmul"
    return Measured(
        op=op,
        dtype="bfloat16",
        shape=(m, n // size, k) if gathers else (m, k, n // size),
        gather_dim=0 if gathers else None,
        algorithm=name,
        seconds=result.time_us * 1e-6,
        config={},
    )


def main(source: str, target: str) -> int:
    """Read results, write the table, and say how many rows it has."""
    report = Report.from_json(pathlib.Path(source).read_text())
    rows = [made for result in report.results if (made := row(result)) is not None]
    sizes = {result.num_ranks for result in report.results}
    if not rows or len(sizes) != 1:
        print(f"{source} has {len(rows)} results that make a row, of {sorted(sizes)} ranks", file=sys.stderr)
        return 1
    device = str(report.machine.get("gpu") or "cpu")
    known = report.machine.get("versions", {})
    versions = {name: str(known[name]) for name in ("torch", "triton", "iris-triton", "iris-gluon") if known.get(name)}
    write_fused_table(pathlib.Path(target), device, sizes.pop(), versions, rows)
    print(f"{target}: {len(rows)} rows for {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
