"""Settings of the allocators in this distribution."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ByteSize, Field

from iris_core.settings import PluginSettings


class HostSettings(PluginSettings):
    """Settings of the "host" allocator: IRIS_HOST__..., or `options={"host": {...}}`."""

    huge_pages: bool = False
    """Ask the kernel to back the heap with transparent huge pages (madvise)."""


class TorchSettings(PluginSettings):
    """Settings of the "torch" allocator: it has none."""


class NcclSettings(PluginSettings):
    """Settings of the "nccl" allocator: IRIS_NCCL__..., or `options={"nccl": {...}}`."""

    emulated_delay: Annotated[float, Field(ge=0.0, le=60.0)] = 0.002
    """CPU only: seconds by which puts and signals to other nodes arrive late, at most, and at least a quarter of it."""


def _power_of_two(value: ByteSize) -> ByteSize:
    if value < 1 or value & (value - 1):
        raise ValueError("a granule is a power of two of bytes")
    return value


class VmemSettings(PluginSettings):
    """Settings of the "vmem" allocator: IRIS_VMEM__..., or `options={"vmem": {...}}`."""

    granule: Annotated[ByteSize, AfterValidator(_power_of_two)] | None = None
    """Bytes by which memory is committed and given back, a power of two; by default a 64th of the heap, 2 to 64 MiB."""
    multicast: bool = False
    """Make addresses that reach the heaps of all ranks at once (NVLink SHARP, on Hopper and newer).  Where a device has
    no multicast, all ranks raise UnsupportedError; a world of one makes none."""
