"""The "nccl" allocator: a heap that kernels reach on other nodes, too; on CPU ranks it is emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_core.types import DeviceType

if TYPE_CHECKING:
    from iris_allocators.nccl.emulated import EmulatedAllocator
    from iris_allocators.nccl.window import NcclAllocator
    from iris_core.types import CreateRequest


def make(request: CreateRequest) -> NcclAllocator | EmulatedAllocator:
    """Return the allocator for a device."""
    if request.target.type is DeviceType.CPU:
        from iris_allocators.nccl.emulated import EmulatedAllocator

        return EmulatedAllocator(request)
    from iris_allocators.nccl.window import NcclAllocator

    return NcclAllocator(request)
