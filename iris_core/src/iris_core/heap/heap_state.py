"""The state of one rank's heap, on which all parts of `iris_core.heap` work."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris_core.heap.backing import Backing
    from iris_core.heap.blocks import BlockTable
    from iris_core.heap.offsets import SubAllocator
    from iris_core.heap.streams import StreamOrder
    from iris_core.protocols import Allocator
    from iris_core.types import Block
    from iris_core.world import World

NOT_OPEN = "the symmetric heap is not open yet: call open() on every rank"


@dataclass(slots=True, eq=False)
class HeapState:
    """What one rank knows of its heap.

    Attributes:
        allocator: owns the memory.
        world: the ranks.
        usable: bytes that allocations share; behind them lies the system area.
        offsets: which ranges are free; equal on all ranks.
        blocks: what is allocated, and the history of calls.
        order: which streams still use what.
        backing: which ranges have memory, and where the peers' heaps are.
        floor: where the lowest region of a group begins on this rank.
        groups: the regions that groups of ranks have at the end, by offset.
        groups_lock: held by who takes memory there, or lets allocations have more of it.
        holders: offset of a block of imported memory -> live and pending imports in it.
        closed: why the heap cannot be used; empty while it can.
    """

    allocator: Allocator
    world: World
    usable: int
    offsets: SubAllocator
    blocks: BlockTable
    order: StreamOrder
    backing: Backing
    floor: int
    groups: list[Block] = field(default_factory=list)
    groups_lock: threading.Lock = field(default_factory=threading.Lock)
    holders: dict[int, int] = field(default_factory=dict)
    closed: str = NOT_OPEN
