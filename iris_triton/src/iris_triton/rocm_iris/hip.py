"""`iris.hip` of AMD's Iris: queries about devices of any vendor; memory of the driver's is not offered.

Queries answer for NVIDIA and, where that makes sense, for the CPU as well; a `device_id` is a GPU's number, None means
the current one, and a GPU that is not there is a DeviceError.  Calls for memory and handles raise UnsupportedError,
which says what to use: allocators are the only place that talks to drivers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from iris_core.errors import DeviceError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable

_UNITS_PER_DIE = {"gfx942": 38, "gfx950": 32}
"""Compute units in use on each accelerator die, from AMD's documents (CDNA 3 and CDNA 4 architecture)."""

_WALL_CLOCK_KHZ = {True: 100_000, False: 1_000_000}
"""Rate of `iris_triton.language.asm.read_realtime`: on AMD (True), and on NVIDIA and the CPU."""

_HANDLE_NBYTES = 64
"""Of an IPC handle, by CUDA's and by HIP's headers."""


# -- queries ----------------------------------------------------------------------------------------------------------
def count_devices() -> int:
    """Return how many GPUs this process sees; 0 on a machine without."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def set_device(gpu_id: int) -> None:
    """Make a GPU the current one."""
    torch.cuda.set_device(_existing(gpu_id))


def get_device_id() -> int:
    """Return the current GPU's index; 0 on the CPU."""
    return torch.cuda.current_device() if count_devices() else 0


def get_cu_count(device_id: int | None = None) -> int:
    """Return the number of multiprocessors (compute units); on the CPU, of cores that this process may use."""
    if _is_cpu(device_id):
        return len(os.sched_getaffinity(0))
    return int(_properties(device_id).multi_processor_count)


def get_arch_string(device_id: int | None = None) -> str:
    """Return the architecture: "gfx942" on AMD, "sm_90" on NVIDIA, "cpu" without a GPU."""
    if _is_cpu(device_id):
        return "cpu"
    properties = _properties(device_id)
    name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return name if _is_amd() else f"sm_{properties.major}{properties.minor}"


def get_num_xcc(device_id: int | None = None) -> int:
    """Return the number of accelerator dies: 1 but for AMD's devices of several."""
    if _is_cpu(device_id) or not _is_amd():
        return 1
    units = get_cu_count(device_id)  # a partition of a device has fewer dies
    return max(1, round(units / _UNITS_PER_DIE.get(get_arch_string(device_id), units)))


def get_wall_clock_rate(device_id: int | None = None) -> int:
    """Return the rate in kHz of the constant clock that kernels read (`iris_triton.language.asm.read_realtime`)."""
    if not _is_cpu(device_id):
        _properties(device_id)
    return _WALL_CLOCK_KHZ[_is_amd()]


def get_rocm_version() -> tuple[int, int]:
    """Return ROCm's version as (major, minor).

    Raises:
        UnsupportedError: torch was not built for ROCm.
    """
    if torch.version.hip is None:
        raise UnsupportedError(f"get_rocm_version: this torch is not for ROCm (CUDA: {torch.version.cuda})")
    major, minor, *_ = torch.version.hip.split(".")
    return int(major), int(minor)


def get_ipc_handle_size() -> int:
    """Return the size of an IPC handle in bytes."""
    return _HANDLE_NBYTES


# -- memory -----------------------------------------------------------------------------------------------------------
def hip_malloc(size: int) -> int:
    """Return the address of memory of the current GPU, from torch's caching allocator.

    Args:
        size: bytes.

    Raises:
        UnsupportedError: there is no GPU.
    """
    if not count_devices():
        raise UnsupportedError("hip_malloc: there is no GPU here; ctx.empty gives memory on any device")
    return int(torch.cuda.caching_allocator_alloc(size))


def hip_free(ptr: int) -> None:
    """Give back what `hip_malloc` returned.

    Raises:
        UnsupportedError: there is no GPU.
    """
    if not count_devices():
        raise UnsupportedError("hip_free: there is no GPU here")
    torch.cuda.caching_allocator_delete(ptr)  # type: ignore[no-untyped-call]


def get_address_range(ptr: int) -> tuple[int, int]:
    """Return (base address, size in bytes) of the allocation that an address of a GPU lies in.

    Raises:
        UnsupportedError: there is no GPU.
        DriverError: there is no such allocation.
    """
    from iris_allocators.driver import ipc_driver
    from iris_core.types import DeviceType

    if not count_devices():
        raise UnsupportedError("get_address_range: there is no GPU here; ctx.heap.heap_bases has the heaps' addresses")
    return ipc_driver(DeviceType.HIP if _is_amd() else DeviceType.CUDA).address_range(ptr)


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"iris.hip.{name} is not offered, on no device: {instead}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refuse: {instead}.\n\nRaises:\n    UnsupportedError: always."
    return refuse


_HANDLES = "peers' memory is mapped when a context is opened, see ctx.get_heap_bases and ctx.heap.translate"
_VMM = "iris_triton.iris(allocator_type='vmem') maps memory page by page, and grows"
_SHARED = "ctx.as_symmetric shares existing memory with peers (allocator vmem)"
_INSTEAD = {
    "malloc_fine_grained": "ctx.empty gives memory that peers' kernels can synchronise in",
    **dict.fromkeys(("get_ipc_handle", "open_ipc_handle"), _HANDLES),
    **dict.fromkeys(("export_dmabuf_handle", "import_dmabuf_handle", "destroy_external_memory"), _SHARED),
    **dict.fromkeys(("get_allocation_granularity", "mem_create", "mem_export_to_shareable_handle"), _VMM),
    **dict.fromkeys(("mem_import_from_shareable_handle", "mem_address_reserve", "mem_map", "mem_unmap"), _VMM),
    **dict.fromkeys(("mem_address_free", "mem_release", "mem_set_access"), _VMM),
}
globals().update({name: _refused(name, instead) for name, instead in _INSTEAD.items()})


# -- helpers ----------------------------------------------------------------------------------------------------------
def _is_amd() -> bool:
    return torch.version.hip is not None


def _is_cpu(device_id: int | None) -> bool:
    """Whether there is no GPU, and none was named."""
    return device_id in (None, 0) and not count_devices()


def _existing(device_id: int) -> int:
    count = count_devices()
    if not 0 <= device_id < count:
        raise DeviceError(f"GPU {device_id} was asked for, but torch sees {count} here")
    return device_id


def _properties(device_id: int | None) -> Any:
    return torch.cuda.get_device_properties(get_device_id() if device_id is None else _existing(device_id))
