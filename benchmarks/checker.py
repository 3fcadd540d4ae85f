"""What the checker costs: time of programs of 2 CPU ranks with it beside without, and memory of its tables.

    python benchmarks/checker.py [--rounds 10] [--repeats 3] [--json results/checker.json]

The bounds: at most 30 times the time of the same program unchecked; at most 8 bytes of tables for each byte that the
program has touched of its heaps, beside 1 MiB: the tables grow with the number of signals, too.  Times are those that
a rank's process spends on the processor, which other programs on the machine disturb least.  Each rank takes the
fastest round of all repeats, each of which starts its ranks anew; the slower rank counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import iris_core
from iris_core import Iris
from iris_core.bench.results import describe

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = pathlib.Path(__file__).parent
MOST_TIME, MOST_MEMORY, FIXED = 30.0, 8.0, 1 << 20


@triton.jit
def heat_step(old, new, halo_up, halo_down, context, rank: tl.constexpr, WORLD: tl.constexpr, ROWS, N: tl.constexpr):
    from_above = rank > 0
    from_below = rank < WORLD - 1
    row, i = tl.program_id(0), tl.arange(0, N)
    here = tl.load(old + row * N + i)
    left = tl.load(old + row * N + i - 1, mask=i > 0, other=0)
    right = tl.load(old + row * N + i + 1, mask=i < N - 1, other=0)
    up, down = here * 0, here * 0
    if row > 0:
        up = tl.load(old + (row - 1) * N + i)
    elif from_above:
        up = tl.load(halo_up + i)
    if row < ROWS - 1:
        down = tl.load(old + (row + 1) * N + i)
    elif from_below:
        down = tl.load(halo_down + i)
    tl.store(new + row * N + i, 0.2 * (here + left + right + up + down))


def demo(name: str) -> Callable[[Iris], Any]:
    """A program of `iris demo`, with its tensors and its comparison."""

    def run(ctx: Iris) -> Any:
        offered = {each.name: each for each in ctx.backend.demos()}  # type: ignore[attr-defined]
        with ctx.scope():
            assert offered[name].run(ctx).ok

    return run


def heat(ctx: Iris, rows: int = 32, columns: int = 512, steps: int = 4) -> None:
    """Steps of the heat equation on rows that the ranks share, with halos by put and device barriers."""
    with ctx.scope():
        grids = [ctx.zeros(rows, columns), ctx.zeros(rows, columns)]
        halos = ctx.zeros(2, columns)
        grids[0][rows // 2].fill_(1)
        rank, world = ctx.cur_rank, ctx.num_ranks
        ctx.barrier()
        for step in range(steps):
            old, new = grids[step % 2], grids[1 - step % 2]
            if rank > 0:
                ctx.put(halos[1], rank - 1, source=old[0])
            if rank < world - 1:
                ctx.put(halos[0], rank + 1, source=old[-1])
            ctx.device_barrier()
            heat_step[(rows,)](old, new, halos[0], halos[1], ctx.get_device_context(), rank, world, rows, columns)
            ctx.device_barrier(sem="relaxed")
        ctx.barrier()


PROGRAMS: dict[str, Callable[[Iris], Any]] = {
    "gemm-all-scatter": demo("gemm-all-scatter"),
    "message-passing": demo("message-passing"),
    "heat": heat,
}


def memory_of(name: str) -> int:
    """Bytes of the memory files of this process with a name, as far as they are touched."""
    files: dict[int, int] = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if name in os.readlink(f"/proc/self/fd/{fd}"):
                found = os.stat(f"/proc/self/fd/{fd}")
                files[found.st_ino] = found.st_blocks * 512
    return sum(files.values())


def on_rank(name: str, check: str, rounds: int) -> tuple[float, int, int]:
    """Processor seconds of the fastest round; bytes of the checker's tables, and those touched of this rank's heap."""
    with Iris("64MiB", device="cpu", check=check) as ctx:
        seconds = []
        for _ in range(rounds + 1):
            ctx.barrier()
            start = time.process_time()
            PROGRAMS[name](ctx)
            seconds.append(time.process_time() - start)
        ctx.barrier()
        return min(seconds[1:]), memory_of("iris-checker"), memory_of(f"iris-heap-{ctx.cur_rank}")


def measure(name: str, rounds: int, repeats: int) -> dict[str, Any]:
    """One row of the result."""
    row: dict[str, Any] = {"program": name, "ranks": 2, "rounds": rounds, "repeats": repeats}
    for key, check in (("off_ms", ""), ("races_ms", "races"), ("all_ms", "races,uninitialised,bounds")):
        runs = [iris_core.run(on_rank, 2, name, check, rounds) for _ in range(repeats)]
        ranks = runs[-1]
        row[key] = round(1e3 * max(min(each[0] for each in rank) for rank in zip(*runs, strict=True)), 2)
        if check == "races":
            row["tables_bytes"], row["heaps_bytes"] = ranks[0][1], sum(each[2] for each in ranks)
    row["times"] = round(row["races_ms"] / row["off_ms"], 2)
    row["times_all"] = round(row["all_ms"] / row["off_ms"], 2)
    row["bytes_per_byte"] = round(row["tables_bytes"] / row["heaps_bytes"], 2)
    fits = row["tables_bytes"] - FIXED <= MOST_MEMORY * row["heaps_bytes"]
    row["ok"] = fits and max(row["times"], row["times_all"]) <= MOST_TIME
    return row


def main() -> int:
    """Measure everything, print a line each, write the JSON; 1 if a bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=pathlib.Path, default=HERE / "results" / "checker.json")
    args = parser.parse_args()
    rows = [measure(name, args.rounds, args.repeats) for name in PROGRAMS]
    for row in rows:
        print(row)
    args.json.write_text(json.dumps({"suite": "checker", "machine": describe(), "rows": rows}, indent=1) + "\n")
    return int(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
