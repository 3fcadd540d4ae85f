"""Whether an allocator can share memory of a GPU, for `iris doctor`: it is tried."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from iris_core.diagnosis import Finding, Verdict
from iris_core.errors import error_text
from iris_core.types import CreateRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.protocols import Allocator
    from iris_core.settings import PluginSettings
    from iris_core.types import DeviceTarget

    Create = Callable[[CreateRequest], Allocator]

_NBYTES = 2 << 20


def diagnose(
    subject: str, other: str, targets: Sequence[DeviceTarget], create: Create, settings: PluginSettings
) -> list[Finding]:
    """Make and export a small heap on the first GPU.

    Args:
        subject: what the allocator shares memory by.
        other: the allocator to take where that fails.
        targets: the GPUs.
        create: makes the allocator.
        settings: its settings.
    """
    if not targets:
        return []
    device = targets[0].torch_device
    try:
        # as rank 0 of two: alone, nothing would have to be exported
        allocator = create(CreateRequest(targets[0], rank=0, world_size=2, heap_nbytes=_NBYTES, settings=settings))
        try:
            allocator.commit(0, allocator.granularity)
            for segment in allocator.export():
                if segment.fd is not None:
                    os.fstat(segment.fd)  # it is one; the allocator closes it
        finally:
            allocator.close()
    except Exception as error:  # noqa: BLE001 - whatever torch or the driver raises is what was found
        text = f"cannot be made and exported on {device}: {error_text(error)}\ntake allocator={other!r}"
        return [Finding(subject, Verdict.NOTE, text)]
    return [Finding(subject, Verdict.OK, f"can be made and exported (tried on {device})")]
