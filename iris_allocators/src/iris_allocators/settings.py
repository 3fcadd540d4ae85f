"""Settings of the allocators in this distribution."""

from __future__ import annotations

from pydantic import ByteSize

from iris_core.settings import PluginSettings


class HostSettings(PluginSettings):
    """Settings of the "host" allocator: IRIS_HOST__..., or `options={"host": {...}}`."""

    huge_pages: bool = False
    """Ask the kernel to back the heap with transparent huge pages (madvise)."""


class TorchSettings(PluginSettings):
    """Settings of the "torch" allocator: it has none."""


class VmemSettings(PluginSettings):
    """Settings of the "vmem" allocator: IRIS_VMEM__..., or `options={"vmem": {...}}`."""

    granule: ByteSize | None = None
    """Bytes by which memory is committed and given back, a power of two; by default a 64th of the heap, 2 to 64 MiB."""
