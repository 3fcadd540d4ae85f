"""`ctx.tracing` with the buffers under the names of the reference system."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris_core.tracing import recorder
from iris_core.tracing.layout import COLUMNS

if TYPE_CHECKING:
    import torch


class Tracing(recorder.Tracing):
    """`iris_core.tracing.recorder.Tracing`, whose buffers scripts may read.

    Wait for the device first: `ctx.barrier()`.
    """

    @property
    def trace_counter(self) -> torch.Tensor | None:
        """Number of events that kernels have recorded or had no room for: int32[1]; None when off."""
        return None if self._counters is None else self._counters[:1]

    @property
    def op_index_counter(self) -> torch.Tensor | None:
        """Number of remote operations that were recorded: int32[1]; None when off."""
        return None if self._counters is None else self._counters[1:]

    @property
    def trace_buffers(self) -> dict[str, torch.Tensor]:
        """Columns of the events by name, int32 or int64[max_events]; empty when off.

        `duration_cycles` holds what its name says, -1 for an event without one.
        """
        return dict(zip((each.name for each in COLUMNS), self._columns, strict=False))
