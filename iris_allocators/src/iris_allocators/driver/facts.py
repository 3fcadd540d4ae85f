"""What a driver says of its devices and of the ways between them; opens no device.

A fact is None where this driver, or the version of its bindings, does not know the question.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What one device and its driver can do.

    Attributes:
        virtual_memory: addresses and physical memory can be managed apart.
        fd_handles: such memory can be shared by file descriptor.
        fabric_handles: it can be shared by fabric handle, over several hosts of one NVLink domain.
        gpu_direct_rdma: network cards can reach the device's memory.
        gpu_direct_rdma_virtual_memory: that also holds for memory of virtual memory management.
        dma_buf: memory can be exported as a dma-buf, which is what newer network drivers take.
        multicast: one store can reach the memory of several devices.
    """

    virtual_memory: bool | None = None
    fd_handles: bool | None = None
    fabric_handles: bool | None = None
    gpu_direct_rdma: bool | None = None
    gpu_direct_rdma_virtual_memory: bool | None = None
    dma_buf: bool | None = None
    multicast: bool | None = None


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What the way from one device to another one can do.

    Attributes:
        access: the peer's memory can be mapped.
        native_atomics: atomics on it are atomic for both sides.
        performance_rank: how fast it is among the ways of this machine; 0 is the fastest.
    """

    access: bool | None = None
    native_atomics: bool | None = None
    performance_rank: int | None = None
