"""The CPU executor against Triton's stock interpreter, in the same run, on one core, with bounds checks on.

    python benchmarks/cpu_executor.py [--rounds 5]

Claims: launches and programs of 1024 elements are at least 1.5 times as fast, calls of device functions at least 20
times; a 512^3 GEMM takes 0.25 s or less.

Each round starts one process with the executor and one with the stock interpreter (TRITON_INTERPRET=1), pinned to the
same core.  A figure is the median over rounds of each process's median; a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE, TILE = 512, (128, 128, 64)

# name, unit, least ratio to the stock interpreter, upper bound of the executor's own time
CASES: dict[str, tuple[str, float | None, float | None]] = {
    "launch of an empty kernel": ("us", 1.5, None),
    "launch, 1 program of 1024 elements (masked add)": ("us", 1.5, None),
    "launch, 64 programs of 1024 elements (masked add)": ("us", 1.5, None),
    "softmax, 64 rows of 1024": ("us", 1.5, None),
    "100 calls of a device function": ("us", 20, None),
    "100 scalar atomics": ("us", None, None),
    "tl.dot 128x128x32 float32, with loads and store": ("us", None, None),
    f"GEMM {SIZE}^3 float32, tiles {'x'.join(map(str, TILE))}": ("ms", None, 250),
    f"GEMM {SIZE}^3 bfloat16, tiles {'x'.join(map(str, TILE))}": ("ms", None, None),
}


def median_s(function: Callable[[], object], budget_s: float = 0.5) -> float:
    """Median time of one call, over as many calls as fit into the budget (at least 3)."""
    function()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(executor: bool) -> dict[str, float]:
    """Run in a process of its own: time every case, in seconds."""
    import cpu_executor_kernels as kernels
    import torch

    torch.set_num_threads(1)
    if executor:
        from iris_triton import cpu

        cpu.enable()
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64 * 1024, generator=generator) for _ in range(2))
    out = torch.zeros(64 * 1024)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    c = torch.zeros(SIZE, SIZE)
    m, n, k = TILE

    def gemm(a: torch.Tensor, b: torch.Tensor) -> None:
        strides = (SIZE, 1, SIZE, 1, SIZE, 1)
        kernels.gemm[(SIZE // m, SIZE // n)](a, b, c, SIZE, SIZE, SIZE, *strides, BM=m, BN=n, BK=k)

    functions: list[Callable[[], object] | None] = [
        lambda: kernels.empty[(1,)](out),
        lambda: kernels.add[(1,)](x, y, out, 1000, B=1024),
        lambda: kernels.add[(64,)](x, y, out, 64 * 1024 - 24, B=1024),
        lambda: kernels.softmax[(64,)](x, out, 1024, B=1024),
        lambda: kernels.calls[(1,)](out),
        lambda: kernels.atomics[(1,)](out),
        lambda: kernels.dot[(1,)](x, y, out, M=128, N=128, K=32),
        lambda: gemm(a, b),
        (lambda: gemm(a.bfloat16(), b.bfloat16())) if executor else None,  # the stock interpreter's result is wrong
    ]
    results = {name: median_s(f) for name, f in zip(CASES, functions, strict=True) if f is not None}
    gemm(a, b)
    torch.testing.assert_close(c, a @ b, atol=1e-3, rtol=1e-3)
    return results


def run_process(executor: bool) -> dict[str, float]:
    """Measure in a fresh process."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)
    if not executor:
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, __file__, "--worker", "executor" if executor else "stock"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> list[dict[str, Any]]:
    """Combine the rounds into the figures to be reported."""
    out: list[dict[str, Any]] = []
    for name, (unit, least, bound) in CASES.items():
        scale = {"us": 1e6, "ms": 1e3}[unit]
        row: dict[str, Any] = {
            "name": name,
            "value": statistics.median(ours[name] for ours, _ in rounds) * scale,
            "unit": unit,
        }
        if bound is not None:
            row["target"] = bound
        if all(name in stock for _, stock in rounds):
            row["stock"] = statistics.median(stock[name] for _, stock in rounds) * scale
            row["ratio"] = statistics.median(stock[name] / ours[name] for ours, stock in rounds)
            if least is not None:
                row["ratio_at_least"] = least
                row["ratio_met"] = row["ratio"] >= least
        out.append(row)
    return out


def main() -> None:
    """Run everything and write results/cpu_executor.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of processes")
    parser.add_argument("--worker", choices=["executor", "stock"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        print(json.dumps(measure(arguments.worker == "executor")))
        return
    from common import write

    results = rows([(run_process(True), run_process(False)) for _ in range(arguments.rounds)])
    print(write("cpu_executor", results))
    for row in results:
        if "ratio" in row:
            wanted = f", wanted {row['ratio_at_least']:g}" if "ratio_at_least" in row else ""
            print(f"{row['name']:<58} {row['ratio']:>10.1f} x the stock interpreter{wanted}")
    if not all(row.get("ratio_met", True) and row.get("met", True) for row in results):
        raise SystemExit("a target was missed")


if __name__ == "__main__":
    main()
