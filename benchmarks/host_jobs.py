"""What benchmarks/host.py runs on ranks that it starts itself; importable by name there."""

from __future__ import annotations

import time


def import_torch() -> float:
    """Import torch, which every program on tensors pays for; returns seconds."""
    start = time.perf_counter()
    import torch  # noqa: F401

    return time.perf_counter() - start


def open_and_close() -> dict[str, float]:
    """Open a context and close it; returns the seconds of both."""
    import torch  # noqa: F401 - paid for before the clock starts

    from iris_core import Iris

    start = time.perf_counter()
    ctx = Iris(heap_size="1GiB", device="cpu")
    opened = time.perf_counter()
    ctx.close()
    return {"open": opened - start, "close": time.perf_counter() - opened}
