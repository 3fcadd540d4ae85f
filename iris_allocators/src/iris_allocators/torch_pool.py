"""The "torch" allocator: a symmetric heap in one block of torch's caching allocator, mapped into peers by IPC handles.

The whole heap is one tensor, so opening costs one allocation and one handle per peer, and the memory shows up in
torch's own statistics.  torch's expandable segments cannot be shared by IPC handle; where they are on, they are
switched off for this one allocation.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from iris_allocators._driver import IpcDriver, ipc_driver
from iris_allocators._plugin import TORCH_INFO
from iris_core.errors import DriverError, HeapClosedError, HeapError, PeerAccessError
from iris_core.types import PeerMapping, Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.types import CreateRequest, PluginInfo

ALIGNMENT = 4096
"""Bytes of which the heap's base is a multiple; the device functions build on it."""


class _Block:
    """A range of the pool as torch takes it in: `__cuda_array_interface__`, version 3."""

    def __init__(self, pool: torch.Tensor, ptr: int, nbytes: int) -> None:
        self._pool = pool  # the pool lives as long as any block
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (ptr, False),
            "strides": None,
            "version": 3,
        }


class TorchAllocator:
    """One rank's heap in torch's caching allocator; satisfies `iris_core.protocols.Allocator`.

    Args:
        request: rank, device and size of the heap in bytes.
        driver: calls into the GPU's driver; that of the device by default.

    Raises:
        HeapError: the device has not that much memory.
        DriverError: the driver cannot share the memory.
    """

    def __init__(self, request: CreateRequest, driver: IpcDriver | None = None) -> None:
        self._driver = driver or ipc_driver(request.target.type)
        self._device = request.target.torch_device
        self._nbytes = -(-request.heap_nbytes // ALIGNMENT) * ALIGNMENT
        self._peers: dict[int, tuple[int, PeerMapping]] = {}  # rank -> (what the driver opened, mapping)
        try:
            self._pool: torch.Tensor | None = self._allocate()
        except torch.OutOfMemoryError as e:
            raise HeapError(f"{self._device} has no room for a heap of {self._nbytes} bytes: {e}") from e
        self._base_ptr = -(-self._pool.data_ptr() // ALIGNMENT) * ALIGNMENT

    @property
    def info(self) -> PluginInfo:
        """The plugin's description."""
        return TORCH_INFO

    @property
    def base_ptr(self) -> int:
        """Address of this rank's heap."""
        return self._base_ptr

    @property
    def nbytes(self) -> int:
        """Size of the heap in bytes."""
        return self._nbytes

    @property
    def granularity(self) -> int:
        """The whole heap: it is there from the beginning."""
        return self._nbytes

    @property
    def generation(self) -> int:
        """Always 1: the whole heap is exported at once and never grows."""
        return 1

    def commit(self, offset_bytes: int, nbytes: int) -> None:
        """Nothing to do: the memory is there."""

    def tensor(self, offset_bytes: int, nbytes: int, on_release: Callable[[], None]) -> torch.Tensor:
        """Return a 1-D uint8 tensor over a range; its storage keeps the pool alive.

        Raises:
            HeapClosedError: the allocator is closed.
        """
        if self._pool is None:
            raise HeapClosedError("the heap is closed")
        block = _Block(self._pool, self._base_ptr + offset_bytes, nbytes)
        guard = weakref.finalize(block, on_release)
        guard.atexit = False
        return torch.as_tensor(block, device=self._device)

    def owns(self, ptr: int) -> bool:
        """Whether an address lies in this rank's own heap."""
        return self._base_ptr <= ptr < self._base_ptr + self._nbytes

    def export(self) -> Sequence[Segment]:
        """The heap as one IPC handle and the heap's offset in what the handle stands for.

        Raises:
            HeapClosedError: the allocator is closed.
            DriverError: the driver refuses.
        """
        if self._pool is None:
            raise HeapClosedError("the heap is closed")
        allocation, _ = self._driver.address_range(self._base_ptr)
        handle = self._driver.ipc_export(self._base_ptr)
        inside = self._base_ptr - allocation
        return (Segment(offset_bytes=0, nbytes=self._nbytes, payload=inside.to_bytes(8, "little") + handle),)

    def import_peer(self, rank: int, segments: Sequence[Segment]) -> PeerMapping:
        """Map a peer's heap.

        Raises:
            HeapClosedError: the allocator is closed.
            HeapError: the segments do not describe one heap of this kind.
            PeerAccessError: this device cannot map that memory.
        """
        if self._pool is None:
            raise HeapClosedError("the heap is closed")
        if rank in self._peers:
            return self._peers[rank][1]
        if len(segments) != 1 or segments[0].fd is not None or len(segments[0].payload) <= 8:
            raise HeapError(f"rank {rank} did not send one IPC handle: its allocator is not 'torch'")
        inside = int.from_bytes(segments[0].payload[:8], "little")
        try:
            opened = self._driver.ipc_open(segments[0].payload[8:])
        except DriverError as e:
            raise PeerAccessError(
                f"{self._device} cannot map the memory of rank {rank} ({e}); `nvidia-smi topo -p2p r` shows which "
                "devices reach each other, and all ranks must run on one host, in one IPC namespace"
            ) from e
        mapping = PeerMapping(rank=rank, base_ptr=opened + inside, nbytes=segments[0].nbytes)
        self._peers[rank] = opened, mapping
        return mapping

    def close(self) -> None:
        """Unmap peers, then drop the pool; tensors that still live keep it."""
        peers, self._peers = self._peers, {}
        self._pool = None
        for opened, _ in peers.values():
            self._driver.ipc_close(opened)

    def _allocate(self) -> torch.Tensor:
        nbytes = self._nbytes + ALIGNMENT  # room to align the base
        pool = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        try:
            self._driver.ipc_export(pool.data_ptr())
        except DriverError:
            # Memory of an expandable segment has no IPC handle.  Only then is the setting on, so switching it on again
            # afterwards restores it.
            del pool
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")
            try:
                pool = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            finally:
                torch.cuda.memory._set_allocator_settings("expandable_segments:True")
            self._driver.ipc_export(pool.data_ptr())
        return pool
