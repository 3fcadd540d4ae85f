"""Thin typed calls into the GPU drivers: one interface, one module per vendor.

Nothing here decides anything: a call either works or raises `DriverError` with the driver's own name for the failure.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from iris_allocators.driver.calls import IpcDriver as IpcDriver  # noqa: TC001 - callers take both from here
from iris_allocators.driver.calls import VmmDriver as VmmDriver  # noqa: TC001
from iris_core.errors import UnsupportedError
from iris_core.types import DeviceTarget, DeviceType


def ipc_driver(device: DeviceType) -> IpcDriver:
    """Return the driver of a kind of device; UnsupportedError if there is none."""
    return cast("IpcDriver", _vendor(device).Ipc())


def topology_command(device: DeviceType) -> str:
    """Return the shell command that shows which devices of a kind reach each other's memory."""
    return "rocm-smi --showtopoaccess" if device is DeviceType.HIP else "nvidia-smi topo -p2p r"


def vmm_driver(target: DeviceTarget) -> VmmDriver:
    """Return the virtual memory management of a device.

    Raises:
        UnsupportedError: this device or its driver has none.
        DriverError: the driver does not start.
    """
    return cast("VmmDriver", _vendor(target.type).Vmm(target.index))


def _vendor(device: DeviceType) -> Any:
    if device not in (DeviceType.CUDA, DeviceType.HIP):
        raise UnsupportedError(f"there is no GPU driver for device type {device.value!r}")
    return importlib.import_module(f"iris_allocators.driver.{device.value}")
