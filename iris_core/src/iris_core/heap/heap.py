"""The symmetric heap: one address range per rank, the same blocks at the same offsets on every rank.

Peers are mapped once, when the heap opens, so `heap_bases` never change.  Blocks are handed out by a deterministic
sub-allocator: the same calls on every rank give the same offsets, and an allocation communicates only when memory
grows, when there is no room, and when it is the first to reach beyond a half of the heap, or a further sixteenth, which
groups of ranks could have until then (`iris_core.heap.regions`).

Nothing is reused before all ranks agree that nobody needs it, because a peer that has not reached its own free may
still write to the block: `iris_core.heap.blocks` has the states, `iris_core.heap.reclaim` the agreement.

One thread allocates and frees; only the release of dropped tensors may come from any thread.  First calls of
collectives may allocate, too (`iris_core.ccl.api`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from iris_core.errors import (
    ArgumentError,
    DeviceError,
    HeapClosedError,
    HeapError,
    LayoutError,
    NotOnHeapError,
    UnsupportedError,
)
from iris_core.heap.arguments import same_device
from iris_core.heap.backing import PeerMap, tensor_at
from iris_core.heap.blocks import BlockTable, Record, Scope
from iris_core.heap.external import TensorImporter
from iris_core.heap.growth import Growth
from iris_core.heap.offsets import MIN_ALIGNMENT, SubAllocator, check_alignment
from iris_core.heap.reclaim import Reclaimer
from iris_core.heap.regions import GroupMemory
from iris_core.heap.residency import Residency
from iris_core.heap.streams import HostStreams, StreamOrder
from iris_core.heap.symmetry import History, Label, Op, Passed, agree, agree_on_tensor
from iris_core.types import Block, Capability, HeapStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.device.standstill import Standstill
    from iris_core.heap.external import Extent
    from iris_core.heap.streams import Stream, Streams
    from iris_core.protocols import Allocator
    from iris_core.world import World


class SymmetricHeap:
    """One rank's heap and its view of the peers' heaps.

    Args:
        allocator: owns the memory; the heap closes it.
        world: the ranks; the caller closes it.
        on_allocated: called with (offset_bytes, nbytes) after every allocation.
        usable_nbytes: bytes of each rank's heap, from its beginning, that are handed out; all by default.  What is
            left is the system area: memory that every rank has from the start, for Iris itself.
        streams: the device's streams; those of the host by default.
        device: torch's name of the device whose memory the heap is.
    """

    def __init__(
        self,
        allocator: Allocator,
        world: World,
        *,
        on_allocated: Callable[[int, int], None] | None = None,
        usable_nbytes: int | None = None,
        streams: Streams | None = None,
        device: str = "cpu",
    ) -> None:
        self._usable = allocator.nbytes if usable_nbytes is None else usable_nbytes
        if not 0 < self._usable <= allocator.nbytes:
            raise ValueError(f"usable_nbytes={usable_nbytes} of an allocator of {allocator.nbytes} bytes")
        self._allocator = allocator
        self._world = world
        self._on_allocated = on_allocated
        self.streams: Streams = HostStreams() if streams is None else streams
        """The device's streams."""
        self.standstill: Standstill | None = None
        """What CPU ranks know of each other's kernels; set when the context is opened."""
        self.check_hosts: Callable[[int], None] = lambda address: None
        """Raises what has failed on another rank's host; likewise."""
        self._order = StreamOrder(self.streams)
        self._device = device
        self._base = allocator.base_ptr
        self._sub = SubAllocator(self._usable)
        self._residency = Residency(allocator)
        self._history = History()
        self._table = BlockTable(allocator.base_ptr, allocator.nbytes, self._history)
        self._peers = PeerMap(allocator, world)
        self._groups = GroupMemory(allocator, world, self._sub, self._peers, self._residency)
        self._growth = Growth(allocator, world, self._history, self._peers, self._residency)
        self._importer = TensorImporter(
            allocator, world, self._history, self._table, self._peers, self._residency, self._sub
        )
        self._reclaimer = Reclaimer(
            world,
            self._history,
            self._table,
            self._sub,
            peers=self._peers,
            residency=self._residency,
            order=self._order,
            importer=self._importer,
            groups=self._groups,
        )
        self._live: tuple[int, tuple[Block, ...]] = (-1, ())  # `live_blocks()` as of a version
        self._open = False
        self._closed = ""  # or why

    # -- opening and closing ------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Map every peer's heap.

        Collective: every rank calls it once, before anything else.

        Raises:
            HeapError: an allocator reported something that cannot be.
            PeerAccessError: some rank could not map a peer's heap.
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
        """
        if self._open or self._closed:
            raise HeapError("a heap is opened once")
        if self.system_nbytes:
            self._growth.at_opening(self._usable, self.system_nbytes)
        self._peers.open()
        self._open = True

    def refuse(self, why: str) -> None:
        """Serve no call any more; in a process that was forked off, whose parent goes on, no more than this."""
        self._closed = why

    def close(self) -> None:
        """Release the peers' heaps and then the own one.  Idempotent; tensors that still live stay valid memory.

        Local: synchronise with the peers before, because they may still write.
        """
        if not self._closed:
            self.refuse("the symmetric heap is closed: its context was closed before this call")
            self._allocator.close()

    def refresh_peer_access(self) -> None:
        """Map what any rank's allocator has to share since the last exchange; does nothing if there is nothing new.

        Collective: every rank calls it.  The heap does it by itself whenever memory grows.

        Raises:
            HeapClosedError: the heap is closed.
            SymmetryError: the ranks' histories differ.
            PeerAccessError: some rank could not map a peer's heap.
        """
        self._check_open()
        self._peers.exchange_if_dirty(agree(self._world, self._history, Op.REFRESH, dirty=self._peers.dirty))

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
            HeapError: the current stream is being captured into a graph.
            SymmetryError: the ranks' histories differ (noticed only when it communicates).
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

    def allocate_unscoped(self, nbytes: int, label: Label, alignment: int) -> torch.Tensor:
        """Allocate bytes that no scope frees, for somebody who hands them out piece by piece.  See `allocate`."""
        raw = self._allocate(nbytes, alignment, label)
        if self._table.scopes:
            self._table.scopes[0].keep(raw)
        return raw

    def take_for_group(self, world: World, members: Sequence[int], nbytes: int, what: str) -> tuple[int, torch.Tensor]:
        """Return where some ranks have memory that no others know of, and this rank's bytes; see `GroupMemory.take`."""
        self._check_open()
        self._order.check_not_capturing(what)
        offset = self._groups.take(world, members, nbytes, what)
        return offset, self._allocator.tensor(offset, nbytes, lambda: None)

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
        offset = out.untyped_storage().data_ptr() - self._allocator.base_ptr
        return out, torch.tensor([base + offset for base in self._peers.bases], dtype=torch.int64, device=out.device)

    def as_symmetric(self, external: torch.Tensor) -> torch.Tensor:
        """Bring a tensor onto the heap.

        Where the allocator can import memory (`Capability.IMPORT_TENSOR`) the result shares the tensor's memory;
        otherwise it is a copy, detached from autograd.  A tensor that lies on the heap already is returned as it is.

        Collective: every rank calls it, with a tensor of the same shape, strides and dtype, which lies on the heap
        already on every rank, at the same offset, or on none.  The ranks compare this before anything is taken, so an
        error is raised on all of them, and nothing has changed.

        Args:
            external: a strided tensor on the heap's device.

        Raises:
            SymmetryError: the ranks' tensors do not fit together.
            DeviceError: some rank's tensor is on another device than its heap.
            LayoutError: some rank's tensor is sparse, quantized, or has another layout than torch.strided.
            UnsupportedError: some rank's tensor cannot be imported, or is a lazy view of torch's (`conj()`, or `imag`
                of one) and not on the heap yet.
            TypeError: some rank's argument is no tensor.
            HeapExhaustedError: no room; the heap can be used as before.
            HeapError: the current stream of some rank is being captured into a graph.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        error: Exception | None = None
        passed, extent, label = Passed(), None, ("as_symmetric",)
        try:
            passed, extent, label = self._examine(external)
        except Exception as e:  # noqa: BLE001 - raised below, once the other ranks know
            error = e
        agree_on_tensor(self._world, self._history, label, passed, error)
        if passed.offset >= 0:
            return external
        if extent is not None:
            record, out = self._importer.run(external.detach(), label, extent, self._reclaimer.reserve)
            self._register(record, Op.IMPORT, self._allocator.granularity)
            return out
        return self.empty_strided(passed.shape, passed.stride, external.dtype, label).copy_(external.detach())

    def _examine(self, external: torch.Tensor) -> tuple[Passed, Extent | None, Label]:
        """What as_symmetric has to know of this rank's tensor; the extent only if its memory is to be imported."""
        if not isinstance(external, torch.Tensor):
            raise TypeError(f"as_symmetric takes a torch tensor, not {type(external).__name__}")
        if external.layout is not torch.strided:
            raise LayoutError(f"as_symmetric: only torch.strided tensors can be on the heap, not {external.layout}")
        if external.is_quantized:
            raise LayoutError("as_symmetric: quantized tensors cannot be on the heap; pass their integers, int_repr()")
        if not same_device(external.device, self._device):
            raise DeviceError(
                f"as_symmetric: the tensor is on {external.device}, but this rank's heap is on {self._device}: pass "
                f"tensor.to({self._device!r})"
            )
        shape, dtype = tuple(external.shape), external.dtype
        label = ("as_symmetric", shape, dtype)
        offset = self._peers.offset_within(external)
        if offset is not None:
            return Passed(offset, shape, external.stride(), str(dtype)), None, label
        if external.is_conj() or external.is_neg():  # kernels and peers would see what is in memory
            raise UnsupportedError(
                "as_symmetric: this tensor is a lazily conjugated or negated view, whose memory holds other values "
                "than it shows; pass tensor.resolve_conj().resolve_neg()"
            )
        self._order.check_not_capturing("as_symmetric")
        if Capability.IMPORT_TENSOR in self._allocator.info.provides and external.numel():
            self._reclaimer.wait_for_device()  # memory may be taken off the heap to make room for the tensor's
            extent = self._importer.extent(external.detach())
            return Passed(-1, shape, external.stride(), str(dtype)), extent, label
        like = torch.empty_like(external, device="meta")  # what torch makes of strides that are not dense
        return Passed(-1, shape, like.stride(), str(dtype)), None, label

    def _allocate(self, nbytes: int, alignment: int, label: Label) -> torch.Tensor:
        """Take a block and return the bytes of it; nothing has changed if it raises."""
        self._check_open()
        self._order.check_not_capturing(label[0])
        if self._table.has_released and self._world.world_size == 1:
            self._reclaimer.reclaim_dropped()
        offset = self._reclaimer.reserve(nbytes, alignment, label)
        number, on_release = self._table.next_number()
        try:
            if self._residency.needs_growth(offset, nbytes):
                self._growth.run(offset, nbytes, alignment, label)
            else:
                self._residency.commit(offset, nbytes)
            # a storage without bytes would have no address, so an empty tensor's storage has the whole block
            raw = self._allocator.tensor(offset, nbytes or self._sub.size_of(offset), on_release)
        except BaseException:
            self._sub.free(offset)
            raise
        self._order.hand_out(offset, offset + self._sub.size_of(offset))
        record = Record(number, offset, nbytes, offset, raw.untyped_storage()._cdata, label)
        self._register(record, Op.ALLOCATE, alignment)
        return raw

    def _register(self, record: Record, op: Op, alignment: int) -> None:
        self._history.record(op, record.nbytes, alignment, record.offset, record.label)
        self._table.add(record)
        self._order.begin(record)
        if self._on_allocated is not None:
            self._on_allocated(record.offset, record.nbytes)

    # -- freeing ------------------------------------------------------------------------------------------------------
    def free(self, tensor: torch.Tensor) -> None:
        """Give a tensor's block back; the tensor and its views must not be used afterwards.

        Symmetric: every rank calls it for the same tensor, in the same order with other allocations and frees.
        Nothing is communicated: in a world of several ranks the block is reused after the next barrier of all.
        Stream: kernels may still use the block that were launched on the stream current now, on the one current when it
        was allocated, or on one named with `record_stream`; the host does not wait for them.

        Args:
            tensor: a tensor of this heap, or any view that shares its storage.

        Raises:
            NotOnHeapError: the tensor does not lie on this heap.
            HeapError: it was freed before, or its storage is not the one that the heap made, or the current stream is
                being captured into a graph.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        self._reclaimer.retire(self._table.find(tensor, "free"))

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Say that kernels on another stream use a tensor, so that its block is not reused before they are done.

        Local: ranks may use different streams.  It is what `Tensor.record_stream` is for torch's own memory (and does
        nothing for memory of the heap).  Needed for a stream that is current neither when the tensor is allocated nor
        when it is freed.

        Args:
            tensor: a tensor of this heap, or any view that shares its storage.
            stream: a torch.cuda.Stream of this rank's device.

        Raises:
            TypeError: `stream` is no stream.
            NotOnHeapError: the tensor does not lie on this heap.
            HeapError: it was freed before, or its storage is not the one that the heap made.
            HeapClosedError: the heap is closed.

        Example:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                kernel[grid](x, ...)
            ctx.heap.record_stream(x, side)
            ctx.free(x)    # not handed out before the kernel has finished
        """
        self._check_open()
        if not hasattr(stream, "record_event"):
            raise TypeError(f"record_stream: stream must be a torch stream, not {type(stream).__name__}")
        self._order.add(self._table.find(tensor, "record_stream"), stream)

    def scope(self) -> Scope:
        """Return a context manager that frees what is allocated inside.

        Symmetric: every rank enters and leaves it at the same place.

        Example:
            with heap.scope() as scope:
                work = heap.allocate(1 << 20, torch.float32)   # freed at the end
                result = scope.keep(heap.allocate(16, torch.float32))
        """
        self._check_open()
        return Scope(self._table, self._reclaimer.retire, lambda: not self._closed)

    def barrier_agreement(self, stream: Stream | None = None, *, wait: bool = True) -> None:
        """Finish the device's work, compare histories, and free what all ranks have freed or dropped.

        Collective: every rank calls it.  No rank returns before all have called, so it is a barrier of the hosts as
        well.

        Args:
            stream: wait for the work of this one alone; blocks that others still use stay pending until a later
                agreement.
            wait: whether to wait at all.

        Raises:
            SymmetryError: the histories differ; raised on every rank.
            DeviceError: the work of a rank's device has failed; raised on every rank.
            HeapError: a rank could not give memory back that is free; raised on every rank.  The heap can be used as
                before: the next allocation there tries again.
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerLostError: a rank's process has ended.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        self._reclaimer.at_barrier(stream, wait=wait)

    def check_peers(self, address: int = 0) -> None:
        """Raise if a peer cannot end a wait for a word; see `iris_core.protocols.HeapView`.  Local and cheap."""
        self._world.check_peers()
        if address:
            self.check_hosts(address)

    def stands_still(self, quiet: bool) -> bool:
        """Say that kernels of this rank have polled in vain, and return whether no rank can end that.

        Local.  Only where all ranks' kernels run on the CPU; see `iris_core.device.standstill`.
        """
        return self.standstill is not None and self.standstill.report(quiet)

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
        return self._peers.translate(ptr, from_rank, to_rank)

    def as_remote(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return another rank's copy of a tensor of this heap; see `iris_core.Iris.as_remote`.  Local."""
        offset = self.check_on_heap(tensor, "as_remote")
        if not 0 <= rank < len(self.heap_bases):
            raise ArgumentError(f"as_remote: rank {rank} is out of range in a world of {len(self.heap_bases)}")
        if self.is_of_group(offset):
            raise UnsupportedError("as_remote: this is memory of Iris itself, which not every rank has mapped")
        if tensor.is_conj() or tensor.is_neg():
            raise UnsupportedError("as_remote: this is a lazy view; pass tensor.resolve_conj().resolve_neg()")
        if rank == self.rank:
            return tensor.detach()
        address = self.heap_bases[rank] + offset
        return tensor_at(address, tensor.dtype, tensor.device, tensor.shape, tensor.stride())

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies wholly in this rank's own heap, first to last element; peers' memory does not count."""
        self._check_open()
        return self._peers.offset_within(tensor) is not None

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
        offset = self._peers.offset_within(tensor)
        if offset is None:
            raise NotOnHeapError(
                f"{what}: the tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} on {tensor.device} does "
                "not lie on the symmetric heap; make it with the context (ctx.empty, ctx.zeros, ...) or bring it there "
                "with ctx.as_symmetric(tensor). Most torch operations return a tensor that is not on the heap: pass "
                "out= or copy the result"
            )
        return offset

    # -- description --------------------------------------------------------------------------------------------------
    @property
    def rank(self) -> int:
        """This rank."""
        return self._world.rank

    @property
    def nbytes(self) -> int:
        """Size of each rank's heap in bytes, with the system area."""
        return self._allocator.nbytes

    @property
    def usable_nbytes(self) -> int:
        """Bytes of each rank's heap that allocations share."""
        return self._usable

    def is_of_group(self, offset_bytes: int) -> bool:
        """Whether a group of ranks may have its own memory at an offset: allocations of users have not come there."""
        return self._sub.limit <= offset_bytes < self.nbytes

    @property
    def system_nbytes(self) -> int:
        """Size in bytes of the system area, which lies behind what allocations share."""
        return self._allocator.nbytes - self._usable

    def system_tensor(self, offset_bytes: int, nbytes: int) -> torch.Tensor:
        """Return bytes of the system area, for Iris itself; nobody accounts for them.

        Args:
            offset_bytes: where they begin, from the beginning of the area.
            nbytes: how many.

        Raises:
            ValueError: the range does not lie in the area.
            HeapClosedError: the heap is closed.
        """
        self._check_open()
        if offset_bytes < 0 or nbytes < 1 or offset_bytes + nbytes > self.system_nbytes:
            raise ValueError(f"{nbytes} bytes at {offset_bytes} of a system area of {self.system_nbytes} bytes")
        return self._allocator.tensor(self._usable + offset_bytes, nbytes, lambda: None)

    @property
    def heap_bases(self) -> tuple[int, ...]:
        """Address of every rank's heap in this process; fixed once the heap is open."""
        return self._peers.bases

    @property
    def version(self) -> int:
        """Changes whenever `live_blocks` would answer differently."""
        return self._table.version + len(self._groups.blocks)  # neither ever falls

    def live_blocks(self) -> Sequence[Block]:
        """Live blocks by ascending offset: allocations, what groups of this rank have, and the system area last.

        Freed ones do not count, even before all agree, but for those that calls of this rank were still using when they
        were freed.
        """
        if self._live[0] != self.version:
            version = self.version
            blocks = [*self._table.blocks(), *self._order.still_used(self._table.pending), *self._groups.blocks]
            if self.system_nbytes:
                blocks.append(Block(self._usable, self.system_nbytes, "Iris itself"))
            self._live = version, tuple(sorted(blocks, key=lambda block: block.offset_bytes))
        return self._live[1]

    def stats(self) -> HeapStats:
        """Return the heap's figures.  Local: what was dropped but not agreed on may differ between ranks."""
        self._check_open()
        sub = self._sub
        waiting = self._table.waiting()
        pending = sum(
            sub.size_of(offset)
            for offset, number in Counter(record.offset for record in waiting).items()
            if number == self._importer.num_holders(offset)
        )
        free, largest = sub.free_below(self._groups.floor)
        return HeapStats(
            reserved=self._usable,
            committed=self._residency.committed_bytes,
            allocated=sub.allocated_bytes - pending,
            pending=pending,
            free=free,
            largest_free=largest,
            peak=sub.peak_bytes,
            num_blocks=len(self._table.live) - sum(not record.pending for record in waiting),
            fragmentation=1 - largest / free if free else 0.0,
        )

    def _check_open(self) -> None:
        if not self._open or self._closed:
            raise HeapClosedError(self._closed or "the symmetric heap is not open yet: call open() on every rank")

    def _check_alignment(self, alignment: int) -> None:
        check_alignment(alignment)
        if self._open and alignment > self._peers.max_alignment:
            raise UnsupportedError(
                f"alignment {alignment} cannot be had: the heaps begin at multiples of {self._peers.max_alignment} only"
            )
