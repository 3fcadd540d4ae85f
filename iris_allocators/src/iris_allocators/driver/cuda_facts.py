"""Facts about NVIDIA's devices, through cuda-bindings."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver

from iris_allocators.driver.cuda import _call
from iris_allocators.driver.facts import DeviceFacts, PeerFacts
from iris_core.errors import DriverError

_DEVICE = "CU_DEVICE_ATTRIBUTE_"
_PEER = "CU_DEVICE_P2P_ATTRIBUTE_"


def device_facts(index: int) -> DeviceFacts:
    """Return what the driver says of a device, by its index in torch."""
    _call(driver.cuInit, 0)
    device = _call(driver.cuDeviceGet, index)

    def ask(name: str) -> bool | None:
        attribute = getattr(driver.CUdevice_attribute, _DEVICE + name, None)
        answer = None if attribute is None else _answer(driver.cuDeviceGetAttribute, attribute, device)
        return None if answer is None else bool(answer)

    return DeviceFacts(
        virtual_memory=ask("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"),
        fd_handles=ask("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"),
        fabric_handles=ask("HANDLE_TYPE_FABRIC_SUPPORTED"),
        gpu_direct_rdma=ask("GPU_DIRECT_RDMA_SUPPORTED"),
        gpu_direct_rdma_virtual_memory=ask("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"),
        dma_buf=ask("DMA_BUF_SUPPORTED"),
        multicast=ask("MULTICAST_SUPPORTED"),
    )


def peer_facts(index: int, peer: int) -> PeerFacts:
    """Return what the driver says of the way from one device to another one."""
    _call(driver.cuInit, 0)
    one, other = _call(driver.cuDeviceGet, index), _call(driver.cuDeviceGet, peer)

    def ask(name: str) -> int | None:
        attribute = getattr(driver.CUdevice_P2PAttribute, _PEER + name, None)
        return None if attribute is None else _answer(driver.cuDeviceGetP2PAttribute, attribute, one, other)

    access, atomics = ask("ACCESS_SUPPORTED"), ask("NATIVE_ATOMIC_SUPPORTED")
    return PeerFacts(
        access=None if access is None else bool(access),
        native_atomics=None if atomics is None else bool(atomics),
        performance_rank=ask("PERFORMANCE_RANK"),
    )


def _answer(function: Any, *args: Any) -> int | None:
    try:
        return int(_call(function, *args))
    except DriverError:
        return None  # an older driver than the bindings: it does not know the attribute
