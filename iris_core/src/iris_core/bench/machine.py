"""The machine of a report: hardware, driver, versions, switches, date and load."""

from __future__ import annotations

import contextlib
import datetime
import os
import pathlib
import platform
import re
from typing import Any

ALWAYS_SHOWN = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST")
"""Switches that change what peers can do at all: shown even where they are not set."""

_SWITCH = re.compile(r"(CUDA|HIP|HSA|IRIS|NCCL|OMP|PYTORCH|TORCH|TRITON)_\w+=[\w.,:+-]*")
"""Variables that can change a result; none that holds a path."""


def describe() -> dict[str, Any]:
    """Describe this machine; call it before measuring, for the load is part of it."""
    import torch

    from iris_core.dispatch import tables

    names = (*tables.DISTRIBUTIONS, "numpy")
    versions = {"python": platform.python_version(), **dict.fromkeys(names), **tables.versions(names)}
    gpus = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    version = r"(\d+\.\d+(?:\.\d+)?)"
    switches = {name: value for name, value in os.environ.items() if _SWITCH.fullmatch(f"{name}={value}")}
    return {
        "cpu": _found(r"(?m)^model name\s*: *(.*)$", "/proc/cpuinfo") or platform.processor() or platform.machine(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "load_average_1min": round(os.getloadavg()[0], 2),
        "gpu": ", ".join(sorted(gpus)) or None,
        "gpus": torch.cuda.device_count(),
        "driver": _found(version, "/proc/driver/nvidia/version") or _found(version, "/sys/module/amdgpu/version"),
        "kernel": platform.release().partition("-")[0],
        "versions": versions | {"cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)},
        "switches": dict.fromkeys(ALWAYS_SHOWN) | dict(sorted(switches.items())),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _found(pattern: str, path: str) -> str | None:
    """Return the first match of a pattern's group in a file of the kernel; None if there is none."""
    with contextlib.suppress(OSError):
        if match := re.search(pattern, pathlib.Path(path).read_text()):
            return match.group(1).strip()
    return None
