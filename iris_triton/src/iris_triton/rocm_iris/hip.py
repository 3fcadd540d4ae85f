"""`iris.hip` of the reference system: what it says of devices, on any vendor's; memory of the driver's is not offered.

Queries answer for NVIDIA and, where that makes sense, for the CPU as well.  Calls for memory and handles raise
UnsupportedError, which says what to use: allocators are the only place that talks to drivers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

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
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def set_device(gpu_id: int) -> None:
    """Make a GPU the current one.

    Raises:
        DeviceError: there is no such GPU.
    """
    import torch

    torch.cuda.set_device(_existing(gpu_id))


def get_device_id() -> int:
    """Return the current GPU's index; 0 on the CPU."""
    import torch

    return torch.cuda.current_device() if count_devices() else 0


def get_cu_count(device_id: int | None = None) -> int:
    """Return the number of multiprocessors (compute units); on the CPU, of cores that this process may use.

    Args:
        device_id: the GPU; the current one if None.

    Raises:
        DeviceError: there is no such GPU.
    """
    if _is_cpu(device_id):
        import os

        return len(os.sched_getaffinity(0))
    return int(_properties(device_id).multi_processor_count)


def get_arch_string(device_id: int | None = None) -> str:
    """Return the architecture: "gfx942" on AMD, "sm_90" on NVIDIA, "cpu" without a GPU.

    Args:
        device_id: the GPU; the current one if None.

    Raises:
        DeviceError: there is no such GPU.
    """
    if _is_cpu(device_id):
        return "cpu"
    properties = _properties(device_id)
    name = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    return name if _is_amd() else f"sm_{properties.major}{properties.minor}"


def get_num_xcc(device_id: int | None = None) -> int:
    """Return the number of accelerator dies: 1 but for AMD's devices of several.

    Args:
        device_id: the GPU; the current one if None.

    Raises:
        DeviceError: there is no such GPU.
    """
    if _is_cpu(device_id) or not _is_amd():
        return 1
    units = get_cu_count(device_id)  # a partition of a device has fewer dies
    return max(1, round(units / _UNITS_PER_DIE.get(get_arch_string(device_id), units)))


def get_wall_clock_rate(device_id: int | None = None) -> int:
    """Return the rate in kHz of the constant clock that kernels read (`iris_triton.language.asm.read_realtime`).

    Args:
        device_id: the GPU; the current one if None.

    Raises:
        DeviceError: there is no such GPU.
    """
    if not _is_cpu(device_id):
        _properties(device_id)
    return _WALL_CLOCK_KHZ[_is_amd()]


def get_rocm_version() -> tuple[int, int]:
    """Return ROCm's version as (major, minor).

    Raises:
        UnsupportedError: torch was not built for ROCm.
    """
    import torch

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
    import torch

    if not count_devices():
        raise UnsupportedError("hip_malloc: there is no GPU here; ctx.empty gives memory on any device")
    return int(torch.cuda.caching_allocator_alloc(size))


def hip_free(ptr: int) -> None:
    """Give back what `hip_malloc` returned.

    Raises:
        UnsupportedError: there is no GPU.
    """
    import torch

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

malloc_fine_grained = _refused("malloc_fine_grained", "ctx.empty gives memory that peers' kernels can synchronise in")
get_ipc_handle = _refused("get_ipc_handle", _HANDLES)
open_ipc_handle = _refused("open_ipc_handle", _HANDLES)
export_dmabuf_handle = _refused("export_dmabuf_handle", _SHARED)
import_dmabuf_handle = _refused("import_dmabuf_handle", _SHARED)
destroy_external_memory = _refused("destroy_external_memory", _SHARED)
get_allocation_granularity = _refused("get_allocation_granularity", _VMM)
mem_create = _refused("mem_create", _VMM)
mem_export_to_shareable_handle = _refused("mem_export_to_shareable_handle", _VMM)
mem_import_from_shareable_handle = _refused("mem_import_from_shareable_handle", _VMM)
mem_address_reserve = _refused("mem_address_reserve", _VMM)
mem_map = _refused("mem_map", _VMM)
mem_unmap = _refused("mem_unmap", _VMM)
mem_address_free = _refused("mem_address_free", _VMM)
mem_release = _refused("mem_release", _VMM)
mem_set_access = _refused("mem_set_access", _VMM)


# -- helpers ----------------------------------------------------------------------------------------------------------
def _is_amd() -> bool:
    import torch

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
    import torch

    return torch.cuda.get_device_properties(get_device_id() if device_id is None else _existing(device_id))
