"""The checker's tables, in memory that the processes of all ranks share.

One sparse file without a name: only what is touched takes memory.  Rows are appended and never change, so what a
process has read of them it may keep; cells and counters change under the lock only.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections import namedtuple
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from iris_core.errors import IrisError
from iris_core.types import Segment
from iris_core.world import World

GRANULE = 4  # bytes of the heap that one cell stands for
SLOTS = 64  # programs of a rank that clocks tell apart.  Programs p and p + 64 share a slot, which can hide a race
PROGRAMS = SLOTS + 1  # slots of a rank: its host and its programs
SITE_NBYTES, MESSAGE_NBYTES = 512, 8192
_MAX_HISTORIES, _MAX_CHANGES, _MAX_CLOCKS, _MAX_SITES = 1 << 24, 1 << 22, 1 << 20, 1 << 14

HISTORIES, CHANGES, CLOCKS, SITES, WAITS, HANDED, ALLOCATIONS, FAILED, WIDE = range(9)
"""Counters: of rows of the tables in `_COUNTED`, of allocations; FAILED: 1 + the rank that ended the check; WIDE:
whether an atomic had too many lanes to be words."""
_COUNTED = ("histories", "changes", "clocks", "sites", "waits", "handed")

HISTORY = np.dtype([(name, np.uint32) for name in ("before", "kind", "slot", "epoch", "site", "program", "written")])

Change = namedtuple("Change", "before slot epoch site program kind value old scope own reads system wait ranks")
"""A row of the changes of synchronisation words; `ranks` are columns, too: the clocks that each rank may join.

`wait` is the last wait that this change has ended: the one column that is written later.
"""

WAIT, RANKS = Change._fields.index("wait"), Change._fields.index("ranks")


class Side(NamedTuple):
    """Who does something, and where: the number of a line, the program, and its slot."""

    site: int
    program: int
    slot: int

    @property
    def rank(self) -> int:
        return self.slot // PROGRAMS


def share(
    world: World, name: str, parts: Sequence[tuple[str, Any, tuple[int, ...]]]
) -> tuple[int, dict[str, NDArray[Any]]]:
    """Return arrays (name, dtype, shape) that all ranks share, all zero, and the descriptor of their memory.

    Collective.  What is mapped goes with the last reference to it; the descriptor is the caller's.
    """
    sizes = [-(-int(np.prod(shape)) * np.dtype(dtype).itemsize // 4096) * 4096 for _, dtype, shape in parts]
    own = -1
    if world.rank == 0:
        own = os.memfd_create(name, os.MFD_CLOEXEC)
        os.ftruncate(own, sum(sizes))
    sent = [] if own < 0 else [Segment(0, sum(sizes), b"", own)]
    fd = world.exchange_segments(sent)[0][0].fd
    assert fd is not None
    whole = mmap.mmap(fd, sum(sizes))
    arrays, offset = {}, 0
    for (part, dtype, shape), size in zip(parts, sizes, strict=True):
        arrays[part] = np.frombuffer(whole, dtype, int(np.prod(shape)), offset).reshape(shape)
        offset += size
    return fd, arrays


class Tables:
    """The tables of one context, and the lock that all ranks share; a context manager that holds the lock.

    Collective: every rank of the context makes one; `nbytes` is the size of each rank's heap.
    """

    def __init__(self, world: World, nbytes: int) -> None:
        size, self.num_slots = world.world_size, world.world_size * PROGRAMS
        granules = -(-nbytes // GRANULE)
        parts: tuple[tuple[str, Any, tuple[int, ...]], ...] = (
            ("counters", np.int64, (16,)),
            ("epochs", np.int64, (self.num_slots,)),
            ("published", np.int32, (2, size, 2, self.num_slots)),
            ("message", np.uint8, (MESSAGE_NBYTES,)),
            ("sites", np.uint8, (_MAX_SITES, SITE_NBYTES)),
            ("cells", np.uint32, (size, granules)),
            ("words", np.uint32, (size, granules)),
            ("histories", HISTORY, (_MAX_HISTORIES,)),
            ("changes", np.int64, (_MAX_CHANGES, RANKS + size)),
            ("waits", np.int64, (_MAX_CHANGES, 7)),
            ("clocks", np.int32, (_MAX_CLOCKS, self.num_slots)),
            ("handed", np.int64, (_MAX_CLOCKS, 4)),
        )
        self._fd, arrays = share(world, "iris-checker", parts)
        vars(self).update(arrays)
        self._threads = threading.RLock()
        self._depth = 0

    if TYPE_CHECKING:

        def __getattr__(self, table: str) -> Any: ...

    def __enter__(self) -> Tables:
        self._threads.acquire()
        self._depth += 1
        if self._depth == 1:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)  # the kernel releases it where a process is killed
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)
        self._threads.release()

    def take(self, table: int, count: int = 1) -> int:
        """Return the first of `count` new rows of a table; row 0 stands for none.  The caller holds the lock."""
        row, name = max(int(self.counters[table]), 2), _COUNTED[table]  # row 1 of the histories means: never written
        if row + count > len(getattr(self, name)):
            raise IrisError(
                f"the checker's table of {name} is full after {row} rows: check a smaller problem, or fewer repetitions"
            )
        self.counters[table] = row + count
        return row

    def keep(self, clock: Any) -> int:
        """Return a new row of clocks that holds one.  The caller holds the lock."""
        row = self.take(CLOCKS)
        self.clocks[row] = clock
        return row

    def put_text(self, row: Any, text: str) -> None:
        """Write text into a row of bytes, cut to its size."""
        data = text.encode()[: row.size]
        row[: len(data)] = np.frombuffer(data, np.uint8)

    def close(self) -> None:
        os.close(self._fd)
