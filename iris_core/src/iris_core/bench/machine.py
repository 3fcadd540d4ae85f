"""The machine of a report: hardware, driver, versions, switches, date and load."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import pathlib
import platform
import re
import subprocess
from typing import Any

DISTRIBUTIONS = ("torch", "triton", "numpy", "iris-core", "iris-allocators", "iris-triton", "iris-gluon")

ALWAYS_SHOWN = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
"""Switches that change what peers can do at all: shown even where they are not set."""

SWITCHES = (
    *ALWAYS_SHOWN,
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES", "HSA_NO_SCRATCH_RECLAIM", "IRIS_ALLOCATOR", "IRIS_BACKEND", "IRIS_DEVICE_TIMEOUT",
    "IRIS_HOST__HUGE_PAGES", "IRIS_VMEM__GRANULE", "IRIS_WATCHDOG", "NCCL_ALGO", "NCCL_CUMEM_ENABLE",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO", "NCCL_WIN_ENABLE",
    "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TRITON_DEBUG", "TRITON_INTERPRET",
)  # fmt: skip
"""Variables that can change a result.  None holds a path, so a report tells nothing else about a machine."""


def describe() -> dict[str, Any]:
    """Describe this machine; call it before measuring, for the load is part of it."""
    generic = platform.processor() or platform.machine()
    return {
        "cpu": _found(r"(?m)^model name\s*: *(.*)$", "/proc/cpuinfo") or generic,
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        **_gpus(),
        "kernel": platform.release().partition("-")[0],
        "versions": versions(),
        "switches": {name: os.environ.get(name) for name in SWITCHES if name in os.environ or name in ALWAYS_SHOWN},
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str | None]:
    """Return the versions of what a result depends on, by name; None for what is not installed."""
    import torch

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found | {"cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}


def _gpus() -> dict[str, Any]:
    """Name, number and driver of the GPUs, as torch sees them; without making a context on one of them."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return {"gpu": None, "gpus": 0, "driver": None}
    query = ["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        rows = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.splitlines()
        drivers, names = zip(*(row.split(", ", 1) for row in rows), strict=True)
    except (OSError, ValueError, subprocess.SubprocessError):  # another vendor, or the tool is not there
        version = r"(\d+\.\d+(?:\.\d+)?)"
        drivers = (_found(version, "/proc/driver/nvidia/version") or _found(version, "/sys/module/amdgpu/version"),)
        names = tuple(torch.cuda.get_device_name(index) for index in range(count))
    return {"gpu": ", ".join(sorted(set(names))), "gpus": count, "driver": drivers[0]}


def _found(pattern: str, path: str) -> str | None:
    """What a pattern's group matches first in a file of the kernel; None if there is none."""
    try:
        match = re.search(pattern, pathlib.Path(path).read_text())
    except OSError:
        return None
    return match.group(1).strip() if match else None
