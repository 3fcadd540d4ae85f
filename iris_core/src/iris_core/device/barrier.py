"""Barriers on the device: the flags of every group of ranks, and the order of launches on them.

Counters are never reset, so a barrier that was captured in a graph can be replayed any number of times.  Two barriers
of the same ranks must use the flags in the same order on all of them, and the order of launches on a device is that of
the host only within a stream.  So:

- Launches outside graphs come in the order of the host's calls (`iris_core.device.launch_order`).
- Nothing orders replays of a graph with other launches.  So barriers that are captured have a slot of their own, one
  for each graph; within the graph they are ordered like others, and CUDA lets no graph run beside itself.  The slots
  are reserved at the first call of a group, and handed out in the order of captures.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from iris_core.device import launch_order
from iris_core.device.launch_order import DeviceOrder
from iris_core.device.reports import Meaning, Report
from iris_core.errors import CapabilityError, UnsupportedError
from iris_core.heap.heap import SymmetricHeap
from iris_core.protocols import DeviceBackend, SupportsDeviceBarrier
from iris_core.types import BarrierSlot, Group
from iris_core.world import World
from iris_core.world.failures import name_ranks

SEMS = ("release", "relaxed")

GRAPHS = 1024
"""Graphs of one group that can have barriers."""

_AREA_SHARE = 64
_WORD = 8


class Place(NamedTuple):
    """A barrier's place among those of a group."""

    launch: Callable[[Any], None]
    drop: Callable[[], None]


