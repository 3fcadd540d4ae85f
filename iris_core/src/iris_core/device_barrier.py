"""Barriers on the device: the flags of every group of ranks, and who launches what on them.

A group gets a slot of the heap's system area: a row of words, one per member for its announcements, and one that counts
the barriers of this rank.  The whole world has one from the start; the members of another group agree on theirs the
first time they meet, and nobody else takes part.  Counters are never reset, so a barrier that was captured in a graph
can be replayed for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from iris_core.errors import CapabilityError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    import torch.distributed as dist

    from iris_core.bootstrap import World
    from iris_core.heap import SymmetricHeap
    from iris_core.protocols import DeviceBackend, SupportsDeviceBarrier
    from iris_core.system_area import SystemArea

SEMS = ("release", "relaxed")

_WORD = 8


@dataclass(frozen=True, slots=True)
class BarrierSlot:
    """The flags of one group, as one member's kernel sees them.

    Attributes:
        words: int64[size + 1] on the heap: word i is raised by member i; the last one counts this rank's barriers.
        targets: int64[size] on the device: address, in this process, of this rank's word on every member.
        size: number of members.
    """

    words: torch.Tensor
    targets: torch.Tensor
    size: int


class DeviceBarriers:
    """The barriers of one rank.

    Args:
        heap: open.
        area: the heap's system area, of which nobody has anything yet.
        world: the ranks of the heap.
        backend: launches the kernels.
        name: the backend's name, for messages.
    """

    def __init__(self, heap: SymmetricHeap, area: SystemArea, world: World, backend: DeviceBackend, name: str) -> None:
        self._heap = heap
        self._area = area
        self._world = world
        self._backend = backend
        self._name = name
        self._world_offset = area.reserve_at_opening((world.world_size + 1) * _WORD)
        self._slots: dict[tuple[int, ...], BarrierSlot] = {}
        self._warm: set[tuple[tuple[int, ...], str]] = set()

    def bind(self, group: dist.ProcessGroup | Sequence[int] | None, sem: str) -> Callable[[Any], None]:
        """Return what launches a barrier on a stream; see `Iris.device_barrier`.

        Collective, the first time: every member of the group calls it.
        """
        if not hasattr(self._backend, "device_barrier"):
            raise CapabilityError(
                f"backend {self._name!r} has no barrier on the device; use ctx.barrier(), or another backend"
            )
        if sem not in SEMS:
            raise ValueError(f"device_barrier: sem must be 'release' or 'relaxed', not {sem!r}")
        members = tuple(sorted(self._world.members_of(group)))  # groups that differ in order alone share their flags
        if len(members) == 1:
            return _nothing
        if (members, sem) not in self._warm and _capturing():
            raise UnsupportedError(
                f"device_barrier of ranks {', '.join(map(str, members))} with sem={sem!r} cannot be made while a graph "
                "is captured; call it once before the capture, on every rank of the group"
            )
        slot = self._slots.get(members)
        if slot is None:
            slot = self._slots[members] = self._make_slot(group, members)
        return partial(self._launch, slot, members, sem)

    def _launch(self, slot: BarrierSlot, members: tuple[int, ...], sem: str, stream: Any) -> None:
        cast("SupportsDeviceBarrier", self._backend).device_barrier(slot, sem, stream)
        self._warm.add((members, sem))

    def _make_slot(self, group: dist.ProcessGroup | Sequence[int] | None, members: tuple[int, ...]) -> BarrierSlot:
        import torch

        nbytes = (len(members) + 1) * _WORD
        offset = self._world_offset
        if len(members) < self._world.world_size:
            offset = self._area.reserve(self._world.subgroup(group), nbytes, "device_barrier")
        words = self._area.tensor(offset, nbytes).view(torch.int64)
        mine = words.data_ptr() + members.index(self._world.rank) * _WORD
        targets = [self._heap.translate(mine, self._world.rank, member) for member in members]
        return BarrierSlot(words, torch.tensor(targets, dtype=torch.int64, device=words.device), len(members))


def _nothing(stream: Any) -> None:
    """The barrier of one rank."""


def _capturing() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
