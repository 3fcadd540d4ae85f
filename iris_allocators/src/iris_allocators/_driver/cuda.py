"""NVIDIA's driver, through cuda-bindings (which torch's CUDA wheels bring)."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from iris_core.errors import DriverError


def _call(function: Any, *args: Any) -> Any:
    """Call a driver function and return what it returns behind its result code."""
    code, *values = function(*args)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(function.__name__, int(code), code.name)
    return values[0] if len(values) == 1 else tuple(values)


class CudaDriver:
    """Implements `IpcDriver`; needs a current context (any torch call on the device makes one)."""

    def address_range(self, ptr: int) -> tuple[int, int]:
        """Return (base address, size in bytes) of the allocation that `ptr` lies in."""
        base, nbytes = _call(driver.cuMemGetAddressRange, ptr)
        return int(base), int(nbytes)

    def ipc_export(self, ptr: int) -> bytes:
        """Return the handle of the whole allocation that `ptr` lies in."""
        handle = _call(driver.cuIpcGetMemHandle, ptr)
        return bytes(handle.reserved)

    def ipc_open(self, handle: bytes) -> int:
        """Map another process's allocation; returns the address of its beginning."""
        wrapped = driver.CUipcMemHandle()
        wrapped.reserved = handle
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS.value
        return int(_call(driver.cuIpcOpenMemHandle, wrapped, flags))

    def ipc_close(self, base_ptr: int) -> None:
        """Undo `ipc_open`."""
        _call(driver.cuIpcCloseMemHandle, base_ptr)
