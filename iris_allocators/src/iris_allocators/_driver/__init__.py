"""Thin typed calls into the GPU drivers: one interface, one module per vendor (NVIDIA so far).

Nothing here decides anything: a call either works or raises `DriverError` with the driver's own name for the failure.
"""

from __future__ import annotations

from typing import Protocol

from iris_core.errors import UnsupportedError
from iris_core.types import DeviceType


class IpcDriver(Protocol):
    """Sharing of ordinary device memory between the processes of one host."""

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the allocation that `ptr` lies in."""

    def ipc_export(self, ptr: int) -> bytes:
        """Return the handle of the whole allocation that `ptr` lies in."""

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation; returns the address of its beginning."""

    def ipc_close(self, base_ptr: int) -> None:
        """Undo `ipc_open`."""


def ipc_driver(device: DeviceType) -> IpcDriver:
    """Return the driver of a kind of device.

    Raises:
        UnsupportedError: there is none for this kind.
    """
    if device is DeviceType.CUDA:
        from iris_allocators._driver.cuda import CudaDriver

        return CudaDriver()
    raise UnsupportedError(f"there is no GPU driver for device type {device.value!r}")
