"""Thin typed calls into the GPU drivers: one interface, one module per vendor.

Nothing here decides anything: a call either works or raises `DriverError` with the driver's own name for the failure.
"""

from __future__ import annotations

from typing import Protocol

from iris_core.errors import UnsupportedError
from iris_core.types import DeviceTarget, DeviceType


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


class VmmDriver(Protocol):
    """Virtual memory management of one device: addresses, physical memory and mappings are made one by one.

    Sizes and addresses are multiples of `granularity()`.  Physical memory goes back to the device when its last handle
    is released, its last mapping unmapped and its last descriptor closed, in all processes.
    """

    def granularity(self) -> int:
        """Return the smallest piece of physical memory in bytes, a power of two."""

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserve addresses; nothing is mapped there yet."""

    def unreserve(self, ptr: int, nbytes: int) -> None:
        """Undo `reserve`; everything in the range must be unmapped."""

    def create(self, nbytes: int) -> int:
        """Create physical memory that can be exported; returns its handle."""

    def release(self, handle: int) -> None:
        """Let go of a handle that `create`, `retain` or `import_fd` returned."""

    def map(self, ptr: int, nbytes: int, handle: int) -> None:
        """Map physical memory at reserved addresses; it cannot be accessed before `set_access`."""

    def unmap(self, ptr: int, nbytes: int) -> None:
        """Undo `map`, for exactly the range that was mapped."""

    def set_access(self, ptr: int, nbytes: int) -> None:
        """Let this device read and write a range that is mapped without gaps."""

    def export_fd(self, handle: int) -> int:
        """Return a new file descriptor for physical memory; the caller closes it."""

    def import_fd(self, fd: int) -> int:
        """Return a handle of another process's physical memory; the descriptor stays the caller's."""

    def retain(self, ptr: int) -> int:
        """Return one more reference to the handle that is mapped at `ptr`: the same number for the same memory."""

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the mapping, or of the allocation, that `ptr` lies in."""

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""

    def synchronize(self) -> None:
        """Wait until the device has finished everything."""


def ipc_driver(device: DeviceType) -> IpcDriver:
    """Return the driver of a kind of device.

    Raises:
        UnsupportedError: there is none for this kind.
    """
    if device is DeviceType.CUDA:
        from iris_allocators.driver.cuda import CudaDriver

        return CudaDriver()
    if device is DeviceType.HIP:
        from iris_allocators.driver.hip import HipDriver

        return HipDriver()
    raise UnsupportedError(f"there is no GPU driver for device type {device.value!r}")


def topology_command(device: DeviceType) -> str:
    """Return the shell command that shows which devices of a kind reach each other's memory."""
    return "rocm-smi --showtopoaccess" if device is DeviceType.HIP else "nvidia-smi topo -p2p r"


def vmm_driver(target: DeviceTarget) -> VmmDriver:
    """Return the virtual memory management of a device.

    Raises:
        UnsupportedError: this device or its driver has none.
        DriverError: the driver does not start.
    """
    if target.type is DeviceType.CUDA:
        from iris_allocators.driver.cuda import CudaVmm

        return CudaVmm(target.index)
    if target.type is DeviceType.HIP:
        from iris_allocators.driver.hip import HipVmm

        return HipVmm(target.index)
    raise UnsupportedError(f"there is no GPU driver for device type {target.type.value!r}")
