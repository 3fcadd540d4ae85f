"""The "vmem" allocator: a symmetric heap of virtual addresses, backed by physical memory granule by granule.

Opening reserves one range of addresses for the heaps of all ranks and nothing else, so a heap may be larger than any
device.  `commit` creates physical memory for the granules in use and maps it; peers receive a descriptor per granule,
once, and map the same memory at the same offset of that rank's part of their range.

Releasing memory needs no exchange: an address is never remapped before all ranks have unmapped it, because a granule
that is committed again is announced in a later exchange of all ranks.

`as_symmetric` maps the memory of an existing tensor a second time, at an offset of the heap.  What a kernel writes at
one of the two addresses is seen at the other one from the next kernel on.

Lifetime: a tensor's storage holds a lease; mappings and addresses go when the allocator is closed and the last lease
is gone, if the device becomes idle: else (a kernel waits for a dead peer) all stays until the process ends.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch

from iris_allocators.driver import Transaction, VmmDriver, topology_command, vendor
from iris_allocators.info import VMEM_INFO
from iris_allocators.ranges import GpuHeap, Range
from iris_allocators.settings import VmemSettings
from iris_allocators.vmem.multicast import Multicast
from iris_allocators.vmem.pieces import AddressSpace, Lease, Piece, idle
from iris_core.errors import (
    DriverError,
    HeapError,
    HeapExhaustedError,
    PeerAccessError,
    SettingsError,
    UnsupportedError,
)
from iris_core.heap.backing import span
from iris_core.logs import logger
from iris_core.types import CreateRequest, PeerMapping, Segment
from iris_core.world.exchange import close_all

MAX_DEFAULT_GRANULE = 64 << 20  # bytes beyond which the default granule does not grow with the heap
_GRANULES_PER_HEAP = 64  # what a small heap is divided into by default
_MAX_ADDRESSES = 1 << 56  # more than any device can address
_MAX_OPEN_FDS = 256  # descriptors that one exchange opens in a process, its own and those received
_TAG = struct.Struct("<8sQQQ")  # magic, serial, size of the heap, granule
_MAGIC = b"irisvmem"


class VmemAllocator(GpuHeap):
    """One rank's heap in virtual memory; satisfies `Allocator`, `SupportsGrowth`, `SupportsImportTensor` and
    `SupportsMulticast`.

    Raises:
        SettingsError: the granule does not fit this device.
        HeapError: there are not enough addresses.
        UnsupportedError: the device has no virtual memory management.
    """

    info = VMEM_INFO

    def __init__(self, request: CreateRequest, driver: VmmDriver | None = None) -> None:
        self._world_size = request.world_size
        self._topology = topology_command(request.target.type)
        self._driver: VmmDriver = driver or vendor(request.target.type).Vmm(request.target.index)
        wants_multicast = getattr(request.settings, "multicast", False) and self._world_size > 1
        smallest = self._driver.granularity()
        if wants_multicast:
            smallest = max(smallest, self._driver.multicast_granularity(self._world_size, request.heap_nbytes))
        super().__init__(request, _granule(request, smallest))
        self.generation = 0  # counts commits and imports
        self._serials = itertools.count(1)
        self._fresh: dict[int, Piece] = {}  # by serial: what some peer may not have mapped yet
        self._offered: list[Piece] = []  # of these, what the last `export` described
        self._imported: dict[int, tuple[int, Piece]] = {}  # by handle: external memory, with its block's offset
        what = f"addresses for {self._world_size} heaps of {self.nbytes} bytes"
        if self._world_size * self.nbytes > _MAX_ADDRESSES:
            raise HeapError(f"there are no {what}: choose a smaller heap_size")
        try:
            self._space = AddressSpace(self._driver, self._world_size, self.nbytes, self.granularity)
        except DriverError as e:
            raise HeapError(f"{self._device} cannot reserve {what} ({e}): choose a smaller heap_size") from e
        self._own = self._space.tables[self._rank]
        self.base_ptr = self._own.base_ptr
        if wants_multicast:
            of = self._rank, self._world_size, self.nbytes, self.granularity
            self._own.multicast = Multicast(self._driver, *of)
        self._memory: Lease | None = Lease(self._driver, self._space, self._device)

    @property
    def committed_bytes(self) -> int:
        """Bytes backed by memory now, that of imported tensors included."""
        self._check_open()
        return self._own.nbytes

    # -- memory -------------------------------------------------------------------------------------------------------
    def commit(self, offset_bytes: int, nbytes: int) -> None:
        """Back all granules of a range with memory, unless they are backed already; none of them if it raises."""
        self._check_open()
        granule, own = self.granularity, self._own
        offsets = range(offset_bytes // granule * granule, offset_bytes + nbytes, granule)
        own.clear_doomed(offsets.start, -(-offsets.stop // granule) * granule)
        missing = [offset for offset in offsets if own.at(offset) is None]
        if not missing:
            return
        pieces: list[Piece] = []
        try:
            with Transaction() as undo:
                for offset in missing:
                    handle = self._driver.create(granule)
                    undo.callback(self._driver.release, handle)
                    pieces.append(Piece(offset, granule, next(self._serials), handle))
                own.map([(piece, cast("int", piece.handle)) for piece in pieces], undo)
                undo.commit()
        except DriverError as e:
            if "outofmemory" not in e.name.replace("_", "").lower():
                raise
            free, total = self._driver.memory_info()
            wanted = len(missing) * granule
            raise HeapExhaustedError(
                f"rank {self._rank}: {self._device} has no room for {wanted} more bytes of the heap ({e.name}): {free} "
                f"of its {total} bytes are free. torch.cuda.empty_cache() gives back what torch holds but does not use",
                requested_bytes=wanted,
                free_bytes=free,
                largest_free_bytes=free,
            ) from e
        self._take_in(pieces)

    def decommit(self, offset_bytes: int, nbytes: int) -> None:
        """Unmap a range; what the driver refuses to unmap is unmapped when the range is committed again."""
        self._check_open()
        end = offset_bytes + nbytes
        for piece in self._own.within(offset_bytes, end):
            self._fresh.pop(piece.serial, None)
        self._offered = [piece for piece in self._offered if piece.serial in self._fresh]
        self._imported = {h: (b, piece) for h, (b, piece) in self._imported.items() if not offset_bytes <= b < end}
        with Transaction() as each:
            for table in self._space.tables:
                pieces = table.within(offset_bytes, end)
                for piece in pieces:
                    piece.doomed = True
                each.callback(table.drop, pieces)

    # -- existing tensors ---------------------------------------------------------------------------------------------
    def import_extent(self, tensor: torch.Tensor) -> tuple[int, int, int]:
        with Transaction() as references:
            memory, start = self._find(tensor, references)
            _, there = self._place(memory, start) or (-1, -1)
            extent = sum(nbytes for _, nbytes in memory)
            return -(-extent // self.granularity) * self.granularity, start, there

    def import_tensor(self, offset_bytes: int, tensor: torch.Tensor, on_release: Callable[[], None]) -> torch.Tensor:
        """Map the memory of a tensor, of at least one element, unless it is mapped there already."""
        self._check_open()
        with Transaction() as undo:
            memory, inside = self._find(tensor, undo)
            pieces: list[Piece] = []
            block, start = self._place(memory, inside) or (-1, 0)
            if block != offset_bytes:
                start, end = offset_bytes + inside, offset_bytes
                for handle, nbytes in memory:
                    pieces.append(Piece(end, nbytes, next(self._serials), handle))
                    end += nbytes
                if end > self.nbytes:
                    raise HeapError(
                        f"{end - offset_bytes} bytes of memory do not fit at offset {offset_bytes} of the heap"
                    )
                self._own.clear_doomed(offset_bytes, end)
                self._own.map([(piece, cast("int", piece.handle)) for piece in pieces], undo)
            extent = span(tensor.shape, tensor.stride()) * tensor.element_size()
            part = Range(self.base_ptr + start, extent, (self._memory, tensor))
            raw = part.tensor(self._device, on_release)
            out = torch.empty(0, dtype=tensor.dtype, device=raw.device)
            out.set_(raw.untyped_storage(), 0, tensor.shape, tensor.stride())
            if pieces:
                undo.commit()  # the pieces hold the references from now on; those of memory found here are let go
        if pieces:
            self._take_in(pieces)
            self._imported.update((cast("int", piece.handle), (offset_bytes, piece)) for piece in pieces)
        return out

    def _find(self, tensor: torch.Tensor, references: Transaction) -> tuple[list[tuple[int, int]], int]:
        """Find a tensor's memory: handle and size of each piece, by address, and where the tensor begins in them.

        The handles are released by `references`.  UnsupportedError if the memory cannot be shared.
        """
        self._check_open()
        begin = tensor.data_ptr()
        extent = span(tensor.shape, tensor.stride()) * tensor.element_size()
        handles: list[tuple[int, int]] = []
        first = ptr = begin
        try:
            while ptr < begin + extent:
                handle = self._driver.retain(ptr)
                references.callback(self._driver.release, handle)
                if not handles:
                    os.close(self._driver.export_fd(handle))  # refused before anything is mapped
                base, nbytes = self._driver.address_range(ptr)
                first = first if handles else base
                handles.append((handle, nbytes))
                ptr = base + nbytes
        except DriverError as e:
            raise UnsupportedError(
                f"as_symmetric: the driver cannot share the memory of this tensor ({e}). It can share what torch "
                "allocates with PYTORCH_ALLOC_CONF=expandable_segments:True (set before the program starts; where the "
                "older PYTORCH_CUDA_ALLOC_CONF, or with ROCm PYTORCH_HIP_ALLOC_CONF, is set, torch reads that one "
                "instead), and tensors made inside `with ctx.use_mem_pool():` are on the heap from the beginning. To "
                "get a copy instead: ctx.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)"
            ) from e
        return handles, begin - first

    def _place(self, memory: list[tuple[int, int]], inside: int) -> tuple[int, int] | None:
        """Return (block, offset of the tensor) if all pieces are consecutive in one block of the heap, else None."""
        found = [self._imported.get(handle) for handle, _ in memory]
        if None in found:
            return None
        blocks, pieces = zip(*cast("list[tuple[int, Piece]]", found), strict=True)
        follow = all(one.end == other.offset_bytes for one, other in itertools.pairwise(pieces))
        return (blocks[0], pieces[0].offset_bytes + inside) if follow and len(set(blocks)) == 1 else None

    # -- peers --------------------------------------------------------------------------------------------------------
    def export(self) -> Sequence[Segment]:
        """Describe memory that some peer may not have mapped yet, one descriptor per piece; see `has_more`."""
        self._check_open()
        pieces = sorted(self._fresh.values(), key=lambda piece: piece.offset_bytes)
        if self._world_size > 1:
            pieces = pieces[: max(1, _MAX_OPEN_FDS // self._world_size)]
            with Transaction() as undo:
                for piece in pieces:
                    if piece.fd is None:
                        piece.fd = self._driver.export_fd(cast("int", piece.handle))
                        undo.callback(piece.close_fd)
                undo.commit()
        self._offered = pieces
        tags = (_TAG.pack(_MAGIC, piece.serial, self.nbytes, self.granularity) for piece in pieces)
        return [
            Segment(piece.offset_bytes, piece.nbytes, tag, piece.fd) for piece, tag in zip(pieces, tags, strict=True)
        ]

    @property
    def has_more(self) -> bool:
        return len(self._fresh) > len(self._offered)

    def exchanged(self) -> None:
        for piece in self._offered:
            del self._fresh[piece.serial]
            piece.close_fd()
        self._offered = []

    def import_peer(self, rank: int, segments: Sequence[Segment]) -> PeerMapping:
        """Map new memory of a peer; what is mapped already stays.  All of it, or none if it raises."""
        try:
            self._check_open()
            if not 0 <= rank < self._world_size:
                raise HeapError(f"there is no rank {rank} in a world of {self._world_size}")
            self._map_peer(rank, segments)
        except DriverError as e:
            raise PeerAccessError(
                f"{self._device} cannot map the memory of rank {rank} ({e}); `{self._topology}` shows which devices "
                "reach each other, and all ranks must run on one host"
            ) from e
        finally:
            close_all(each.fd for each in segments if each.fd is not None)
        return PeerMapping(rank, self._space.tables[rank].base_ptr, self.nbytes)

    def _map_peer(self, rank: int, segments: Sequence[Segment]) -> None:
        table = self._space.tables[rank]
        new: list[tuple[Piece, Segment]] = []
        for segment in segments:
            piece = self._read(rank, segment)
            table.clear_doomed(piece.offset_bytes, piece.end)
            there = table.overlapping(piece.offset_bytes, piece.end)
            if not there:
                new.append((piece, segment))
            elif [known.serial for known in there] != [piece.serial]:
                raise HeapError(f"rank {rank} replaced its memory at offset {piece.offset_bytes} without an agreement")
        with Transaction() as undo:
            with Transaction() as handles:  # never committed: once it is mapped, the mapping keeps the memory
                memory = []
                for piece, segment in new:
                    handle = self._driver.import_fd(cast("int", segment.fd))
                    handles.callback(self._driver.release, handle)
                    memory.append((piece, handle))
                table.map(memory, undo)
            undo.commit()
        table.add([piece for piece, _ in new])

    def _read(self, rank: int, segment: Segment) -> Piece:
        if len(segment.payload) != _TAG.size or segment.fd is None or not segment.payload.startswith(_MAGIC):
            raise HeapError(f"rank {rank} did not send a descriptor of virtual memory: its allocator is not 'vmem'")
        _, serial, nbytes, granule = _TAG.unpack(segment.payload)
        if (nbytes, granule) != (self.nbytes, self.granularity):
            raise HeapError(
                f"rank {rank}'s heap has {nbytes} bytes in granules of {granule}, this rank's {self.nbytes} in "
                f"granules of {self.granularity}: open all ranks with the same heap_size and IRIS_VMEM__GRANULE"
            )
        if segment.offset_bytes < 0 or segment.offset_bytes + segment.nbytes > self.nbytes:
            raise HeapError(f"rank {rank} described memory outside of its heap, at offset {segment.offset_bytes}")
        return Piece(segment.offset_bytes, segment.nbytes, serial)

    @property
    def multicast(self) -> Multicast | None:
        """What makes addresses of all ranks' heaps, if IRIS_VMEM__MULTICAST asks for it; None in a world of one."""
        return self._own.multicast

    # -- the end ------------------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Unmap everything and give the addresses back once the last tensor is gone.  Idempotent.

        Peers' memory is unmapped at once, unless the device does not become idle.
        """
        if self._memory is None:
            return
        for piece in self._own.within(0, self.nbytes):
            piece.close_fd()
        self._fresh.clear()
        self._offered.clear()
        self._imported.clear()
        peers = [table for table in self._space.tables if table is not self._own and len(table)]
        drops = [] if self.multicast is None else [self.multicast.release]
        drops += [partial(table.drop, table.within(0, self.nbytes)) for table in peers]
        if drops and self._memory.is_ours and idle(self._driver, self._device):
            for drop in drops:
                try:
                    drop()
                except DriverError as e:
                    logger.warning("%s: a peer's memory stays mapped: %s", self._device, e)
        self._memory = None

    def _take_in(self, pieces: Sequence[Piece]) -> None:
        self._own.add(pieces)
        self._fresh.update((piece.serial, piece) for piece in pieces)
        self.generation += 1


def _granule(request: CreateRequest, smallest: int) -> int:
    """Return the granule in bytes: as set, or a 64th of the heap within limits."""
    settings = request.settings
    chosen = settings.granule if isinstance(settings, VmemSettings) else None
    if chosen is not None:
        if chosen < smallest:
            raise SettingsError(
                f"IRIS_VMEM__GRANULE is {int(chosen)} bytes, but this device has no smaller pieces of memory than "
                f"{smallest}"
            )
        return int(chosen)
    granule = smallest
    while granule < min(request.heap_nbytes // _GRANULES_PER_HEAP, MAX_DEFAULT_GRANULE):
        granule *= 2
    return granule
