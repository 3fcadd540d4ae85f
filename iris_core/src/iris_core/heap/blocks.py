"""The state of one rank's heap, and its blocks: which are live, freed, or dropped, by how many ranks, by which calls.

A block goes through these states:

    live     --freed by the program, or by the end of a scope-->            pending  --agreement of all ranks-->  gone
    live     --dropped by the garbage collector on all ranks, and agreed--> gone

The ranks agree on a block when the streams of none of them use it any more (`iris_core.heap.streams`).  A block is
known by its number, which counts allocations and so is the same on every rank; offsets would not do, because a storage
can outlive its block.  Nothing here communicates.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from iris_core.errors import HeapError, NotOnHeapError
from iris_core.heap.backing import Backing
from iris_core.heap.offsets import SubAllocator
from iris_core.heap.streams import Stream, StreamOrder, Uses
from iris_core.protocols import Allocator
from iris_core.types import Block
from iris_core.world import World

NOT_OPEN = "the symmetric heap is not open yet: call open() on every rank"

HISTORY_LENGTH = 256
"""Calls that are kept to explain a difference."""

Label = tuple[Any, ...]
"""The call that made a block: name of the function and its arguments; formatted only for messages."""


Op = enum.IntEnum("Op", "ALLOCATE FREE IMPORT BARRIER REFRESH")
"""An operation on the heap; the first three make up the history, the others are steps taken together."""


class Call(NamedTuple):
    """One entry of a history; `before` is the digest of everything that came earlier."""

    number: int
    op: int
    nbytes: int
    alignment: int
    offset: int
    label: Label
    before: int

    def describe(self) -> str:
        if self.op == Op.ALLOCATE:
            where = f"at offset {self.offset}" if self.offset >= 0 else "which finds no free block"
            return f"{format_label(self.label)}, {self.nbytes} bytes aligned to {self.alignment}, {where}"
        if self.op == Op.FREE:
            return f"free of {format_label(self.label)} at offset {self.offset}"
        if self.op == Op.IMPORT:
            return format_label(self.label)
        return "barrier()" if self.op == Op.BARRIER else "refresh_peer_access()"


def format_label(label: Label) -> str:
    """Write a label as the call it stands for: ("zeros", (4,), torch.float32) -> "zeros((4,), float32)"."""
    if len(label) <= 1:
        return label[0] if label else "allocation"
    name, *args = label
    plain = [str(arg) if isinstance(arg, tuple) else str(arg).removeprefix("torch.") for arg in args]
    return f"{name}({', '.join(plain)})"


@dataclass(slots=True, eq=False)
class Record:
    """A block of the heap."""

    number: int  # counts allocations
    offset: int  # where the block begins
    nbytes: int  # size as asked for
    start: int  # where the tensor's storage begins; differs from `offset` only for imported memory
    storage: int  # identity of the storage, different from an earlier one at the same address
    label: Label  # the call that made it
    source: torch.UntypedStorage | None = None  # whose memory was imported, kept until no rank needs it
    pending: bool = False  # it was freed, and waits for the other ranks, or is gone
    dropped: bool = False  # its tensor was dropped, and it waits for the other ranks
    streams: list[Stream] = field(default_factory=list)  # streams that use it, as far as the heap knows
    uses: Uses | None = None  # once it was freed, these with their last moments; empty when they are past

    def __str__(self) -> str:
        return f"{format_label(self.label)} at offset {self.offset}"


class BlockTable:
    """The blocks of one rank's heap, which begins at `base`, and the symmetric calls that have made and freed them.

    The digest of the calls is Python's hash of a tuple of integers, which does not depend on PYTHONHASHSEED, chained
    call by call.
    """

    def __init__(self, base: int, nbytes: int) -> None:
        self._base, self._nbytes = base, nbytes
        self.calls = self.digest = 0
        self._recent: deque[tuple[Any, ...]] = deque(maxlen=HISTORY_LENGTH)  # each a Call, made only when read
        self._numbers = 0
        self.live: dict[int, Record] = {}
        self.pending: list[Record] = []  # in the order in which they were freed; equal on all ranks
        self._by_storage: dict[int, Record] = {}  # of all; the identity of a storage that is gone may be used again
        self._freed: dict[int, Record] = {}  # by number, whose tensors are still there
        self.released: deque[int] = deque()  # numbers whose storage is gone; filled by finalizers, from any thread
        self.unannounced: dict[int, Record] = {}  # of these, the live ones that the other ranks do not know of
        self.votes: Counter[int] = Counter()  # number -> ranks that have dropped the live block; equal on all ranks
        self.scopes: list[Scope] = []
        self.version = 0

    def next_number(self) -> tuple[int, Callable[[], None]]:
        """Return a new block's number, and a function for its storage to call when it is gone."""
        self._numbers = number = self._numbers + 1
        return number, partial(self.released.append, number)

    def add(self, record: Record, op: Op, alignment: int) -> None:
        """Add a live block, which belongs to the innermost scope."""
        self._note_call(op, record, alignment)
        if self.scopes:
            self.scopes[-1]._records[record.number] = record
        self.live[record.number] = record
        self._by_storage[record.storage] = record
        self.version += 1

    def _note_call(self, op: Op, record: Record, alignment: int) -> None:
        before, self.calls = self.digest, self.calls + 1
        self.digest = hash((before, op, record.nbytes, alignment, record.offset))
        self._recent.append((self.calls, op, record.nbytes, alignment, record.offset, record.label, before))

    def recent_calls(self) -> list[Call]:
        return [Call(*entry) for entry in self._recent]

    def of(self, tensor: torch.Tensor, what: str) -> Record | None:
        """Return a tensor's live block, None for other memory; HeapError, which begins with `what`, if it was freed."""
        storage = tensor.untyped_storage()
        record = self._by_storage.get(storage._cdata)
        if record is None or record.start != storage.data_ptr() - self._base:
            return None
        if record.pending and record.number not in self.released:  # else another storage has its identity
            raise HeapError(f"{what}: {record} was freed before")
        return None if record.pending else record

    def find(self, tensor: torch.Tensor, what: str) -> Record:
        """As `of`, but raise where there is none."""
        if (record := self.of(tensor, what)) is not None:
            return record
        start = tensor.untyped_storage().data_ptr() - self._base
        if not 0 <= start < self._nbytes:
            raise NotOnHeapError(f"{what}: the tensor's storage does not begin on this rank's symmetric heap")
        raise HeapError(
            f"{what}: the tensor lies on the heap at offset {start}, but its storage is not that of a live block: it "
            "was made from a pointer or by DLPack; pass the tensor that Iris returned or a view"
        )

    def retire(self, record: Record) -> None:
        """Let a live block that was freed wait for the agreement of all ranks."""
        self._note_call(Op.FREE, record, 0)
        record.pending = True
        self._freed[record.number] = record
        self.pending.append(record)  # first: a kernel that another thread launches now may use it
        self._remove(record)
        self.votes.pop(record.number, None)

    def discard(self, record: Record) -> Record:
        """Forget a live block that no rank refers to any more."""
        self._remove(record)
        self._forget(record)
        return record

    def dropped(self) -> list[Record]:
        """Return the live blocks that this rank has dropped and the other ranks do not know of."""
        while self.released:
            number = self.released.popleft()
            if (record := self.live.get(number)) is not None:
                record.dropped = True
                self.unannounced[number] = record
            elif (record := self._freed.pop(number, None)) is not None:
                self._forget(record)
        return list(self.unannounced.values())

    def announce(self, dropped: Sequence[Record], everyone: Iterable[Iterable[int]], world_size: int) -> list[Record]:
        """Forget and return, by ascending number, the blocks that now all ranks have said they have dropped."""
        for record in dropped:
            self.unannounced.pop(record.number, None)
        self.votes.update(number for numbers in everyone for number in numbers)
        agreed = sorted(number for number, count in self.votes.items() if count == world_size)
        for number in agreed:
            del self.votes[number]
        return [self.discard(self.live[number]) for number in agreed]

    def waiting(self) -> list[Record]:
        """Return the blocks that were freed, or dropped on this rank, and are not free yet."""
        self.dropped()
        return [*self.pending, *(record for record in self.live.values() if record.dropped)]

    def _forget(self, record: Record) -> None:
        if self._by_storage.get(record.storage) is record:
            del self._by_storage[record.storage]

    def _remove(self, record: Record) -> None:
        del self.live[record.number]
        self.unannounced.pop(record.number, None)
        for scope in self.scopes:
            scope._records.pop(record.number, None)
        self.version += 1


