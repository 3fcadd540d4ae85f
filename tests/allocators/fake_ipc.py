"""Sharing of memory by IPC handle without a GPU.

All memory of this process is one pretended allocation, as torch's blocks are parts of larger ones.  Ranks are in one
process, so a handle opens at the address that it stands for.
"""

from __future__ import annotations

import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from iris_allocators.settings import TorchSettings
from iris_allocators.torch_ipc import TorchAllocator
from iris_core.errors import DriverError
from iris_core.heap.heap import SymmetricHeap
from iris_core.types import CreateRequest

from .fake_driver import INVALID, NOT_SUPPORTED, as_bytes
from .vmem_cluster import CPU, Hub, ThreadWorld

NO_PEER_ACCESS = (217, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
ORIGIN = 4096
"""Where the pretended allocation begins."""

_HANDLE = struct.Struct("<8sQ48x")
_MAGIC = b"ipc-fake"


class FakeIpc:
    """Implements `IpcDriver` on host memory.

    Attributes:
        calls: names of the calls so far.
        opened: addresses that are mapped, with how often.
        fail_at: the number of the call that fails, counted from 1; None for none.
        fail_next: by name, how many calls from now on the failing one comes; 1 is the next.
        fail_with: how it fails.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.opened: Counter[int] = Counter()
        self.fail_at: int | None = None
        self.fail_next: dict[str, int] = {}
        self.fail_with = NOT_SUPPORTED

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail_next:
            self.fail_next[name] -= 1
        if len(self.calls) == self.fail_at or self.fail_next.get(name) == 0:
            self.fail_next.pop(name, None)
            raise DriverError(name, *self.fail_with)

    def address_range(self, ptr: int) -> tuple[int, int]:
        self._enter("address_range")
        return ORIGIN, 1 << 48

    def ipc_export(self, ptr: int) -> bytes:
        self._enter("ipc_export")
        return _HANDLE.pack(_MAGIC, ORIGIN)

    def ipc_open(self, handle: bytes) -> int:
        self._enter("ipc_open")
        magic, origin = _HANDLE.unpack(handle)
        if magic != _MAGIC:
            raise DriverError("ipc_open", *INVALID)
        self.opened[origin] += 1
        return int(origin)

    def ipc_close(self, base_ptr: int) -> None:
        self._enter("ipc_close")
        if not self.opened[base_ptr]:
            raise DriverError("ipc_close", *INVALID)
        self.opened[base_ptr] -= 1

    @property
    def num_opened(self) -> int:
        return self.opened.total()


def make(nbytes: int, rank: int = 0, world_size: int = 1, driver: FakeIpc | None = None) -> TorchAllocator:
    """An allocator on host memory."""
    request = CreateRequest(CPU, rank, world_size, nbytes, TorchSettings())
    return TorchAllocator(request, driver or FakeIpc(), as_bytes)


class Ranks:
    """Ranks as threads, whose heaps are not open yet."""

    def __init__(self, world_size: int, nbytes: int = 1 << 20) -> None:
        hub = Hub(world_size)
        self.drivers = [FakeIpc() for _ in range(world_size)]
        self.allocators = [make(nbytes, rank, world_size, driver) for rank, driver in enumerate(self.drivers)]
        self.heaps = [SymmetricHeap(a, ThreadWorld(hub, rank)) for rank, a in enumerate(self.allocators)]
        self._pool = ThreadPoolExecutor(world_size)

    def attempt(self, function: Any) -> list[Any]:
        """Results by rank, an error standing for the result of a rank that raised."""
        futures = [self._pool.submit(function, heap) for heap in self.heaps]
        return [future.exception() or future.result() for future in futures]

    @property
    def opened(self) -> list[int]:
        """How many handles each rank has open."""
        return [driver.num_opened for driver in self.drivers]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *args: object) -> None:
        for heap in self.heaps:
            heap.close()
        self._pool.shutdown()
