"""The state of one rank's heap, on which all parts of `iris_core.heap` work."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    """The state of one rank's heap."""

    allocator: Allocator  # owns the memory
    world: World
    usable: int  # bytes that allocations share; after them lies the system area
    offsets: SubAllocator  # which ranges are free; equal on all ranks
    blocks: BlockTable  # what is allocated, and the history of calls
    order: StreamOrder  # which streams still use what
    backing: Backing  # which ranges have memory, and where the peers' heaps are
    floor: int  # where the lowest region of a group begins on this rank
    groups: list[Block] = field(default_factory=list)  # the regions of groups of ranks at the end, by offset
    groups_lock: threading.Lock = field(default_factory=threading.Lock)  # of these, and of the limit of allocations
    holders: dict[int, int] = field(default_factory=dict)  # offset of imported memory -> live and pending imports
    watcher: Any = None  # the checker of kernels on the CPU, which is told of allocations and frees; None: it is off
    closed: str = NOT_OPEN  # why the heap cannot be used; empty while it can
