"""Thin typed calls into the GPU drivers: the vendors' functions have the same names but for a prefix.

What differs is in the vendor's module.  Nothing here decides anything: a call either works or raises `DriverError` with
the driver's own name for the failure.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from iris_core.errors import DriverError, UnsupportedError
from iris_core.types import DeviceType


def topology_command(device: DeviceType) -> str:
    """Return the shell command that shows which devices of a kind reach each other's memory."""
    return "rocm-smi --showtopoaccess" if device is DeviceType.HIP else "nvidia-smi topo -p2p r"


def vendor(device: DeviceType) -> Any:
    """Return the module of a kind of device, with its `Ipc` and `Vmm`; UnsupportedError if there is none."""
    if device not in (DeviceType.CUDA, DeviceType.HIP):
        raise UnsupportedError(f"there is no GPU driver for device type {device.value!r}")
    return importlib.import_module(f"iris_allocators.driver.{device.value}")


class Library:
    """One vendor's library; a call of `name` returns what its function returns after the result code.

    `module` is the Python binding, whose functions begin with `prefix` and return `success` when they worked.
    """

    def __init__(self, module: Any, prefix: str, success: Any) -> None:
        self._module, self._prefix, self._success = module, prefix, success

    def __call__(self, name: str, *args: Any) -> Any:
        code, *values = getattr(self._module, self._prefix + name)(*args)
        if code != self._success:
            raise DriverError(self._prefix + name, int(code), code.name)
        return values[0] if len(values) == 1 else tuple(values)


class IpcDriver:
    """Sharing of ordinary device memory between the processes of one host."""

    _call: Library

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the allocation that `ptr` lies in."""
        base, nbytes = self._call("MemGetAddressRange", ptr)
        return int(base), int(nbytes)

    def ipc_export(self, ptr: int) -> bytes:
        """Return the handle of the whole allocation that `ptr` lies in."""
        raise NotImplementedError

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation; returns the address of its beginning."""
        raise NotImplementedError

    def ipc_close(self, base_ptr: int) -> None:
        """Undo `ipc_open`."""
        self._call("IpcCloseMemHandle", base_ptr)


class VmmDriver:
    """Virtual memory management of one device: addresses, physical memory and mappings are made one by one.

    Sizes and addresses are multiples of `granularity()`.  Physical memory goes back to the device when its last handle
    is released, its last mapping unmapped and its last descriptor closed, in all processes.
    """

    _call: Library
    _fd: Any  # the kind of handle that is a file descriptor
    _smallest: Any  # the kind of granularity that is the smallest
    _anywhere: Any  # the address that leaves the choice to the driver
    _properties: Any  # of physical memory on this device
    _access: Any  # this device's, as MemSetAccess takes it
    _device: Any  # as the functions of multicast take it
    _synchronize: str  # the function that waits for the device

    def _current(self) -> AbstractContextManager[None]:
        """Make the device the current one of this thread inside the block."""
        raise NotImplementedError

    def granularity(self) -> int:
        """Return the smallest piece of physical memory in bytes, a power of two."""
        return int(self._call("MemGetAllocationGranularity", self._properties, self._smallest))

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserve addresses; nothing is mapped there yet."""
        return int(self._call("MemAddressReserve", nbytes, alignment, self._anywhere, 0))

    def unreserve(self, ptr: int, nbytes: int) -> None:
        """Undo `reserve`; everything in the range must be unmapped."""
        self._call("MemAddressFree", ptr, nbytes)

    def create(self, nbytes: int) -> int:
        """Create physical memory that can be exported; returns its handle."""
        with self._current():
            return int(self._call("MemCreate", nbytes, self._properties, 0))

    def release(self, handle: int) -> None:
        """Release a handle that `create`, `retain` or `import_fd` returned."""
        self._call("MemRelease", handle)

    def map(self, ptr: int, nbytes: int, handle: int) -> None:
        """Map physical memory at reserved addresses; it cannot be accessed before `set_access`."""
        self._call("MemMap", ptr, nbytes, 0, handle, 0)

    def unmap(self, ptr: int, nbytes: int) -> None:
        """Undo `map`, for exactly the range that was mapped."""
        self._call("MemUnmap", ptr, nbytes)

    def set_access(self, ptr: int, nbytes: int) -> None:
        """Let this device read and write a range that is mapped without gaps."""
        self._call("MemSetAccess", ptr, nbytes, self._access, 1)

    def export_fd(self, handle: int) -> int:
        """Return a new file descriptor for physical memory; the caller closes it."""
        return int(self._call("MemExportToShareableHandle", handle, self._fd, 0))

    def import_fd(self, fd: int) -> int:
        """Return a handle of another process's physical memory; the descriptor stays the caller's."""
        with self._current():
            return int(self._call("MemImportFromShareableHandle", fd, self._fd))

    def retain(self, ptr: int) -> int:
        """Return one more reference to the handle that is mapped at `ptr`: the same number for the same memory."""
        return int(self._call("MemRetainAllocationHandle", ptr))

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the mapping, or of the allocation, that `ptr` lies in."""
        with self._current():
            base, nbytes = self._call("MemGetAddressRange", ptr)
        return int(base), int(nbytes)

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        with self._current():
            free, total = self._call("MemGetInfo")
        return int(free), int(total)

    # -- one address for the memory of several devices ----------------------------------------------------------------
    def multicast_granularity(self, num_devices: int, nbytes: int) -> int:
        """Return the smallest piece in bytes that can be bound, a power of two; UnsupportedError if there is none."""
        raise UnsupportedError("multicast is for NVIDIA's GPUs: unset IRIS_VMEM__MULTICAST")

    def create_multicast(self, num_devices: int, nbytes: int) -> int:
        """Create a multicast object, which `export_fd`, `import_fd`, `map` and `release` take like physical memory.

        Whoever binds or maps before `num_devices` have been added waits for them, without a bound.
        """
        raise NotImplementedError

    def add_device(self, multicast: int) -> None:
        """Add this device, for as long as the object exists."""
        self._call("MulticastAddDevice", multicast, self._device)

    def bind(self, multicast: int, offset: int, nbytes: int, handle: int) -> None:
        """Bind physical memory of this device, at an offset of the object."""
        self._call("MulticastBindMem", multicast, offset, handle, 0, nbytes, 0)

    def unbind(self, multicast: int, offset: int, nbytes: int) -> None:
        """Undo `bind`, for exactly the range that was bound."""
        self._call("MulticastUnbind", multicast, self._device, offset, nbytes)

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        with self._current():
            self._call(self._synchronize)


class Transaction:
    """Remembers how to undo each step; leaving the block without `commit` undoes them, the latest first.

    A step that cannot be undone does not keep the others from being undone; it is noted on the error that caused the
    rollback, or the first such error is raised.
    """

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def callback(self, function: Callable[..., object], *args: Any) -> None:
        """Remember that `function(*args)` undoes the step just taken."""
        self._steps.append(functools.partial(function, *args))

    def commit(self) -> None:
        """Keep all steps: forget how to undo them."""
        self._steps.clear()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failed: list[Exception] = []
        while self._steps:
            try:
                self._steps.pop()()
            except Exception as e:  # noqa: BLE001 - noted or raised below; the other steps come first
                failed.append(e)
                if error is not None:
                    error.add_note(f"while undoing: {e}")
        try:
            if failed and error is None:
                raise failed[0]
        finally:
            failed.clear()  # else the error's traceback would keep this frame, which keeps the error
