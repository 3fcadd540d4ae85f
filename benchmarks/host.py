"""What the host side costs: importing, opening a world of CPU ranks, allocating and freeing.

    python benchmarks/host.py [--ranks 4]

Claims: `import iris_core` takes at most 150 ms and does not import torch; allocate + free takes at most 30 us; opening
a world of 4 CPU ranks costs little beyond importing torch.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

from common import per_call_us, write

IMPORT = """
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, "torch" in sys.modules)
"""


def import_ms(module: str, repeats: int) -> tuple[float, bool]:
    """Median time of importing a module in a fresh interpreter, in milliseconds, and whether that imports torch."""
    times, with_torch = [], False
    for _ in range(repeats):
        out = subprocess.run(
            [sys.executable, "-c", IMPORT.format(module=module)], capture_output=True, text=True, check=True
        ).stdout.split()
        times.append(float(out[0]) * 1e3)
        with_torch |= out[1] == "True"
    return statistics.median(times), with_torch


def imports() -> list[dict[str, Any]]:
    """Time the imports."""
    package, with_torch = import_ms("iris_core", 9)
    if with_torch:
        raise SystemExit("import iris_core imports torch")
    return [
        {"name": "import iris_core (no torch)", "value": package, "unit": "ms", "target": 150},
        {
            "name": "import iris_core.registry (plugin listing)",
            "value": import_ms("iris_core.registry", 5)[0],
            "unit": "ms",
        },
        {"name": "import torch, for comparison", "value": import_ms("torch", 5)[0], "unit": "ms"},
    ]


def allocation() -> list[dict[str, Any]]:
    """Time allocation on the host allocator in a world of one."""
    import torch

    from iris_core import Iris

    with Iris(heap_size="1GiB", device="cpu") as ctx:
        heap = ctx.heap
        keep = [heap.allocate(1000, torch.float32) for _ in range(2000)]
        for t in keep[::2]:  # a heap in use has holes
            heap.free(t)
        rows = [
            (
                "allocate + free, 4 KiB, heap with 1000 blocks and 1000 holes",
                lambda: heap.free(heap.allocate(1024, torch.float32)),
                30,
            ),
            ("allocate + drop (garbage collected), 4 KiB", lambda: heap.allocate(1024, torch.float32), None),
            ("ctx.empty(1024) + free", lambda: ctx.free(ctx.empty(1024)), None),
            ("ctx.zeros(1024) + free", lambda: ctx.free(ctx.zeros(1024)), None),
            ("torch.empty(1024), for comparison", lambda: torch.empty(1024), None),
        ]
        out = []
        for name, function, target in rows:
            row = {"name": name, "value": per_call_us(function), "unit": "us"}
            out.append(row if target is None else {**row, "target": target})
        return out


def import_torch() -> float:
    """Run on a rank: import torch, which every program on tensors pays for."""
    start = time.perf_counter()
    import torch  # noqa: F401

    return time.perf_counter() - start


def open_and_close() -> dict[str, float]:
    """Run on a rank: open a context and close it, in seconds."""
    import torch  # noqa: F401 - paid for before the clock starts

    from iris_core import Iris

    start = time.perf_counter()
    ctx = Iris(heap_size="1GiB", device="cpu")
    opened = time.perf_counter()
    ctx.close()
    return {"open": opened - start, "close": time.perf_counter() - opened}


def agreement() -> dict[str, float]:
    """Run on a rank: the heap's part of a barrier, in microseconds."""
    import torch

    from iris_core import Iris

    with Iris(heap_size="1GiB", device="cpu") as ctx:

        def churn() -> None:
            for _ in range(20):
                ctx.heap.free(ctx.heap.allocate(1024, torch.float32))
            ctx.heap.barrier_agreement()

        return {
            "barrier": per_call_us(ctx.heap.barrier_agreement, calls=100, rounds=5),
            "churn": per_call_us(churn, calls=20, rounds=5),
        }


def world(num_ranks: int) -> list[dict[str, Any]]:
    """Time opening a world of CPU ranks, against ranks that only import torch."""
    import iris_core

    def wall(function: Any) -> tuple[float, list[Any]]:
        start = time.perf_counter()
        results = iris_core.run(function, num_ranks)
        return time.perf_counter() - start, results

    plain, with_context, opens, closes = [], [], [], []
    for _ in range(3):
        plain.append(wall(import_torch)[0] * 1e3)
        seconds, ranks = wall(open_and_close)
        with_context.append(seconds * 1e3)
        opens.append(max(rank["open"] for rank in ranks) * 1e3)
        closes.append(max(rank["close"] for rank in ranks) * 1e3)
    ranks = iris_core.run(agreement, num_ranks)
    figures = [
        ("start, import torch, end", statistics.median(plain), "ms"),
        ("start, import torch, Iris(), close(), end", statistics.median(with_context), "ms"),
        ("Iris(), slowest rank", statistics.median(opens), "ms"),
        ("close(), slowest rank", statistics.median(closes), "ms"),
        ("heap agreement at a barrier", max(rank["barrier"] for rank in ranks), "us"),
        ("20 x allocate + free, then an agreement", max(rank["churn"] for rank in ranks), "us"),
    ]
    return [{"name": f"{num_ranks} ranks: {name}", "value": value, "unit": unit} for name, value, unit in figures]


def main() -> None:
    """Run everything and write results/host.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of the world that is opened")
    arguments = parser.parse_args()
    print(write("host", [*imports(), *allocation(), *world(arguments.ranks)]))


if __name__ == "__main__":
    main()
