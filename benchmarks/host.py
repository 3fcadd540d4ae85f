"""What the host side costs: importing, opening a world of CPU ranks, allocating and freeing.

    python benchmarks/host.py [--ranks 4] [--only REGEX]

Claims: `import iris_core` takes at most 150 ms and does not import torch; allocate + free takes at most 30 us; opening
a world of 4 CPU ranks costs little beyond importing torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import host_jobs

from iris_core import bench

if TYPE_CHECKING:
    from collections.abc import Callable

    from iris_core import Iris
    from iris_core.bench import State

IMPORT_TARGET_US, ALLOCATE_TARGET_US = 150e3, 30
IMPORT = """
import sys, time
start = time.perf_counter()
import {module}
print(time.perf_counter() - start, "torch" in sys.modules)
"""


@bench.register(ranks=False)
def imports(state: State, ctx: None) -> None:
    """Imports, each in a fresh interpreter."""
    with_torch: dict[str, bool] = {}

    def importing(module: str) -> Callable[[], float]:
        def seconds() -> float:
            command = [sys.executable, "-c", IMPORT.format(module=module)]
            took, torch_too = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            with_torch[module] = torch_too == "True"
            return float(took)

        return seconds

    state.set_timer("reported")
    state.set_warmup(0)
    for module in ("iris_core", "iris_core.registry"):
        state.provider(module, importing(module), check=lambda m=module: not with_torch[m], baseline="torch")
    state.provider("torch", importing("torch"), check=lambda: with_torch["torch"])
    state.target("iris_core", "time_us", at_most=IMPORT_TARGET_US)


@bench.register(ranks=False)
@bench.axis("operation", ["allocate + free", "allocate + drop", "empty + free", "zeros + free"])
def allocation(state: State, ctx: None) -> None:
    """4 KiB on a heap with 1000 blocks and 1000 holes, in a world of one."""
    import torch

    from iris_core import Iris

    one = state.resources.enter_context(Iris(heap_size="1GiB", device="cpu"))
    heap = one.heap
    blocks = [heap.allocate(1000, torch.float32) for _ in range(2000)]
    for block in blocks[::2]:  # a heap in use has holes
        heap.free(block)
    del blocks[::2]

    def is_as_before() -> bool:
        one.barrier()
        return heap.stats().num_blocks == len(blocks)

    on_heap, plain = {
        "allocate + free": (lambda: heap.free(heap.allocate(1024, torch.float32)), lambda: torch.empty(1024)),
        "allocate + drop": (lambda: heap.allocate(1024, torch.float32), lambda: torch.empty(1024)),
        "empty + free": (lambda: one.free(one.empty(1024)), lambda: torch.empty(1024)),
        "zeros + free": (lambda: one.free(one.zeros(1024)), lambda: torch.zeros(1024)),
    }[state["operation"]]
    state.set_rounds(15)
    state.provider("iris", on_heap, check=is_as_before, baseline="torch")
    state.provider("torch", plain, check=None)
    if state["operation"] == "allocate + free":
        state.target("iris", "time_us", at_most=ALLOCATE_TARGET_US)


@bench.register(ranks=False)
@bench.axis("ranks", lambda options: [options.num_ranks])
def world(state: State, ctx: None) -> None:
    """From starting ranks to their end: with a context on CPU ranks, and importing torch only."""
    import iris_core

    opened: list[list[dict[str, float]]] = []

    def plain() -> float:
        start = time.perf_counter()
        iris_core.run(host_jobs.import_torch, state["ranks"])
        return time.perf_counter() - start

    def with_context() -> float:
        start = time.perf_counter()
        opened.append(iris_core.run(host_jobs.open_and_close, state["ranks"]))
        return time.perf_counter() - start

    def slowest_ms(part: str) -> float:
        return statistics.median(max(rank[part] for rank in ranks) for ranks in opened) * 1e3

    state.set_timer("reported")
    state.set_warmup(0)
    state.set_rounds(3)
    state.provider("open and close", with_context, check=None, baseline="import torch")
    state.provider("import torch", plain, check=None)
    state.add_counter("slowest open ms", lambda: slowest_ms("open"))
    state.add_counter("slowest close ms", lambda: slowest_ms("close"))


@bench.register
@bench.axis("allocations", [0, 20])
def agreement(state: State, ctx: Iris) -> None:
    """The heap's part of a barrier, after a number of allocate + free."""
    import torch

    before = ctx.stats().num_blocks

    def churn_and_agree() -> None:
        for _ in range(state["allocations"]):
            ctx.heap.free(ctx.heap.allocate(1024, torch.float32))
        ctx.heap.barrier_agreement()

    state.provider("iris", churn_and_agree, check=lambda: ctx.stats().num_blocks == before)


SUITE = bench.Suite(about=__doc__, source=__file__, device="cpu", min_ranks=4, results="results/host.json")

if __name__ == "__main__":
    sys.exit(SUITE.main())
