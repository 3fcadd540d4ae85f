"""`ctx.tracing`: switches device tracing on, reads what kernels have recorded, writes files."""

from __future__ import annotations

import os
import pathlib
import sys
import weakref
from functools import partial
from typing import Any, cast

import torch

from iris_core.errors import ArgumentError, HeapClosedError, IrisError, UnsupportedError
from iris_core.protocols import Context, SupportsTracing
from iris_core.tracing.clocks import Clock
from iris_core.tracing.events import SCHEMA_VERSION, Events, event_lines, lines_of, write
from iris_core.tracing.layout import COLUMNS, EVENT_NAMES, TraceEvent
from iris_core.types import ClockOffset
from iris_core.world import World
from iris_core.world.failures import on_all_ranks

MAX_EVENTS = 1_000_000
"""Events that the buffers of a rank hold unless the user says otherwise: 64 MB."""


class Tracing:
    """Device tracing of one context: `ctx.tracing`.

    A kernel records events only if its context is made with `tracing=True`, a constexpr, so that kernels without it
    have no instruction more.  Then every remote operation of the context is an event, and
    `ctx.tracing.record_event_start` and `record_event_end` in the kernel record others.

    Example:
        ctx.tracing.enable(max_events=100_000)
        kernel[grid](x, ctx.get_device_context(), ...)  # has DeviceContext.initialize(..., tracing=True)
        ctx.tracing.export("trace.json", merge=True)  # then open it in ui.perfetto.dev

    """

    def __init__(self, context: Context, world: World) -> None:
        self._context = weakref.ref(context)
        self._world = world
        self._counters: torch.Tensor | None = None
        self._columns: list[torch.Tensor] = []
        self._begin: ClockOffset | None = None
        self._names = dict(EVENT_NAMES)

    @property
    def enabled(self) -> bool:
        """Whether kernels that were compiled with tracing record events."""
        return self._counters is not None

    @property
    def max_events(self) -> int:
        """Events for which there is room; 0 while tracing is off."""
        return self._columns[0].numel() if self._columns else 0

    def enable(self, max_events: int = MAX_EVENTS) -> None:
        """Make the buffers, and let kernels record from now on; what was recorded before is forgotten.

        Collective: every rank of the context calls it, since the clocks are compared.  The context tensor that kernels
        got before keeps its address, so captured graphs record, too.

        Args:
            max_events: events of this rank for which there is room, 64 bytes each; the ranks' may differ.

        Raises:
            ArgumentError: max_events is not positive.
            UnsupportedError: the backend cannot trace.
            IrisError: a rank has no memory for its buffers; what one rank cannot do, all raise.
            HeapClosedError: the context is closed.
        """
        context = self._open()
        make = partial(self._make, context, max_events)
        backend, counters, columns = on_all_ranks(self._world, "could not begin to trace", make, IrisError)
        self._begin = backend.compare_clocks(context)
        words = [1, max_events, *(each.data_ptr() for each in (*counters, *columns))]  # see `iris_core.tracing.layout`
        backend.set_trace(context.get_device_context(), words, [counters, *columns])
        self._counters, self._columns = counters, columns
        self._world.barrier()

    def _make(self, context: Context, max_events: int) -> tuple[SupportsTracing, torch.Tensor, list[torch.Tensor]]:
        """Make this rank's buffers: the backend, the counters and the columns."""
        if isinstance(max_events, bool) or not isinstance(max_events, int) or not 0 < max_events < 1 << 31:
            raise ArgumentError(f"tracing.enable: max_events must be a number from 1 to 2**31 - 1, not {max_events!r}")
        backend = self._backend(context)
        self.disable()
        types = {32: torch.int32, 64: torch.int64}
        counters = torch.zeros(2, dtype=torch.int32, device=context.device)
        columns = [torch.zeros(max_events, dtype=types[each.bits], device=context.device) for each in COLUMNS]
        return backend, counters, columns

    def disable(self) -> None:
        """Let kernels record no more, and give the buffers back.  Does nothing where tracing is off."""
        if self._counters is None:
            return
        context = self._open()
        context.heap.streams.synchronize()
        self._backend(context).set_trace(context.get_device_context(), (), ())
        self._counters, self._columns, self._begin = None, [], None

    def reset(self) -> None:
        """Forget what was recorded.  Does nothing where tracing is off."""
        if self._counters is not None:
            self._open().heap.streams.synchronize()
            self._counters.zero_()

    def name_event(self, event_id: int, name: str) -> None:
        """Give a number of your own a name, with which its events are shown.

        Raises:
            ArgumentError: the number has a name already, or one of the two cannot be.
        """
        if isinstance(event_id, bool) or not isinstance(event_id, int) or not 0 <= event_id < 1 << 31:
            raise ArgumentError(f"tracing.name_event: an event is a number from 0 to 2**31 - 1, not {event_id!r}")
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"tracing.name_event: {name!r} is no name")
        if event_id in set(TraceEvent):
            raise ArgumentError(f"tracing.name_event: {event_id} is TraceEvent.{TraceEvent(event_id).name}")
        self._names[event_id] = name

    def events(self) -> Events:
        """Return what this rank's kernels have recorded, sorted by time; waits for the device.

        Raises:
            UnsupportedError: tracing is off.
        """
        if self._counters is None:
            raise UnsupportedError("tracing is off: call ctx.tracing.enable() before the kernels run")
        self._open().heap.streams.synchronize()
        recorded = int(self._counters[0])
        kept = min(recorded, self.max_events)
        columns = {each.name: values[:kept].cpu().numpy() for each, values in zip(COLUMNS, self._columns, strict=True)}
        return Events(columns, recorded - kept)

    def export(self, filename: str | os.PathLike[str] = "trace.json", merge: bool = False) -> dict[str, Any]:
        """Write what was recorded as Chrome / Perfetto JSON: `<stem>_rank<r>.json` on every rank.

        Collective: every rank of the context calls it with the same arguments.  Times are microseconds since the first
        event of any rank, on rank 0's clock; the metadata says by how much they can be wrong.

        Args:
            filename: of the merged file; those of the ranks lie beside it.
            merge: rank 0 also writes all ranks' events into `filename`, once the others have written theirs; the
                ranks must see one file system.

        Returns:
            The metadata of this rank's file (of the merged one on rank 0 with `merge`); empty on all ranks, with a
            warning, where tracing is off on one.

        Raises:
            IrisError: a rank's file cannot be written; on all ranks.
            OSError: likewise, in a world of one, or the merged file.
        """
        context = self._open()
        if not all(is_on for (is_on,) in self._world.all_gather_ints([self.enabled])):
            context.warning("tracing is off, nothing was exported: call ctx.tracing.enable() before the kernels run")
            return {}
        events, backend = self.events(), self._backend(context)
        if events.dropped:
            context.warning(
                f"{events.dropped} events were not recorded, because there was room for {self.max_events}: raise "
                "max_events of ctx.tracing.enable()"
            )
        end = backend.compare_clocks(context)
        assert self._begin is not None
        origin = self._world.all_gather_object(self._begin.at - self._begin.ahead)[0]
        clock = Clock(backend.ticks_per_second, self._begin, end, origin)
        first_us = float(events.begin_us(clock)[0]) if len(events) else None
        everyone = self._world.all_gather_object((first_us, clock.error_us, len(events), events.dropped))
        zero_us = min((first for first, *_ in everyone if first is not None), default=0.0)
        path = pathlib.Path(filename)
        common = {**_metadata(context), "clock_error_us": clock.error_us, "max_events": self.max_events}
        metadata = common | {"rank": context.cur_rank, "num_events": len(events), "dropped_events": events.dropped}
        lines = event_lines(events, clock, zero_us, self._names, context.cur_rank, context.device == "cpu")
        write_own = partial(write, path.with_name(f"{path.stem}_rank{context.cur_rank}.json"), lines, metadata)
        on_all_ranks(self._world, "could not write its part of the trace", write_own, IrisError)
        if merge and context.cur_rank == 0:
            for rank in range(1, context.num_ranks):
                lines += lines_of(path.with_name(f"{path.stem}_rank{rank}.json"))
            metadata = common | {
                "total_events": sum(number for *_, number, _ in everyone),
                "dropped_events": sum(dropped for *_, dropped in everyone),
                "clock_error_us": max(error for _, error, *_ in everyone),
            }
            write(path, lines, metadata)
        return metadata

    # -- steps --------------------------------------------------------------------------------------------------------
    def _open(self) -> Context:
        context = self._context()
        if context is None:
            raise HeapClosedError("this Iris context is closed; open a new one")
        context.get_device_context()  # raises where it is closed
        return context

    def _backend(self, context: Context) -> SupportsTracing:
        if not hasattr(context.backend, "set_trace"):
            raise UnsupportedError(f"backend {context.backend.info.name!r} cannot trace kernels")
        return cast("SupportsTracing", context.backend)


def _metadata(context: Context) -> dict[str, Any]:
    properties = None if context.device == "cpu" else torch.cuda.get_device_properties(context.target.index)
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": context.num_ranks,
        "time_unit": "us",
        "aligned": True,
        "process_name": pathlib.Path(sys.argv[0]).name,
        "device": properties.name if properties else "cpu",
        "multiprocessors": properties.multi_processor_count if properties else 0,
        "torch": torch.__version__,
    }