class DeviceBarriers:
    """The barriers of one rank, with slots for `graphs` graphs of each group, which a 64th of the system area holds."""

    def __init__(self, heap: SymmetricHeap, world: World, backend: DeviceBackend, graphs: int) -> None:
        self._heap, self._area, self._world = heap, heap.system_area, world
        self._backend, self._graphs = backend, graphs
        size = world.world_size
        self._world_offset = self._area.reserve_at_opening(self._num_slots(size) * _slot_nbytes(size))
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._of_all: _Group | None = None
        self._offsets = {tuple(range(size)): heap.usable_nbytes + self._world_offset}

    def bind(self, group: Group, sem: str) -> Place:
        """Return a barrier's place in the order of barriers, which is that of this call.

        It must be launched or dropped; see `Iris.device_barrier`.

        Collective, the first time: every member of the group calls it.
        """
        if sem not in SEMS:
            raise ValueError(f"device_barrier: sem must be 'release' or 'relaxed', not {sem!r}")
        if group is None and self._of_all is not None:
            return self._of_all.bind(sem)
        if not hasattr(self._backend, "device_barrier"):
            name = self._backend.info.name
            raise CapabilityError(f"backend {name!r} has no barrier on the device: use ctx.barrier(), or another one")
        members = tuple(sorted(self._world.members_of(group)))  # groups that differ in order alone share their flags
        if len(members) == 1:
            return Place(_nothing, _nothing)
        found = self._groups.get(members)
        if found is None:
            what = f"device_barrier of {name_ranks(members)}"
            for member in members:
                self._world.check_reachable(member, what, "ctx.ccl.barrier() or ctx.barrier()")
            _refuse_capture(members, sem)
            found = self._groups[members] = self._make(members)
        if group is None:
            self._of_all = found
        return found.bind(sem)

    def launch(self, group: Group, sem: str, stream: Any) -> None:
        """Launch a barrier on a stream, None for the current one; see `Iris.device_barrier`."""
        found = self._of_all if group is None and stream is None else None
        if found is not None and (again := found.again.get(sem)) is not None:
            again()
        else:
            self.bind(group, sem).launch(stream)

    def _make(self, members: tuple[int, ...]) -> _Group:
        size, count, rank = len(members), self._num_slots(len(members)), self._world.rank
        offset = self._world_offset
        if size < self._world.world_size:
            offset = self._area.reserve(self._world.subworld(members), count * _slot_nbytes(size), "device_barrier")
        self._offsets[members] = self._heap.usable_nbytes + offset
        words = self._area.tensor(offset, count * _slot_nbytes(size)).view(torch.int64).view(count, size + 1)
        mine = words.data_ptr() + members.index(rank) * _WORD
        first = torch.tensor([self._heap.translate(mine, rank, member) for member in members], dtype=torch.int64)
        targets = (first + torch.arange(count).view(-1, 1) * _slot_nbytes(size)).to(words.device)
        return _Group(members, words, targets, cast("SupportsDeviceBarrier", self._backend))

    def reset(self, members: tuple[int, ...]) -> None:
        if (found := self._groups.get(tuple(sorted(members)))) is not None:
            found.reset()

    def explain_report(self, report: Report) -> Meaning | None:
        """Explain a report; None if it is not about the flags of a group that this rank is a member of."""
        for members, begin in list(self._offsets.items()):
            word, width = (report.offset_bytes - begin) // _WORD, len(members) + 1
            if report.rank in members and 0 <= word < self._num_slots(len(members)) * width:
                peer = members[word % width] if word % width < len(members) else None
                text = "" if peer is None else f"It is where rank {peer} says that it has come to the barrier. "
                return Meaning(members, peer, "device_barrier", f"device_barrier of {name_ranks(members)}", text)
        return None

    def _num_slots(self, size: int) -> int:
        """How many slots a group of this size has: one, and one for each graph."""
        return 1 + min(self._graphs, self._area.nbytes // _AREA_SHARE // _slot_nbytes(size))


class _Group:
    """The barriers of some ranks; on a GPU, `again` has what launches a further one on the current stream, by sem."""

    def __init__(
        self, members: tuple[int, ...], words: torch.Tensor, targets: torch.Tensor, backend: SupportsDeviceBarrier
    ) -> None:
        self._members, self._words, self._targets, self._backend = members, words, targets, backend
        self._first = self._slot_at(0)
        self._unused = 1
        self._captured: dict[int, BarrierSlot] = {}
        self.again: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._turns: list[threading.Event] = []  # of barriers on the CPU that are bound and not over
        self._index = words.device.index
        self._order = None if words.device.type == "cpu" else DeviceOrder(self._index)

    def bind(self, sem: str) -> Place:
        if self._order is not None:
            return Place(partial(self._launch, self._order, sem), _nothing)
        turn = threading.Event()
        with self._lock:
            before = [each for each in self._turns if not each.is_set()]
            self._turns = [*before, turn]
        return Place(partial(self._run, before, turn, sem), turn.set)

    def reset(self) -> None:
        """Set all words to 0 that were used."""
        self._words[: self._unused].zero_()
        if self._order is not None:
            torch.cuda.current_stream(self._words.device).synchronize()

    def _run(self, before: Sequence[threading.Event], turn: threading.Event, sem: str, stream: Any) -> None:
        """On the CPU, where the host waits: a barrier begins when those that were bound before are over, or dropped."""
        try:
            for each in before:
                each.wait()
            self._backend.device_barrier(self._first, sem, stream)
        finally:
            turn.set()

    def _launch(self, order: DeviceOrder, sem: str, stream: Any) -> None:
        again = self.again.get(sem) or partial(order.run, self._enqueue, sem)
        with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            if sem not in self.again:
                _refuse_capture(self._members, sem)
            again()
        self.again[sem] = again

    def _enqueue(self, sem: str) -> None:
        slot = self._slot() if torch.cuda.is_current_stream_capturing() else self._first
        self._backend.device_barrier(slot, sem, None)

    def _slot(self) -> BarrierSlot:
        capture = launch_order.current_capture(self._index)
        slot = None if capture is None else self._captured.get(capture)
        if slot is None:
            if self._unused == len(self._words):
                raise UnsupportedError(
                    f"device_barrier of {name_ranks(self._members)}: {len(self._words) - 1} graphs have captured "
                    "barriers of these ranks, and there are no flags for another one; capture fewer, or open the "
                    "context with a larger IRIS_SYSTEM_SIZE"
                )
            slot = self._slot_at(self._unused)
            self._unused += 1
            if capture is not None:
                self._captured[capture] = slot
        return slot

    def _slot_at(self, number: int) -> BarrierSlot:
        return BarrierSlot(self._words[number], self._targets[number], len(self._members))


def _nothing(stream: Any = None) -> None:
    """Do nothing: the barrier of one rank, and the drop of one that no later one waits for."""


def _slot_nbytes(size: int) -> int:
    return (size + 1) * _WORD


def _refuse_capture(members: tuple[int, ...], sem: str) -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"device_barrier of {name_ranks(members)} with sem={sem!r} cannot be made while a graph is captured; call "
            "it once before the capture, on every rank of the group"
        )
