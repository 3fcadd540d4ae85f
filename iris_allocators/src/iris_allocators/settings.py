"""Settings of the allocators in this distribution."""

from __future__ import annotations

from iris_core.settings import PluginSettings


class HostSettings(PluginSettings):
    """Settings of the "host" allocator: IRIS_HOST__..., or `options={"host": {...}}`."""

    huge_pages: bool = False
    """Ask the kernel to back the heap with transparent huge pages (madvise)."""


class TorchSettings(PluginSettings):
    """Settings of the "torch" allocator: it has none."""
