"""Addresses that reach the heaps of all ranks at once: NVIDIA's multicast, which NVLink SHARP serves.

One multicast object has the size of a heap.  Each rank adds its device, binds its memory at the offsets that it has in
the heap, and maps the object.  Only the `multimem` instructions may use these addresses: a load adds up what all ranks
have there, a store goes to all.  (CUDA driver API, "Multicast Object Management"; PTX ISA, "multimem".)

All devices are added before any memory is bound, as the driver demands; between these steps the heap compares whether
all ranks could.  What is bound is unbound before it is unmapped.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from iris_allocators.driver.transaction import Transaction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from iris_allocators.driver import VmmDriver

    Memory = Iterable[tuple[int, int, int]]  # of pieces: offset in the heap, size in bytes, the driver's handle


class Multicast:
    """This rank's part of the multicast object of a world.

    Attributes:
        base_ptr: where the object is mapped in this process; None until it is.
        fd: descriptor under which it is being offered to peers.
    """

    def __init__(self, driver: VmmDriver, num_devices: int, nbytes: int, alignment: int) -> None:
        self._driver, self._num_devices, self._nbytes, self._alignment = driver, num_devices, nbytes, alignment
        self._handle: int | None = None
        self._bound: dict[int, int] = {}  # sizes by offset, in bytes
        self._reserved: int | None = None
        self.base_ptr: int | None = None
        self.fd: int | None = None

    def create(self) -> int:
        """Create the object, on one rank, and return a descriptor of it, which `join` closes."""
        self._handle = self._driver.create_multicast(self._num_devices, self._nbytes)
        self.fd = self._driver.export_fd(self._handle)
        return self.fd

    def join(self, fd: int) -> None:
        """Add this rank's device to the object that a descriptor stands for, or that this rank has created."""
        if self._handle is None:
            self._handle = self._driver.import_fd(fd)
        self._close_fd()
        self._driver.add_device(self._handle)

    def map(self, memory: Memory) -> int:
        """Map the object, which all ranks have joined, and bind what this rank has; returns the address."""
        assert self._handle is not None
        with Transaction() as undo:
            self._reserved = self._driver.reserve(self._nbytes, self._alignment)
            self._driver.map(self._reserved, self._nbytes, self._handle)
            self.base_ptr = self._reserved
            self._driver.set_access(self._reserved, self._nbytes)
            self.bind(memory, undo)
            undo.commit()
        return self.base_ptr

    def bind(self, memory: Memory, undo: Transaction) -> None:
        """Bind memory of this rank's heap; nothing before the object is mapped."""
        if self.base_ptr is None or self._handle is None:
            return
        for offset, nbytes, handle in memory:
            self.unbind(offset, offset + nbytes)  # left of an undo that failed
            self._driver.bind(self._handle, offset, nbytes, handle)
            self._bound[offset] = nbytes
            undo.add(self.unbind, offset, offset + nbytes)

    def unbind(self, start: int, end: int) -> None:
        """Unbind what has a byte in [start, end)."""
        for offset in [at for at, nbytes in self._bound.items() if at < end and at + nbytes > start]:
            self._driver.unbind(self._handle, offset, self._bound[offset])  # type: ignore[arg-type]
            del self._bound[offset]

    def release(self) -> None:
        """Give everything back; a second call continues after a failure.  No kernel uses the addresses any more."""
        self._close_fd()
        if self.base_ptr is not None:
            self._driver.unmap(self.base_ptr, self._nbytes)
            self.base_ptr = None
        if self._reserved is not None:
            self._driver.unreserve(self._reserved, self._nbytes)
            self._reserved = None
        self.unbind(0, self._nbytes)
        if self._handle is not None:
            self._driver.release(self._handle)
            self._handle = None

    def _close_fd(self) -> None:
        if self.fd is not None:
            fd, self.fd = self.fd, None
            os.close(fd)
