"""Streams and freed memory: who may still use a block, and who has to wait before it is used again.

A kernel runs long after its launch, so a block that the program has freed may be in use for a while.  The rule is
torch's, and a little wider: a block is in use until everything is done that had been launched when it was freed on the
stream that was current when it was allocated, on the one current when it is freed, and on those named with
`SymmetricHeap.record_stream`.  Other streams are the program's business, as in torch.

Events are recorded at the moment of the free.  What they are used for depends on the world:

- in a world of several ranks nothing is handed out before the events of all ranks are complete (`is_idle`);
- a rank alone hands the block out at once, and makes the stream that gets it wait for the others (`fence`,
  `hand_out`): the host never waits.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any, Protocol

from iris_core.errors import HeapError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from iris_core.blocks import Record

_FIRST_PRUNING = 64


class Event(Protocol):
    """A moment of a stream; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether everything that was launched before it is done."""


class Stream(Protocol):
    """Work in order; `torch.cuda.Stream` is one."""

    def record_event(self) -> Any:
        """Return an `Event` that stands for everything launched so far."""

    def wait_event(self, event: Any) -> None:
        """Let later work wait for an event; the host goes on."""


class Streams(Protocol):
    """The streams of one device."""

    def current(self) -> Stream:
        """The stream on which this thread launches."""

    def is_capturing(self) -> bool:
        """Whether that stream is being captured into a graph."""


class TorchStreams:
    """torch's streams of a GPU.

    Args:
        index: torch's index of the device.
    """

    def __init__(self, index: int) -> None:
        import torch

        self._index = index
        self._cuda = torch.cuda

    def current(self) -> Stream:
        """The stream on which this thread launches."""
        return self._cuda.current_stream(self._index)

    def is_capturing(self) -> bool:
        """Whether that stream is being captured into a graph."""
        return self._cuda.is_current_stream_capturing()


Uses = tuple[tuple[Stream, Event], ...]
"""Streams that have used a block, each with the moment of its last use."""


class StreamOrder:
    """What the heap knows of streams; does nothing where launches return when the kernel is done.

    Args:
        streams: of the heap's device; None on the CPU.
    """

    def __init__(self, streams: Streams | None) -> None:
        self._streams = streams
        self._fences = _Fences()

    def check_not_capturing(self, what: str) -> None:
        """Refuse what would be repeated by a graph without the heap's knowledge.

        Raises:
            HeapError: the current stream is being captured.
        """
        if self._streams is not None and self._streams.is_capturing():
            raise HeapError(
                f"{what}: the current stream is being captured into a graph, which uses its memory at every replay, "
                "unknown to the heap. Allocate before the capture, and free when the graph is not replayed any more"
            )

    # -- a block's life -----------------------------------------------------------------------------------------------
    def begin(self, record: Record) -> None:
        """A block was handed out to the current stream."""
        if self._streams is not None:
            record.streams = [self._streams.current()]

    def add(self, record: Record, stream: Stream) -> None:
        """Another stream uses the block."""
        if self._streams is not None and stream not in record.streams:
            record.streams.append(stream)

    def end(self, record: Record) -> None:
        """The block was freed: note up to which moment streams use it.  A second call changes nothing."""
        if self._streams is None or record.uses is not None:
            return
        self.add(record, self._streams.current())
        record.uses = tuple((stream, stream.record_event()) for stream in record.streams)

    def is_idle(self, record: Record) -> bool:
        """Whether this rank's streams are done with a block that was freed."""
        self.end(record)
        if record.uses:
            record.uses = tuple(use for use in record.uses if not use[1].query())
        return not record.uses

    # -- a rank alone -------------------------------------------------------------------------------------------------
    def fence(self, start: int, end: int, record: Record) -> None:
        """A range may be handed out again, but its last user may still be running."""
        if record.uses:
            self._fences.add(start, end, record.uses)

    def hand_out(self, start: int, end: int) -> None:
        """A range is handed out: the current stream waits for those that used it before."""
        if self._streams is None or not self._fences:
            return
        current = self._streams.current()
        for uses in self._fences.take(start, end):
            for stream, event in uses:
                if stream != current:
                    current.wait_event(event)

    def unfenced(self, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of free blocks (offset, size) that no stream uses any more."""
        self._fences.prune()
        return [part for offset, size in ranges for part in self._fences.gaps(offset, size)]

    def device_is_idle(self, freed: Iterable[Record]) -> None:
        """The whole device was waited for: nothing is in use that was freed so far."""
        self._fences = _Fences()
        for record in freed:
            record.uses = ()


class _Fences:
    """Disjoint ranges with the uses that whoever gets them has to wait for."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._rest: list[tuple[int, Uses]] = []  # (end, uses) of each
        self._limit = _FIRST_PRUNING

    def __bool__(self) -> bool:
        return bool(self._starts)

    def add(self, start: int, end: int, uses: Uses) -> None:
        """Put a range in; it overlaps none that is there."""
        i = bisect_left(self._starts, start)
        self._starts.insert(i, start)
        self._rest.insert(i, (end, uses))
        if len(self._starts) > self._limit:  # many: most of them are past
            self.prune()
            self._limit = max(_FIRST_PRUNING, 2 * len(self._starts))

    def take(self, start: int, end: int) -> list[Uses]:
        """Take [start, end) out; return the uses of what was there."""
        i, j = self._overlapping(start, end)
        taken = list(zip(self._starts[i:j], self._rest[i:j], strict=True))
        if not taken:
            return []
        left = [(a, (start, uses)) for a, (_, uses) in taken[:1] if a < start]
        right = [(end, (b, uses)) for _, (b, uses) in taken[-1:] if b > end]
        self._starts[i:j] = [a for a, _ in left + right]
        self._rest[i:j] = [rest for _, rest in left + right]
        return [uses for _, (_, uses) in taken]

    def gaps(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        """The parts (offset, size) of a range that no fence covers."""
        end = offset + size
        i, j = self._overlapping(offset, end)
        for start, (stop, _) in zip(self._starts[i:j], self._rest[i:j], strict=True):
            if offset < start:
                yield offset, start - offset
            offset = stop
        if offset < end:
            yield offset, end - offset

    def prune(self) -> None:
        """Forget the ranges whose uses are past."""
        kept = [
            (start, rest)
            for start, rest in zip(self._starts, self._rest, strict=True)
            if not all(event.query() for _, event in rest[1])
        ]
        self._starts = [start for start, _ in kept]
        self._rest = [rest for _, rest in kept]

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        """Indices [i, j) of the ranges that overlap [start, end)."""
        i, j = bisect_right(self._starts, start), bisect_left(self._starts, end)
        if i and self._rest[i - 1][0] > start:
            i -= 1
        return i, max(i, j)
