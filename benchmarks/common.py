"""What all benchmarks share: timing, a description of the machine, and results as JSON."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

RESULTS = pathlib.Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """Describe hardware and versions, so that a number can be judged later."""
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as f:
            cpu = next((line.split(":", 1)[1].strip() for line in f if line.startswith("model name")), cpu)
    except OSError:
        pass  # not Linux: the generic name has to do
    versions = {"python": platform.python_version()}
    for name in ("torch", "triton", "iris-core", "iris-allocators", "iris-triton"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "cpu": cpu,
        **gpus(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "versions": versions,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def gpus() -> dict[str, Any]:
    """Name and number of the GPUs, and the driver's version; empty where there are none."""
    import torch

    if not torch.cuda.is_available():
        return {}
    import subprocess

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(), "driver": driver}


def per_call_us(function: Callable[[], object], calls: int = 2000, rounds: int = 15) -> float:
    """Median over rounds of the time of one call, in microseconds."""
    for _ in range(calls // 10):
        function()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times) * 1e6


def write(name: str, results: list[dict[str, Any]]) -> pathlib.Path:
    """Print the results as a table and write them, with the machine, to results/<name>.json.

    Args:
        name: of the benchmark.
        results: one dictionary per figure: `name`, `value`, `unit`, and `target` (an upper bound) where there is one.
    """
    for row in results:
        verdict = "" if "target" not in row else f"  target {row['target']:g}: "
        if verdict:
            row["met"] = row["value"] <= row["target"]
            verdict += "met" if row["met"] else "MISSED"
        print(f"{row['name']:<58} {row['value']:>10.2f} {row['unit']}{verdict}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"benchmark": name, "machine": machine(), "results": results}, indent=2) + "\n")
    return path
