"""The symmetric heap: one address range per rank, the same blocks at the same offsets on every rank.

Peers are mapped once, when the heap opens, so `heap_bases` never change.  Blocks are handed out by a deterministic
sub-allocator: the same calls on every rank give the same offsets, and an allocation communicates only when memory
grows or runs out.

A block goes through these states:

    live     --free(t), end of a scope-->             pending  --agreement of all ranks-->  free
    live     --dropped by the garbage collector on all ranks, and agreed-->                 free

Nothing is reused before all ranks agree, because a peer that has not reached its own free may still write to the block.
They agree at every barrier of the whole world and when an allocation finds no room.  In a world of one rank there is
nobody to ask: a freed block is free at once, a dropped one at the next allocation.

One thread allocates and frees; only the release of dropped tensors may come from any thread.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, cast

import torch

from iris_core.agreement import History, Label, Op, Report, agree, format_label, name_ranks
from iris_core.errors import (
    HeapClosedError,
    HeapError,
    HeapExhaustedError,
    NotOnHeapError,
    PeerAccessError,
    UnsupportedError,
)
from iris_core.residency import Residency
from iris_core.suballocator import MIN_ALIGNMENT, SubAllocator, check_alignment
from iris_core.types import Block, Capability, HeapStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from iris_core.bootstrap import World
    from iris_core.protocols import Allocator, SupportsImportTensor


class _Record:
    """What the heap knows of one block."""

    __slots__ = ("imported", "label", "nbytes", "number", "offset", "pending", "scope", "start", "storage")

    def __init__(
        self, number: int, offset: int, nbytes: int, start: int, storage: int, label: Label, scope: Scope | None
    ) -> None:
        self.number = number  # counts allocations; the same block has the same number on every rank
        self.offset = offset  # of the block
        self.nbytes = nbytes  # as asked for
        self.start = start  # offset of the tensor's storage; differs from `offset` only for imported memory
        self.storage = storage  # identity of the storage, which tells it from an earlier one at the same address
        self.label = label
        self.scope = scope
        self.pending = False
        self.imported = False

    def __str__(self) -> str:
        return f"{format_label(self.label)} at offset {self.offset}"


class SymmetricHeap:
    """One rank's heap and its view of the peers' heaps.

    Args:
        allocator: owns the memory; the heap closes it.
        world: the ranks; the caller closes it.
        on_allocated: called with (offset_bytes, nbytes) after every allocation.
        synchronize: waits until kernels of this rank no longer use the heap; called before memory is reclaimed under
            pressure.  At a barrier the caller has done so already.
    """

    def __init__(
        self,
        allocator: Allocator,
        world: World,
        *,
        on_allocated: Callable[[int, int], None] | None = None,
        synchronize: Callable[[], None] | None = None,
    ) -> None:
        self._allocator = allocator
        self._world = world
        self._on_allocated = on_allocated
        self._synchronize = synchronize
        self._base = allocator.base_ptr
        self._sub = SubAllocator(allocator.nbytes)
        self._residency = Residency(allocator)
        self._history = History()
        self._bases: tuple[int, ...] = ()
        self._max_alignment = 0
        self._exchanged_generation = -1
        self._open = False
        self._closed = False
        self._device: torch.device | None = None

        self._numbers = 0
        self._live: dict[int, _Record] = {}  # by number
        self._by_start: dict[int, _Record] = {}  # live and pending, by offset of the storage
        self._pending: list[_Record] = []
        self._released: deque[int] = deque()  # numbers whose storage is gone; filled by finalizers, from any thread
        self._dropped: list[int] = []  # of these, the live ones that the other ranks have not been told of
        self._votes: dict[int, int] = {}  # number -> how many ranks have dropped it; equal on all ranks
        self._scopes: list[Scope] = []
        self._version = 0
        self._blocks: tuple[int, tuple[Block, ...]] = (-1, ())  # live_blocks() as of a version

    # -- opening and closing ------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Map every peer's heap.

        Collective: every rank calls it once, before anything else.

        Raises:
            HeapError: an allocator reported something that cannot be.
            PeerAccessError: another rank could not map a peer's heap.
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
        """
        if self._open or self._closed:
            raise HeapError("a heap is opened once")
        self._exchange()
        lowest_bits = [base & -base for base in self._bases]
        self._max_alignment = min(row[0] for row in self._world.all_gather_ints([min(lowest_bits)]))
        self._open = True

    def close(self) -> None:
        """Release the peers' heaps and then the own one.  Idempotent; tensors that still live stay valid memory.

        Local: synchronise with the peers before, because they may still write.
        """
        if not self._closed:
            self._closed = True
            self._allocator.close()

    def refresh_peer_access(self) -> None:
        """Map what any rank's allocator has to share since the last exchange; does nothing if there is nothing new.

        Collective: every rank calls it.  The heap does it by itself whenever memory grows.

        Raises:
            HeapClosedError: the heap is closed.
            SymmetryError: the ranks' histories differ.
            PeerAccessError: another rank could not map a peer's heap.
        """
        self._check_open()
        self._exchange_if_dirty(agree(self._world, self._history, Op.REFRESH, dirty=self._dirty))

    # -- allocating ---------------------------------------------------------------------------------------------------
    def allocate(self, num_elements: int, dtype: torch.dtype, alignment: int = MIN_ALIGNMENT) -> torch.Tensor:
        """Allocate a 1-D tensor; its content is undefined.

        Symmetric: every rank calls it with the same arguments, in the same order with other allocations and frees.

        Args:
            num_elements: number of elements; 0 gives an empty tensor that lies on the heap nevertheless.
            dtype: element type.
            alignment: alignment of the address in bytes; a power of two.

        Returns:
            A tensor of shape (num_elements,) with a storage of its own.

        Raises:
            ValueError: negative size or bad alignment.
            HeapExhaustedError: no room; the heap can be used as before.
            HeapClosedError: the heap is closed.
            SymmetryError: the ranks' histories differ (noticed only when memory grows or runs out).
        """
        return self.empty_strided((num_elements,), (1,), dtype, ("allocate", num_elements, dtype), alignment)

    def empty_strided(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        label: Label,
        alignment: int = MIN_ALIGNMENT,
    ) -> torch.Tensor:
        """Allocate a tensor of any strides; its content is undefined.  See `allocate`.

        Args:
            shape: sizes.
            stride: strides in elements, not negative.
            dtype: element type.
            label: the call that asks for it, as (name, argument, ...), for messages.
            alignment: alignment of the address in bytes; a power of two.
        """
        elements = 1
        for size, step in zip(shape, stride, strict=True):
            if size <= 0:
                if size < 0:
                    raise ValueError(f"a tensor cannot have {size} elements along a dimension")
                elements = 0
                break
            elements += (size - 1) * step
        nbytes = elements * dtype.itemsize
        if alignment != MIN_ALIGNMENT:
            self._check_alignment(alignment)
        raw = self._allocate(nbytes, alignment, label)
        # set_ makes a leaf that is no view of `raw`; an empty one still has a storage of its own on the heap
        return torch.empty(0, dtype=dtype, device=raw.device).set_(raw.untyped_storage(), 0, shape, stride)

    def allocate_symmetric(self, *size: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate a tensor and say where every rank's copy of it lies.

        Symmetric: every rank calls it with the same arguments.

        Args:
            size: sizes, as for torch.empty.
            dtype: element type; torch's default dtype if None.

        Returns:
            The tensor (content undefined) and an int64 tensor of shape (world_size,) on the same device, whose entry r
            is the address of rank r's copy in this process.

        Raises:
            HeapExhaustedError: no room; the heap can be used as before.
            HeapClosedError: the heap is closed.
        """
        like = torch.empty(*size, dtype=dtype, device="meta")
        shape = tuple(like.shape)
        out = self.empty_strided(shape, like.stride(), like.dtype, ("allocate_symmetric", shape, like.dtype))
        offset = out.untyped_storage().data_ptr() - self._base
        return out, torch.tensor([base + offset for base in self._bases], dtype=torch.int64, device=out.device)

    def as_symmetric(self, external: torch.Tensor) -> torch.Tensor:
        """Bring a tensor onto the heap.

        Where the allocator can import memory (`Capability.IMPORT_TENSOR`) the result shares the tensor's memory;
        otherwise it is a copy, detached from autograd.  A tensor that lies on the heap already is returned as it is.

        Symmetric: every rank calls it with a tensor of the same shape and dtype.

        Raises:
            UnsupportedError: some rank's tensor cannot be imported; raised on every rank.
            HeapExhaustedError: no room; the heap can be used as before.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        if self.is_symmetric(external):
            return external
        if external.layout is not torch.strided:
            raise UnsupportedError(f"only strided tensors can be on the heap, not {external.layout}")
        label = ("as_symmetric", tuple(external.shape), external.dtype)
        if Capability.IMPORT_TENSOR in self._allocator.info.provides:
            return self._import(external.detach(), label)
        like = torch.empty_like(external, device="meta")
        out = self.empty_strided(tuple(like.shape), like.stride(), like.dtype, label)
        return out.copy_(external.detach())

    def _allocate(self, nbytes: int, alignment: int, label: Label) -> torch.Tensor:
        """Take a block and return the bytes of it; nothing has changed if it raises."""
        self._check_open()
        if self._released and self._world.world_size == 1:
            self._reclaim_dropped()
        sub = self._sub
        offset = self._reserve(nbytes, alignment, label)
        self._numbers = number = self._numbers + 1
        try:
            if self._residency.needs_growth(offset, nbytes):
                self._grow(offset, nbytes, alignment, label)
            else:
                self._residency.commit(offset, nbytes)
            # a storage without bytes would have no address, so an empty tensor's storage has the whole block
            on_release = partial(self._released.append, number)
            raw = self._allocator.tensor(offset, nbytes or sub.size_of(offset), on_release)
        except BaseException:
            sub.free(offset)
            raise
        storage = raw.untyped_storage()._cdata
        self._register(_Record(number, offset, nbytes, offset, storage, label, None), Op.ALLOCATE, alignment)
        return raw

    def _register(self, record: _Record, op: Op, alignment: int) -> None:
        self._history.record(op, record.nbytes, alignment, record.offset, record.label)
        if self._scopes:
            record.scope = self._scopes[-1]
            record.scope._records[record.number] = record
        self._live[record.number] = record
        self._by_start[record.start] = record
        self._version += 1
        if self._on_allocated is not None:
            self._on_allocated(record.offset, record.nbytes)

    def _reserve(self, nbytes: int, alignment: int, label: Label) -> int:
        """Find an offset; ask the other ranks for memory that nobody needs any more before giving up.

        The free lists are equal on all ranks, so all find no room at the same call and all come to the agreement.
        """
        sub = self._sub
        try:
            return sub.allocate(nbytes, alignment)
        except HeapExhaustedError as e:
            if e.requested_bytes > sub.nbytes:
                raise self._exhausted(e, alignment, label) from None
        if self._synchronize is not None:
            self._synchronize()
        for collect in (False, True):  # collecting garbage takes long, so only when the rest was not enough
            if collect:
                gc.collect()  # tensors in reference cycles
            self._step(Op.ALLOCATE, nbytes, alignment, label)
            try:
                return sub.allocate(nbytes, alignment)
            except HeapExhaustedError as e:
                error = e
        raise self._exhausted(error, alignment, label) from None

    def _exhausted(self, e: HeapExhaustedError, alignment: int, label: Label) -> HeapExhaustedError:
        waiting = sum(self._sub.size_of(self._live[n].offset) for n in self._votes)
        held = f" {waiting} bytes have been dropped by some ranks but not by all." if waiting else ""
        return HeapExhaustedError(
            f"Heap out of memory: {format_label(label)} needs {e.requested_bytes} bytes (alignment {alignment}), but "
            f"of the heap's {self._sub.nbytes} bytes {e.free_bytes} are free, {e.largest_free_bytes} of them in one "
            f"piece.{held} Free tensors with free() or scope(), or open the context with a larger heap_size.",
            requested_bytes=e.requested_bytes,
            free_bytes=e.free_bytes,
            largest_free_bytes=e.largest_free_bytes,
        )

    def _grow(self, offset: int, nbytes: int, alignment: int, label: Label) -> None:
        """Commit memory that peers have to map.  Every rank comes here in the same call."""
        error: Exception | None = None
        try:
            self._allocator.commit(offset, nbytes)
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        reports = agree(
            self._world,
            self._history,
            Op.ALLOCATE,
            nbytes=nbytes,
            alignment=alignment,
            label=label,
            ok=error is None,
            dirty=self._dirty,
        )
        self._raise_failure(error, reports, f"could not get memory for {format_label(label)}")
        self._exchange_if_dirty(reports)
        self._residency.commit(offset, nbytes)

    def _import(self, external: torch.Tensor, label: Label) -> torch.Tensor:
        """Map a tensor's memory into the heap.  Every rank comes here in the same call."""
        allocator = cast("SupportsImportTensor", self._allocator)
        error: Exception | None = None
        extent = (0, 0)
        try:
            extent = allocator.import_extent(external)
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        size, delta = extent
        reports = agree(self._world, self._history, Op.IMPORT, label=label, ok=error is None, extra=delta)
        sizes = [row[0] for row in self._world.all_gather_ints([size])]
        self._raise_failure(error, reports, "cannot import the tensor that was passed to as_symmetric")
        if len({report.extra for report in reports}) > 1:
            raise UnsupportedError(
                "as_symmetric: the ranks' tensors begin at different places of their memory allocations, so they "
                "cannot lie at the same offset of the heap; pass tensors that were allocated alike, or copy into "
                "ctx.empty_like(tensor)"
            )
        size, granule = max(sizes), self._allocator.granularity
        offset = self._reserve(size, granule, label)
        self._numbers = number = self._numbers + 1
        out = external
        try:
            out = allocator.import_tensor(offset, external, partial(self._released.append, number))
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        try:
            reports = agree(
                self._world, self._history, Op.IMPORT, nbytes=size, label=label, ok=error is None, dirty=self._dirty
            )
            self._raise_failure(error, reports, "cannot import the tensor that was passed to as_symmetric")
            self._exchange_if_dirty(reports)
        except BaseException:
            if error is None:
                self._residency.decommit(offset, size)
            self._sub.free(offset)
            raise
        self._residency.note(offset, size)
        storage = out.untyped_storage()
        record = _Record(number, offset, size, storage.data_ptr() - self._base, storage._cdata, label, None)
        record.imported = True
        self._register(record, Op.IMPORT, granule)
        return out

    # -- freeing ------------------------------------------------------------------------------------------------------
    def free(self, tensor: torch.Tensor) -> None:
        """Give a tensor's block back; the tensor and its views must not be used afterwards.

        Symmetric: every rank calls it for the same tensor, in the same order with other allocations and frees.
        Nothing is communicated: in a world of several ranks the block is reused after the next barrier of all.

        Args:
            tensor: a tensor of this heap, or any view that shares its storage.

        Raises:
            NotOnHeapError: the tensor does not lie on this heap.
            HeapError: it was freed before, or its storage is not the one that the heap made.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        self._retire(self._record_of(tensor, "free"))

    def scope(self) -> Scope:
        """Return a context manager that frees what is allocated inside.

        Symmetric: every rank enters and leaves it at the same place.

        Example:
            with heap.scope() as scope:
                work = heap.allocate(1 << 20, torch.float32)   # freed at the end
                result = scope.keep(heap.allocate(16, torch.float32))
        """
        self._check_open()
        return Scope(self)

    def barrier_agreement(self) -> None:
        """Compare histories, and free what all ranks have freed or dropped.

        Collective: every rank calls it, after its device has finished what it does on the heap.  No rank returns before
        all have called, so it is a barrier of the hosts as well.

        Raises:
            SymmetryError: the histories differ; raised on every rank.
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        self._step(Op.BARRIER)
        gave_back = self._residency.can_decommit and self._residency.release_idle(self._sub.free_blocks())
        if gave_back and self._residency.grows:
            self.refresh_peer_access()  # peers let go of what they had mapped

    def _record_of(self, tensor: torch.Tensor, what: str) -> _Record:
        """The live block whose storage `tensor` has."""
        storage = tensor.untyped_storage()
        start = storage.data_ptr() - self._base
        record = self._by_start.get(start)
        if record is not None and record.storage == storage._cdata:
            if not record.pending:
                return record
            raise HeapError(f"{what}: {record} was freed before")
        if not 0 <= start < self._allocator.nbytes:
            raise NotOnHeapError(f"{what}: the tensor does not lie on the symmetric heap of rank {self.rank}")
        past = next((c for c in reversed(self._history.recent()) if c.op == Op.FREE and c.offset == start), None)
        if past is not None:
            raise HeapError(f"{what}: {format_label(past.label)} at offset {start} was freed before")
        raise HeapError(
            f"{what}: the tensor lies on the heap at offset {start}, but its storage is not that of a live block: it "
            "was freed before, or it was made from a pointer or by DLPack; pass the tensor that Iris returned or a view"
        )

    def _retire(self, record: _Record) -> None:
        """A live block was freed by the program."""
        del self._live[record.number]
        self._votes.pop(record.number, None)
        if record.scope is not None:
            del record.scope._records[record.number]
            record.scope = None
        self._history.record(Op.FREE, record.nbytes, 0, record.offset, record.label)
        self._version += 1
        record.pending = True
        if self._world.world_size == 1:
            self._recycle(record)
        else:
            self._pending.append(record)

    def _recycle(self, record: _Record) -> None:
        """Make a block free; nobody uses it any more."""
        del self._by_start[record.start]
        size = self._sub.free(record.offset)
        if record.imported:  # somebody else's memory is mapped there
            if self._synchronize is not None:
                self._synchronize()
            self._residency.decommit(record.offset, size)

    def _collect_dropped(self) -> list[int]:
        """Numbers of the live blocks that this rank has dropped and not yet told the others of."""
        while self._released:
            self._dropped.append(self._released.popleft())
        # the storage of a block that was freed by the program is released later: that is no second free
        self._dropped = [number for number in self._dropped if number in self._live]
        return self._dropped

    def _reclaim_dropped(self) -> None:
        """In a world of one, free what was dropped."""
        dropped, self._dropped = self._collect_dropped(), []
        for number in dropped:
            self._discard(self._live[number])

    def _discard(self, record: _Record) -> None:
        """Free a live block that no rank refers to any more."""
        del self._live[record.number]
        if record.scope is not None:
            del record.scope._records[record.number]
        self._version += 1
        self._recycle(record)

    def _step(self, op: Op, nbytes: int = 0, alignment: int = 0, label: Label = ()) -> None:
        """Take a step with all ranks: compare, free what nobody needs, map what is new."""
        dropped = self._collect_dropped()
        reports = agree(
            self._world,
            self._history,
            op,
            nbytes=nbytes,
            alignment=alignment,
            label=label,
            dirty=self._dirty,
            num_dropped=len(dropped),
        )
        longest = max(report.num_dropped for report in reports)
        if longest:
            row = dropped + [0] * (longest - len(dropped))
            for numbers in self._world.all_gather_ints(row):
                for number in numbers:
                    if number:
                        self._votes[number] = self._votes.get(number, 0) + 1
            self._dropped = []
        pending, self._pending = self._pending, []
        for record in pending:
            self._recycle(record)
        for number in sorted(n for n, count in self._votes.items() if count == self._world.world_size):
            del self._votes[number]
            self._discard(self._live[number])
        self._exchange_if_dirty(reports)

    # -- peers --------------------------------------------------------------------------------------------------------
    @property
    def _dirty(self) -> bool:
        return self._allocator.generation != self._exchanged_generation

    def _exchange_if_dirty(self, reports: Sequence[Report]) -> None:
        if any(report.dirty for report in reports):
            self._exchange()

    def _exchange(self) -> None:
        """Export to and import from every peer.  Every rank comes here in the same call."""
        generation = self._allocator.generation
        error: Exception | None = None
        bases = [self._base] * self._world.world_size
        for peer, segments in enumerate(self._world.exchange_segments(self._allocator.export())):
            if peer == self.rank:
                continue
            if error is not None:  # import_peer will not take these descriptors over
                for segment in segments:
                    if segment.fd is not None:
                        os.close(segment.fd)
                continue
            try:
                mapping = self._allocator.import_peer(peer, segments)
                if mapping.nbytes < self._allocator.nbytes:
                    raise HeapError(f"rank {peer}'s heap has {mapping.nbytes} bytes, not {self._allocator.nbytes}")
                if self._bases and mapping.base_ptr != self._bases[peer]:
                    raise HeapError(f"the allocator moved rank {peer}'s heap, although kernels know its address")
                bases[peer] = mapping.base_ptr
            except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
                error = e
        outcomes = self._world.all_gather_ints([error is None])
        if error is not None:
            raise error
        failed = [rank for rank, (ok,) in enumerate(outcomes) if not ok]
        if failed:
            raise PeerAccessError(f"{name_ranks(failed)} could not map the heap of a peer; see the error there")
        self._bases = self._bases or tuple(bases)
        self._exchanged_generation = generation

    def _raise_failure(self, error: Exception | None, reports: Sequence[Report], what: str) -> None:
        """After a step that failed somewhere: raise on every rank."""
        if error is not None:
            raise error
        failed = [rank for rank, report in enumerate(reports) if not report.ok]
        if failed:
            raise HeapError(f"{name_ranks(failed)} {what}; see the error there")

    def check_peers(self) -> None:
        """Raise PeerLostError if the process of a peer has ended.  Local and cheap."""
        self._world.check_peers()

    # -- addresses ----------------------------------------------------------------------------------------------------
    def translate(self, ptr: int, from_rank: int, to_rank: int) -> int:
        """Return the address of the same place in another rank's heap, both as seen by this process.

        Args:
            ptr: an address in `from_rank`'s heap.
            from_rank: rank whose heap `ptr` lies in.
            to_rank: rank whose heap the result lies in.

        Raises:
            ValueError: no such rank.
            NotOnHeapError: `ptr` does not lie in that heap.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        for rank in (from_rank, to_rank):
            if not 0 <= rank < len(self._bases):
                raise ValueError(f"there is no rank {rank} in a world of {len(self._bases)}")
        offset = ptr - self._bases[from_rank]
        if not 0 <= offset < self._allocator.nbytes:
            raise NotOnHeapError(
                f"address {ptr:#x} does not lie in rank {from_rank}'s heap, "
                f"{self._bases[from_rank]:#x} + {self._allocator.nbytes} bytes"
            )
        return self._bases[to_rank] + offset

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies wholly in this rank's own heap, first to last element; peers' memory does not count."""
        self._check_open()
        return self._offset_within(tensor) is not None

    def on_symmetric_heap(self, tensor: torch.Tensor) -> bool:
        """The same as `is_symmetric`."""
        return self.is_symmetric(tensor)

    def offset_of(self, tensor: torch.Tensor) -> int:
        """Return the offset in bytes of a tensor's first element; it is the same on every rank.

        Raises:
            NotOnHeapError: the tensor does not lie wholly on the heap.
        """
        return self.check_on_heap(tensor, "offset_of")

    def check_on_heap(self, tensor: torch.Tensor, what: str) -> int:
        """Raise unless a tensor lies wholly on the heap; return its offset in bytes.

        Args:
            tensor: what was passed by the user.
            what: what it was passed as, the first words of the message ("all_reduce: the input").

        Raises:
            NotOnHeapError: it does not.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        offset = self._offset_within(tensor)
        if offset is None:
            raise NotOnHeapError(
                f"{what}: the tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} on {tensor.device} does "
                "not lie on the symmetric heap; make it with the context (ctx.empty, ctx.zeros, ...) or bring it there "
                "with ctx.as_symmetric(tensor). Most torch operations return a tensor that is not on the heap: pass "
                "out= or copy the result"
            )
        return offset

    def _offset_within(self, tensor: torch.Tensor) -> int | None:
        if tensor.layout is not torch.strided:
            return None
        itemsize = tensor.element_size()
        # an empty tensor's own data_ptr() is 0, its storage's is not
        offset = tensor.untyped_storage().data_ptr() + tensor.storage_offset() * itemsize - self._base
        if tensor.is_contiguous():
            extent = tensor.numel() * itemsize
        elif tensor.numel() == 0:
            extent = 0
        else:
            extent = itemsize * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
        return int(offset) if offset >= 0 and offset + max(extent, 1) <= self._allocator.nbytes else None

    # -- description --------------------------------------------------------------------------------------------------
    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def nbytes(self) -> int:
        """Size of each rank's heap in bytes."""
        return self._allocator.nbytes

    @property
    def heap_bases(self) -> tuple[int, ...]:
        """Address of every rank's heap in this process; fixed once the heap is open."""
        return self._bases

    @property
    def version(self) -> int:
        """Changes whenever `live_blocks` would answer differently."""
        return self._version

    def live_blocks(self) -> Sequence[Block]:
        """Live blocks by ascending offset; freed ones do not count, even before all ranks agree."""
        version, blocks = self._blocks
        if version != self._version:
            records = sorted(self._live.values(), key=lambda record: record.offset)
            blocks = tuple(Block(r.offset, r.nbytes, format_label(r.label)) for r in records)
            self._blocks = (self._version, blocks)
        return blocks

    def stats(self) -> HeapStats:
        """Return the heap's figures.  Local: what was dropped but not agreed on may differ between ranks."""
        self._check_open()
        sub = self._sub
        dropped = set(self._collect_dropped())
        waiting = [*self._pending, *(self._live[number] for number in dropped)]
        pending = sum(sub.size_of(record.offset) for record in waiting)
        return HeapStats(
            reserved=self._allocator.nbytes,
            committed=self._residency.committed_bytes,
            allocated=sub.allocated_bytes - pending,
            pending=pending,
            free=sub.free_bytes,
            largest_free=sub.largest_free,
            peak=sub.peak_bytes,
            num_blocks=len(self._live) - len(dropped),
            fragmentation=1 - sub.largest_free / sub.free_bytes if sub.free_bytes else 0.0,
        )

    def _check_open(self) -> None:
        if not self._open or self._closed:
            raise HeapClosedError(
                "the symmetric heap is closed: its context was closed before this call"
                if self._closed
                else "the symmetric heap is not open yet: call open() on every rank"
            )

    def _check_alignment(self, alignment: int) -> None:
        check_alignment(alignment)
        if self._open and alignment > self._max_alignment:
            raise UnsupportedError(
                f"alignment {alignment} cannot be had: the heaps begin at multiples of {self._max_alignment} only"
            )


class Scope:
    """Frees, at its end, the blocks that were allocated inside and not kept; made by `SymmetricHeap.scope`."""

    def __init__(self, heap: SymmetricHeap) -> None:
        self._heap = heap
        self._records: dict[int, _Record] = {}

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let a tensor outlive this scope; an enclosing scope will free it, or nobody if there is none.

        Symmetric: every rank keeps the same tensors.

        Args:
            tensor: a tensor of the heap, or a view of one.

        Returns:
            The same tensor.

        Raises:
            HeapError: the scope is not open, or the tensor was freed before.
            NotOnHeapError: the tensor does not lie on the heap.
        """
        scopes = self._heap._scopes
        if self not in scopes:
            raise HeapError("keep: this scope is not open")
        record = self._heap._record_of(tensor, "keep")
        depth = scopes.index(self)
        if record.scope is not None and scopes.index(record.scope) >= depth:
            del record.scope._records[record.number]
            record.scope = scopes[depth - 1] if depth else None
            if record.scope is not None:
                record.scope._records[record.number] = record
        return tensor

    def __enter__(self) -> Scope:
        self._heap._check_open()
        if self in self._heap._scopes:
            raise HeapError("this scope is open already; make another one with scope()")
        self._heap._scopes.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scopes = self._heap._scopes
        if not self._heap._closed:
            # inner scopes that were left open (by a generator, say) end with this one
            for scope in reversed(scopes[scopes.index(self) :]):
                for record in list(scope._records.values()):
                    self._heap._retire(record)
        del scopes[scopes.index(self) :]
