"""The "torch" allocator: a symmetric heap in one block of torch's caching allocator, mapped into peers by IPC handles.

The whole heap is one tensor, so opening costs one allocation and one handle per peer, and the memory shows up in
torch's own statistics.  torch's expandable segments have no IPC handle; where they are on, they are switched off for
this one allocation, and torch's settings are as before afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from iris_allocators.driver import IpcDriver, Transaction, topology_command, vendor
from iris_allocators.info import TORCH_INFO
from iris_allocators.ranges import GpuHeap
from iris_core.errors import DriverError, HeapError, PeerAccessError, UnsupportedError
from iris_core.types import CreateRequest, PeerMapping, Segment
from iris_core.world.exchange import close_all

ALIGNMENT = 4096  # bytes of which the heap's base is a multiple; the device functions build on it
_OFFSET_NBYTES = 8  # of a segment's payload, before the handle: where the heap begins in what the handle stands for


class TorchAllocator(GpuHeap):
    """One rank's heap in torch's caching allocator; satisfies `iris_core.protocols.Allocator`.

    Raises:
        HeapError: the device is out of memory.
        UnsupportedError: this system cannot share GPU memory by IPC handle.
    """

    info = TORCH_INFO

    def __init__(self, request: CreateRequest, driver: IpcDriver | None = None) -> None:
        super().__init__(request, ALIGNMENT)
        self._driver: IpcDriver = driver or vendor(request.target.type).Ipc()
        self._topology = topology_command(request.target.type)
        self._peers: dict[int, tuple[int, PeerMapping]] = {}  # rank -> (what the driver opened, mapping)
        try:
            with _without_expandable_segments():
                pool = torch.empty(self.nbytes + ALIGNMENT, dtype=torch.uint8, device=self._device)  # room to align
            handle = self._driver.ipc_export(pool.data_ptr())
            # Never the address of the pool itself: torch knows its own blocks by address, and a memory pool on the heap
            # (ctx.mem_pool) gives it addresses from the heap's beginning on.
            self.base_ptr = (pool.data_ptr() // ALIGNMENT + 1) * ALIGNMENT
            allocation, _ = self._driver.address_range(self.base_ptr)
        except torch.OutOfMemoryError as e:
            raise HeapError(f"{self._device} has no room for a heap of {self.nbytes} bytes: {e}") from e
        except DriverError as e:
            raise UnsupportedError(
                f"{self._device}: this system does not share torch's memory by IPC handle ({e}): some containers do "
                "not, nor does torch's backend cudaMallocAsync; allocator='vmem' shares memory by file descriptor"
            ) from e
        self._memory = pool
        self._payload = (self.base_ptr - allocation).to_bytes(_OFFSET_NBYTES, "little") + handle

    def export(self) -> Sequence[Segment]:
        """Return the heap as one IPC handle, with the heap's offset in the allocation of the handle."""
        self._check_open()
        return (Segment(offset_bytes=0, nbytes=self.nbytes, payload=self._payload),)

    def import_peer(self, rank: int, segments: Sequence[Segment]) -> PeerMapping:
        try:
            self._check_open()
            if rank in self._peers:
                return self._peers[rank][1]
            if len(segments) != 1 or segments[0].fd is not None or len(segments[0].payload) <= _OFFSET_NBYTES:
                raise HeapError(f"rank {rank} did not send one IPC handle: its allocator is not 'torch'")
            inside, handle = segments[0].payload[:_OFFSET_NBYTES], segments[0].payload[_OFFSET_NBYTES:]
            opened = self._driver.ipc_open(handle)
            mapping = PeerMapping(rank, opened + int.from_bytes(inside, "little"), segments[0].nbytes)
            self._peers[rank] = opened, mapping
            return mapping
        except DriverError as e:
            raise PeerAccessError(
                f"{self._device} cannot map the memory of rank {rank} ({e}); `{self._topology}` shows which devices "
                "reach each other, and all ranks must run on one host, in one IPC namespace (containers: the same "
                "container, or --ipc=host). allocator='vmem' needs no IPC namespace"
            ) from e
        finally:
            close_all(each.fd for each in segments if each.fd is not None)

    def close(self) -> None:
        """Unmap peers, all that can be; then drop the pool, which tensors that still live keep.  Idempotent."""
        peers, self._peers = self._peers, {}
        self._memory = None
        with Transaction() as each:
            for opened, _ in peers.values():
                each.callback(self._driver.ipc_close, opened)


@contextlib.contextmanager
def _without_expandable_segments() -> Iterator[None]:
    """Disable torch's expandable segments within the block, then restore all settings."""
    get: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if get is None:  # before torch 2.12
        get = lambda: torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"]
    before = str(get())
    if "expandable_segments" not in before:
        yield
        return
    # all of it again: what is left out would get its default
    torch._C._accelerator_setAllocatorSettings(f"{before.rstrip(' ,')},expandable_segments:False")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
