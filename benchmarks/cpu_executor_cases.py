"""What benchmarks/cpu_executor.py measures, in a process of its own: with the executor or with the stock interpreter.

    python cpu_executor_cases.py executor|stock

Reads the name of a case per line and answers with a line of JSON: seconds of one call, and whether its result is right
(null where there is none).
Triton decides when it is imported whether kernels are interpreted, so the two cannot live in one process.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Case = tuple[Callable[[], object], Callable[[], bool] | None]

SIZE, TILE = 512, (128, 128, 64)
PROGRAMS, BLOCK, CALLS = 64, 1024, 100
BUDGET_S = 0.3
"""One answer is the median over as many calls as fit into this, 3 at least."""


def make_cases() -> dict[str, Case]:
    """For each case a call, and a check of what it left; None where it leaves nothing."""
    import cpu_executor_kernels as kernels
    import torch

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(PROGRAMS * BLOCK, generator=generator) for _ in range(2))
    out, sums = torch.zeros(PROGRAMS * BLOCK), torch.zeros(1)
    a, b = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    c = torch.zeros(SIZE, SIZE)
    one, many = BLOCK - 24, PROGRAMS * BLOCK - 24
    m, n, k = TILE

    def gemm(a: torch.Tensor, b: torch.Tensor) -> None:
        strides = (SIZE, 1, SIZE, 1, SIZE, 1)
        kernels.gemm[(SIZE // m, SIZE // n)](a, b, c, SIZE, SIZE, SIZE, *strides, BM=m, BN=n, BK=k)

    def atomics() -> None:
        sums.zero_()
        kernels.atomics[(1,)](sums)

    def close(actual: torch.Tensor, expected: torch.Tensor, error: float = 1e-3) -> bool:
        return torch.allclose(actual, expected, atol=error, rtol=error)

    a16, b16 = a.bfloat16(), b.bfloat16()
    return {
        "empty": (lambda: kernels.empty[(1,)](out), None),
        "add, 1 program": (
            lambda: kernels.add[(1,)](x, y, out, one, B=BLOCK),
            lambda: torch.equal(out[:one], (x + y)[:one]),
        ),
        "add, 64 programs": (
            lambda: kernels.add[(PROGRAMS,)](x, y, out, many, B=BLOCK),
            lambda: torch.equal(out[:many], (x + y)[:many]),
        ),
        "softmax, 64 rows": (
            lambda: kernels.softmax[(PROGRAMS,)](x, out, BLOCK, B=BLOCK),
            lambda: close(out.view(PROGRAMS, BLOCK), x.view(PROGRAMS, BLOCK).softmax(1), 1e-5),
        ),
        "100 device functions": (lambda: kernels.calls[(1,)](x), None),
        "100 atomics": (atomics, lambda: sums.item() == CALLS),
        "dot 128x128x32": (
            lambda: kernels.dot[(1,)](x, y, out, M=128, N=128, K=32),
            lambda: close(out[: 128 * 128].view(128, 128), x[:4096].view(128, 32) @ y[:4096].view(32, 128)),
        ),
        "gemm 512 float32": (lambda: gemm(a, b), lambda: close(c, a @ b)),
        "gemm 512 bfloat16": (lambda: gemm(a16, b16), lambda: close(c, a16.float() @ b16.float())),
    }


def median_s(call: Callable[[], object]) -> float:
    """Median time of one call in seconds."""
    call()
    times: list[float] = []
    end = time.perf_counter() + BUDGET_S
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def serve(executor: bool) -> None:
    """Answer until standard input ends."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # both processes on the same core; they work in turn
    import torch

    torch.set_num_threads(1)
    if executor:
        from iris_triton import interpreter

        interpreter.enable()
    cases = make_cases()
    for line in sys.stdin:
        call, check = cases[line.strip()]
        print(json.dumps({"seconds": median_s(call), "right": check() if check else None}), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1] == "executor")