class Scope:
    """Frees, at its end, the blocks that were allocated inside and not kept; made by `SymmetricHeap.scope`."""

    def __init__(self, table: BlockTable, retire: Callable[[Record], None]) -> None:
        self._table, self._retire = table, retire
        self._records: dict[int, Record] = {}  # that it frees, by number

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a tensor, or a view of one, outlive this scope; only an enclosing one frees it.  Returns the tensor.

        Symmetric: every rank keeps the same tensors.

        Raises:
            HeapError: the scope is not open, or the tensor was freed before.
            NotOnHeapError: the tensor does not lie on the heap.
        """
        scopes = self._table.scopes
        if self not in scopes:
            raise HeapError("keep: this scope is not open")
        record = self._table.find(tensor, "keep")
        depth = scopes.index(self)
        for scope in scopes[depth:]:
            if scope._records.pop(record.number, None) is not None and depth:
                scopes[depth - 1]._records[record.number] = record
        return tensor

    def __enter__(self) -> Scope:
        if self in self._table.scopes:
            raise HeapError("this scope is open already; make another one with scope()")
        self._table.scopes.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        scopes = self._table.scopes
        if self not in scopes:
            return  # it ended together with one around it
        inner = scopes[scopes.index(self) :]  # those that were left open (by a generator, say) end with this one
        try:
            for scope in reversed(inner):
                for record in list(scope._records.values()):
                    self._retire(record)
        finally:
            del scopes[-len(inner) :]
            for scope in inner:
                scope._records.clear()  # what could not be freed belongs to no scope now


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
    watcher: Any = None  # the checker of kernels on the CPU, to which allocations and frees are reported; None: off
    closed: str = NOT_OPEN  # why the heap cannot be used; empty while it can
