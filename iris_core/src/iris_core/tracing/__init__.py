"""Host side of device tracing: buffers, clocks of several ranks on one axis, files for Perfetto."""

from iris_core.tracing.layout import EVENT_NAMES, TraceEvent

__all__ = ["EVENT_NAMES", "TraceEvent"]
