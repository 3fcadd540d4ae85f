"""Settings.  The docstring below a field is what `iris config` shows."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from pydantic import ByteSize, DirectoryPath

from iris_core.settings import PluginSettings

_MEMORY = "/dev/shm"  # a file system in memory, on every Linux


class ExampleSettings(PluginSettings):
    """Settings of allocator and backend "example": IRIS_EXAMPLE__..., or `options={"example": {...}}`.

    They have the same name, and so the same settings.
    """

    directory: DirectoryPath = Path(_MEMORY if os.path.isdir(_MEMORY) else tempfile.gettempdir())
    """Folder for the heaps' files and the lock of the atomics; the same for all ranks, best one in memory."""


class TwoShotSettings(PluginSettings):
    """Settings of the collective: IRIS_EXAMPLE_TWO_SHOT__..., or `options={"example-two-shot": {...}}`."""

    max_nbytes: ByteSize = ByteSize(64 << 20)
    """Largest input that it takes; its workspace on the heap is twice as large."""
