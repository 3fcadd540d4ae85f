"""Whether an allocator can share memory of each GPU, for `iris doctor`: it is tried."""

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
    """Make and export a small heap on each GPU.

    Args:
        subject: what the allocator shares memory by.
        other: the allocator to take where that fails.
        targets: the GPUs.
        create: makes the allocator.
        settings: its settings.
    """
    if not targets:
        return []
    problems = {target.torch_device: _try(target, create, settings) for target in targets}
    failed = [f"cannot be made on {device}: {problem}" for device, problem in problems.items() if problem]
    if failed:
        return [Finding(subject, Verdict.NOTE, "\n".join([*failed, f"take allocator={other!r}"]))]
    return [Finding(subject, Verdict.OK, f"can be made and exported on {', '.join(problems)}")]


def _try(target: DeviceTarget, create: Create, settings: PluginSettings) -> str:
    """Why a small heap cannot be made and exported; empty if it can."""
    try:
        # as rank 0 of two: alone, nothing would have to be exported
        allocator = create(CreateRequest(target, rank=0, world_size=2, heap_nbytes=_NBYTES, settings=settings))
        try:
            allocator.commit(0, allocator.granularity)
            for segment in allocator.export():
                if segment.fd is not None:
                    os.fstat(segment.fd)  # it is one; the allocator closes it
        finally:
            allocator.close()
    except Exception as error:  # noqa: BLE001 - whatever torch or the driver raises is what was found
        return error_text(error)
    return ""
