"""The symmetric heap: one address range per rank, the same blocks at the same offsets on every rank.

Peers are mapped once, when the heap opens, so `heap_bases` never change.  Blocks are handed out by a deterministic
sub-allocator: the same calls on every rank give the same offsets.  An allocation communicates only when memory grows,
when no free block is large enough, and when it is the first to reach beyond a half of the heap, or a further sixteenth
(`iris_core.heap.regions`).  Nothing is reused before all ranks agree that none needs it (`iris_core.heap.symmetry`).

One thread allocates and frees; only the release of dropped tensors may come from any thread.  First calls of
collectives may allocate, too (`iris_core.ccl.api`).
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from iris_core import errors
from iris_core.device.status import Standstill
from iris_core.errors import HeapExhaustedError
from iris_core.heap import external as imports
from iris_core.heap import regions, symmetry
from iris_core.heap.backing import Backing, span, tensor_at
from iris_core.heap.blocks import NOT_OPEN, BlockTable, HeapState, Label, Op, Record, Scope, format_label
from iris_core.heap.offsets import MIN_ALIGNMENT, SubAllocator
from iris_core.heap.regions import Region
from iris_core.heap.streams import HostStreams, Stream, StreamOrder, Streams
from iris_core.protocols import Allocator
from iris_core.types import Block, HeapStats, Network
from iris_core.world import World
from iris_core.world.failures import on_all_ranks

_SMALL = 32
"""A group may take this part of the system area, or less, also when half of it is used."""


class SymmetricHeap:
    """One rank's heap and its view of the peers' heaps.  When it is closed, its methods raise HeapClosedError.

    Args:
        allocator: owns the memory; the heap closes it.
        world: the ranks; the caller closes it.
        on_allocated: called with (offset_bytes, nbytes) after every allocation.
        usable_nbytes: bytes of each rank's heap, from its beginning, that are handed out; all by default.  What is
            left is the system area: memory that every rank has from the start, for Iris itself.
        streams: the device's streams; those of the host by default.
        device: torch's name of the device whose memory the heap is.
        gap_nbytes: bytes after each block that belong to no tensor, so that kernels which go too far are found.
    """

    def __init__(
        self, allocator: Allocator, world: World, *, on_allocated: Callable[[int, int], None] | None = None,
        usable_nbytes: int | None = None, streams: Streams | None = None, device: str = "cpu", gap_nbytes: int = 0,
    ) -> None:  # fmt: skip
        usable = allocator.nbytes if usable_nbytes is None else usable_nbytes
        self.streams: Streams = HostStreams() if streams is None else streams
        self.standstill: Standstill | None = None  # set when the context is opened
        offsets, blocks = SubAllocator(usable, gap_nbytes), BlockTable(allocator.base_ptr, allocator.nbytes)
        order, backing = StreamOrder(self.streams), Backing(allocator, world)
        self._state = HeapState(allocator, world, usable, offsets, blocks, order, backing, offsets.nbytes)
        self.rank: int = world.rank  #: this rank
        self.nbytes: int = allocator.nbytes  #: size of each rank's heap in bytes, with the system area
        self.usable_nbytes: int = usable  #: bytes of each rank's heap that allocations share
        #: the ranks of each node; memory is mapped within a node only
        self.nodes: tuple[tuple[int, ...], ...] = world.nodes
        #: address of every rank's heap in this process, from opening on; those of ranks on other nodes are one range
        #: that nothing can access
        self.heap_bases: tuple[int, ...] = ()
        #: how kernels reach ranks of other nodes; None where the allocator has no way, and on one node
        self.network: Network | None = None
        #: where a range begins that reaches the heaps of all ranks at once (IRIS_VMEM__MULTICAST), for
        #: `iris_triton.language.multimem`; 0 if there is none
        self.multicast_base: int = 0
        self.spare_nbytes = 0  #: bytes that `take_region` leaves in one piece; HeapExhaustedError where it could not
        regions.set_first_limit(self._state)
        self.system_area = regions.SystemArea(self._state)
        self._on_allocated = on_allocated
        self._device = device
        self._live: tuple[int, tuple[Block, ...]] = (-1, ())  # `live_blocks()` as of a version

    # -- opening and closing ------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Map every peer's heap.  Collective: every rank calls it once, before anything else.

        Raises:
            HeapError: an allocator reported something that cannot be.
            PeerAccessError: some rank could not map a peer's heap.
        """
        state, area = self._state, self.system_area
        if state.closed != NOT_OPEN:
            raise errors.HeapError("a heap is opened once")
        if area.nbytes:
            what = "could not get memory for the heap's system area"
            on_all_ranks(state.world, what, lambda: state.backing.commit(state.usable, area.nbytes))
        self.network, self.multicast_base = state.backing.open()
        self.heap_bases = state.backing.bases
        state.closed = ""

    def watch(self, watcher: Any) -> None:
        """Tell an object of every allocation and free from now on; None: no object.

        `allocated(offset_bytes, nbytes, storage)` comes after an allocation, `freed(storage._cdata)` with a free.
        """
        self._state.watcher = watcher

    def refuse(self, why: str) -> None:
        """Serve no call any more."""
        self._state.closed = why

    def close(self) -> None:
        """Release the peers' heaps and then the own one.  Idempotent; tensors that still live stay valid memory.

        Local: synchronise with the peers before, because they may still write.
        """
        if self._state.closed in ("", NOT_OPEN):
            self.refuse("the symmetric heap is closed: its context was closed before this call")
            self._state.allocator.close()
            self._state.backing.close()

    def refresh_peer_access(self) -> None:
        """Map what any rank's allocator has to share since the last exchange.

        Collective: every rank calls it.  The heap does it by itself whenever memory grows.
        """
        self._check_open()
        symmetry.map_if_new(self._state, symmetry.agree(self._state, Op.REFRESH))

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
            HeapExhaustedError: no free block is large enough; the heap can be used as before.
            HeapError: the current stream is being captured into a graph.
            SymmetryError: the ranks' histories differ (noticed only when it communicates).
        """
        return self.empty_strided((num_elements,), (1,), dtype, ("allocate", num_elements, dtype), alignment)

    def empty_strided(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, label: Label,
        alignment: int = MIN_ALIGNMENT,
    ) -> torch.Tensor:  # fmt: skip
        """Allocate a tensor of any strides, in elements and not negative; its content is undefined.  See `allocate`.

        `label` is the call that asks for it, as (name, argument, ...), for messages.
        """
        if shape and min(shape) < 0:
            raise ValueError(f"a tensor cannot have {min(shape)} elements along a dimension")
        if alignment > MIN_ALIGNMENT and not self._state.closed:
            possible = self._state.backing.max_alignment
            if alignment > possible:
                raise errors.UnsupportedError(
                    f"alignment {alignment} cannot be had: the heaps begin at multiples of {possible} only"
                )
        raw = self._allocate(span(shape, stride) * dtype.itemsize, alignment, label)
        # set_ makes a leaf that is no view of `raw`; an empty one still has a storage of its own on the heap
        return torch.empty(0, dtype=dtype, device=raw.device).set_(raw.untyped_storage(), 0, shape, stride)

    def _allocate(self, nbytes: int, alignment: int, label: Label) -> torch.Tensor:
        """Take a block and return its bytes: check, offset, commit, tensor, record.  If it raises, nothing changes."""
        state = self._state
        self._check_open()
        state.order.check_not_capturing(label[0])
        if state.blocks.released and state.world.world_size == 1:
            symmetry.reclaim_dropped(state)
        offset = self._reserve(nbytes, alignment, label)
        size = state.offsets.size_of(offset)
        number, on_release = state.blocks.next_number()
        try:
            if state.backing.needs_growth(offset, nbytes):
                self._grow(offset, nbytes, alignment, label)
            else:
                state.backing.commit(offset, nbytes)
            # a storage without bytes would have no address, so an empty tensor's storage has the whole block
            raw = state.allocator.tensor(offset, nbytes or size, on_release)
        except BaseException:
            state.offsets.free(offset)
            raise
        state.order.hand_out(offset, offset + size)
        storage = raw.untyped_storage()._cdata
        self._record(Record(number, offset, nbytes, offset, storage, label), Op.ALLOCATE, alignment)
        if state.watcher is not None:
            state.watcher.allocated(offset, nbytes, raw.untyped_storage())
        return raw

    def _reserve(self, nbytes: int, alignment: int, label: Label) -> int:
        """Find an offset; if no free block is large enough, reclaim with all ranks what none of them needs any more."""
        with contextlib.suppress(HeapExhaustedError):
            return self._state.offsets.allocate(nbytes, alignment)
        return symmetry.find_room(self._state, nbytes, alignment, label)

    def _grow(self, offset: int, nbytes: int, alignment: int, label: Label) -> None:
        """Back a range with memory that peers have to map; if it fails on a rank, every rank gives back what it got."""
        state = self._state
        what = f"could not get memory for {format_label(label)}"
        asked: dict[str, Any] = {"nbytes": nbytes, "alignment": alignment, "label": label}
        try:
            commit = lambda: state.allocator.commit(offset, nbytes)
            symmetry.map_if_new(state, symmetry.together(state, Op.ALLOCATE, what, commit, **asked))
        except BaseException as e:
            try:
                state.backing.take_back(offset, nbytes)
            except Exception as undo:  # noqa: BLE001 - the first error is the one to raise
                e.add_note(f"while giving back what this rank had got: {undo}")
            raise
        state.backing.note(offset, nbytes)

    def _record(self, record: Record, op: Op, alignment: int) -> None:
        self._state.blocks.add(record, op, alignment)
        record.streams = [self.streams.current()]
        if self._on_allocated is not None:
            self._on_allocated(record.offset, record.nbytes)

    def allocate_unscoped(self, nbytes: int, label: Label, alignment: int = MIN_ALIGNMENT) -> torch.Tensor:
        """Allocate bytes that no scope frees, to be handed out piece by piece.  See `allocate`."""
        raw = self._allocate(nbytes, alignment, label)
        if scopes := self._state.blocks.scopes:
            scopes[0].keep(raw)
        return raw

    def take_for_group(self, world: World, members: Sequence[int], nbytes: int, what: str) -> tuple[int, torch.Tensor]:
        """Return where some ranks have memory that no others know of, and this rank's bytes; see `regions.take`."""
        self._check_open()
        self._state.order.check_not_capturing(what)
        offset = regions.take(self._state, world, members, nbytes, what)
        return offset, self._state.allocator.tensor(offset, nbytes, lambda: None)

    def take_region(self, world: World, members: Sequence[int], nbytes: int, what: str, fill: int | None = 0) -> Region:
        """Make a region for some ranks, filled on all of them; UnsupportedError if memory is exhausted.

        Collective: every member calls it with the same arguments.  It comes from the system area as long as half of
        that stays for others, then from the heap: for the whole world from what users allocate, for a group from the
        heap's end, or what is left of the area.
        """
        is_group = len(members) < len(self.heap_bases)
        is_small = is_group and nbytes <= self.system_area.nbytes // _SMALL  # the heap may have large granules
        region = self._of_area(world, nbytes, what, 1 if is_small else 2)
        if region is None and self.spare_nbytes:  # what is free in one piece differs between members of other groups
            largest = self.stats().largest_free
            if not all(fits for (fits,) in world.all_gather_ints([largest - nbytes >= self.spare_nbytes])):
                problem = f"{what} would leave too little of the heap in one piece, on one of the ranks"
                free = {"free_bytes": largest, "largest_free_bytes": largest}
                raise HeapExhaustedError(problem, requested_bytes=nbytes, **free)
        if region is None:
            try:
                if is_group:
                    region = Region(*self.take_for_group(world, members, nbytes, what))
                else:
                    tensor = self.allocate_unscoped(nbytes, (what, nbytes))
                    region = Region(self.offset_of(tensor), tensor)
            except HeapExhaustedError as error:
                region = self._of_area(world, nbytes, what) if is_group else None
                if region is None:
                    raise errors.UnsupportedError(f"{what} needs {nbytes} bytes: {error}") from error
        region = replace(region, fill=fill)
        if fill is not None:
            region.clear()
            world.barrier()  # no peer stores there before it is filled
        return region

    def _of_area(self, world: World, nbytes: int, what: str, share: int = 1) -> Region | None:
        """Return a part of the system area; None if it is exhausted; see `SystemArea.reserve`."""
        with contextlib.suppress(errors.UnsupportedError):
            return self.system_area.region(self.system_area.reserve(world, nbytes, what, share), nbytes)
        return None

    def allocate_symmetric(self, *size: int, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Allocate a tensor and say where every rank's copy of it lies; see `iris_core.Iris.allocate_symmetric`."""
        like = torch.empty(*size, dtype=dtype, device="meta")
        shape = tuple(like.shape)
        out = self.empty_strided(shape, like.stride(), like.dtype, ("allocate_symmetric", shape, like.dtype))
        offset = out.untyped_storage().data_ptr() - self._state.allocator.base_ptr
        return out, torch.tensor([base + offset for base in self.heap_bases], dtype=torch.int64, device=out.device)

    def as_symmetric(self, external: torch.Tensor) -> torch.Tensor:
        """Bring a tensor onto the heap; see `iris_core.Iris.as_symmetric`."""
        self._check_open()
        passed = imports.agree_on_tensor(self._state, external, self._device)
        if passed.offset >= 0:
            return external
        if passed.extent is not None:
            record, out = imports.import_tensor(self._state, external.detach(), passed, self._reserve)
            self._record(record, Op.IMPORT, self._state.allocator.granularity)
            return out
        return self.empty_strided(passed.shape, passed.stride, external.dtype, passed.label).copy_(external.detach())

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
        """
        self._check_open()
        symmetry.retire(self._state, self._state.blocks.find(tensor, "free"))

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Say that kernels on another stream use a tensor, so that its block is not reused before they are done.

        Local: ranks may use different streams.  Needed for a stream that is current neither when the tensor is
        allocated nor when it is freed, as `Tensor.record_stream` is for torch's own memory.

        Args:
            tensor: a tensor of this heap, or any view that shares its storage.
            stream: a torch.cuda.Stream of this rank's device.

        Raises:
            TypeError: `stream` is no stream.
            NotOnHeapError: the tensor does not lie on this heap.
            HeapError: it was freed before, or its storage is not the one that the heap made.

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
        self._state.order.add(self._state.blocks.find(tensor, "record_stream"), stream)

    def scope(self) -> Scope:
        """Return a context manager that frees what is allocated inside; see `iris_core.Iris.scope`.  Symmetric."""
        self._check_open()
        state = self._state
        return Scope(state.blocks, lambda record: None if state.closed else symmetry.retire(state, record))

    def barrier_agreement(self, stream: Stream | None = None, *, wait: bool = True) -> None:
        """Finish the device's work, compare histories, and free what all ranks have freed or dropped.

        Collective: every rank calls it; it is a barrier of the hosts as well.  Errors are raised on every rank.

        Args:
            stream: wait for the work of this one alone; blocks that others still use stay pending until a later
                agreement.
            wait: whether to wait at all.

        Raises:
            SymmetryError: the histories differ.
            DeviceError: the work of a rank's device has failed.
            HeapError: a rank could not give memory back that is free; the next allocation there tries again.
        """
        self._check_open()
        symmetry.agree_at_barrier(self._state, stream, wait=wait)

    def check_peers(self, *, failed: bool = False) -> None:
        """Raise PeerLostError if a peer's process has ended, or it has given up; see `World.check_peers`.  Local."""
        self._state.world.check_peers(failed=failed)

    def stands_still(self, quiet: bool) -> bool:
        """Report that kernels of this rank have polled in vain; return whether no rank can end that.  Local, CPU."""
        return self.standstill is not None and self.standstill.report(quiet)

    def elsewhere(self) -> list[int]:
        """Return the ranks of this node that no kernel has waited on, while those of this rank did.  Local, CPU."""
        members = self._state.world.local_members
        return [] if self.standstill is None else [members[place] for place in self.standstill.elsewhere()]

    # -- addresses ----------------------------------------------------------------------------------------------------
    def translate(self, ptr: int, from_rank: int, to_rank: int) -> int:
        """Return the address in `to_rank`'s heap of the place that `ptr` is in `from_rank`'s, as seen by this process.

        Raises:
            ValueError: no such rank.
            UnsupportedError: the rank is on another node.
            NotOnHeapError: `ptr` does not lie in that heap.
        """
        self._check_open()
        bases, nbytes = self.heap_bases, self.nbytes
        for rank in (from_rank, to_rank):
            if not 0 <= rank < len(bases):
                raise ValueError(f"there is no rank {rank} in a world of {len(bases)}")
            self._state.world.check_reachable(rank, "translate")
        offset = ptr - bases[from_rank]
        if not 0 <= offset < nbytes:
            raise errors.NotOnHeapError(
                f"address {ptr:#x} does not lie in rank {from_rank}'s heap, which begins at {bases[from_rank]:#x} and "
                f"has {nbytes} bytes"
            )
        return bases[to_rank] + offset

    def as_remote(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """Return another rank's copy of a tensor of this heap; see `iris_core.Iris.as_remote`.  Local."""
        offset = self.offset_on(tensor, rank)
        self._state.world.check_reachable(rank, "as_remote")
        if rank == self.rank:
            return tensor.detach()
        return tensor_at(self.heap_bases[rank] + offset, tensor.dtype, tensor.device, tensor.shape, tensor.stride())

    def offset_on(self, tensor: torch.Tensor, rank: int, what: str = "as_remote") -> int:
        """Return the offset of a tensor that another rank has, too; `what` is for messages."""
        offset = self.offset_of(tensor, what)
        if not 0 <= operator.index(rank) < len(self.heap_bases):
            raise errors.ArgumentError(f"{what}: rank {rank} is out of range in a world of {len(self.heap_bases)}")
        if self.is_of_group(offset):
            raise errors.UnsupportedError(f"{what}: this is memory of Iris itself, which not every rank has mapped")
        if tensor.is_conj() or tensor.is_neg():
            raise errors.UnsupportedError(f"{what}: this is a lazy view; pass tensor.resolve_conj().resolve_neg()")
        return offset

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies wholly in this rank's own heap, first to last element; peers' memory does not count."""
        self._check_open()
        return self._state.backing.offset_within(tensor) is not None

    on_symmetric_heap = is_symmetric

    def offset_of(self, tensor: torch.Tensor, what: str = "offset_of") -> int:
        """Return the offset in bytes of a tensor's first element, the same on every rank.

        Args:
            tensor: lies wholly on this rank's own heap.
            what: begins the message of errors: what the tensor was passed as ("all_reduce: the input").

        Raises:
            NotOnHeapError, HeapError: it does not, or it was freed.
        """
        self._check_open()
        offset = self._state.backing.offset_within(tensor)
        if offset is None:
            raise errors.NotOnHeapError(
                f"{what}: the tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} on {tensor.device} does "
                "not lie on the symmetric heap; make it with the context (ctx.empty, ctx.zeros, ...) or bring it there "
                "with ctx.as_symmetric(tensor). Most torch operations return a tensor that is not on the heap: pass "
                "out= or copy the result"
            )
        self._state.blocks.of(tensor, what)
        return offset

    # -- description --------------------------------------------------------------------------------------------------
    def is_of_group(self, offset_bytes: int) -> bool:
        """Whether a group of ranks may have its own memory at an offset: allocations of users have not come there."""
        return self._state.offsets.limit <= offset_bytes < self.nbytes

    def network_words(self) -> tuple[int, ...]:
        """Return the words of the network for the context tensor; none where there is no network."""
        network = self.network
        return () if network is None else (*network.words, self._state.backing.address_of_nothing())

    @property
    def version(self) -> int:
        """Changes whenever `live_blocks` would answer differently."""
        return self._state.blocks.version + len(self._state.groups)  # neither ever falls

    def live_blocks(self) -> Sequence[Block]:
        """Live blocks by ascending offset: allocations, what groups of this rank have, and the system area last.

        Freed ones do not count, but for those that calls of this rank still use.
        """
        version, state = self.version, self._state
        if self._live[0] != version:
            records = [*state.blocks.live.values()]  # first: another thread may be freeing one, which is pending then
            records += [record for record in list(state.blocks.pending) if not state.order.is_idle(record)]
            blocks = [Block(each.offset, each.nbytes, format_label(each.label)) for each in records]
            blocks += [Block(start, end - start, "freed") for start, end in state.order.in_use()]
            blocks += state.groups
            if self.system_area.nbytes:
                blocks.append(Block(state.usable, self.system_area.nbytes, "Iris itself"))
            self._live = version, tuple(sorted(blocks, key=lambda block: block.offset_bytes))
        return self._live[1]

    def stats(self) -> HeapStats:
        """Return the heap's figures.  Local: what was dropped but not agreed on may differ between ranks."""
        self._check_open()
        state, offsets = self._state, self._state.offsets
        waiting = state.blocks.waiting()
        holders = Counter(record.offset for record in waiting)
        pending = sum(offsets.size_of(at) for at, count in holders.items() if count == state.holders.get(at, 1))
        free, largest = offsets.free_below(state.floor)
        return HeapStats(
            reserved=state.usable,
            committed=state.backing.committed_bytes,
            allocated=offsets.allocated_bytes - pending,
            pending=pending,
            free=free,
            largest_free=largest,
            peak=offsets.peak_bytes,
            num_blocks=len(state.blocks.live) - sum(not record.pending for record in waiting),
            fragmentation=1 - largest / free if free else 0.0,
        )

    def _check_open(self) -> None:
        if self._state.closed:
            raise errors.HeapClosedError(self._state.closed)
