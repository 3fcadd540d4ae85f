"""Addresses that reach the heaps of all ranks at once: NVIDIA's multicast, which NVLink SHARP serves.

One multicast object has the size of a heap.  Each rank adds its device, binds its memory at the offsets that it has in
the heap, and maps the object.  Only the `multimem` instructions may use these addresses: a load adds up what all ranks
have there, a store goes to all.  (CUDA driver API, "Multicast Object Management"; PTX ISA, "multimem".)

All devices are added before any memory is bound, as the driver demands; between these steps the heap compares whether
all ranks could.  What is bound is unbound before it is unmapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from iris_allocators.driver import Transaction, VmmDriver
from iris_core.types import Segment
from iris_core.world.exchange import close_all


class Multicast:
    """This rank's part of the multicast object of a world; satisfies `MulticastRange`."""

    def __init__(self, driver: VmmDriver, rank: int, num_devices: int, nbytes: int, alignment: int) -> None:
        self._driver, self._rank, self._num_devices = driver, rank, num_devices
        self._nbytes, self._alignment = nbytes, alignment
        self._handle = self._fd = self._reserved = self._mapped = -1  # none
        self._early: dict[int, tuple[int, int]] = {}  # to be bound when all have joined: size and memory, by offset
        self._bound: dict[int, int] = {}  # sizes by offset, in bytes

    def offer(self) -> Sequence[Segment]:
        if self._rank != 0:
            return []
        self._handle = self._driver.create_multicast(self._num_devices, self._nbytes)
        self._fd = self._driver.export_fd(self._handle)
        return [Segment(0, self._nbytes, fd=self._fd)]

    def join(self, segments: Sequence[Segment]) -> None:
        self._fd = -1
        try:
            if self._rank != 0:
                self._handle = self._driver.import_fd(next(each.fd for each in segments if each.fd is not None))
            self._driver.add_device(self._handle)
        finally:
            close_all(each.fd for each in segments if each.fd is not None)

    def map(self) -> int:
        self._reserved = self._driver.reserve(self._nbytes, self._alignment)
        self._driver.map(self._reserved, self._nbytes, self._handle)
        self._mapped = self._reserved
        self._driver.set_access(self._mapped, self._nbytes)
        with Transaction() as undo:
            self.bind([(offset, *memory) for offset, memory in self._early.items()], undo)
            undo.commit()
        return self._mapped

    def bind(self, memory: Iterable[tuple[int, int, int]], undo: Transaction) -> None:
        """Bind memory of this rank's heap, given by offset, size in bytes and handle; before `map`, note it."""
        for offset, nbytes, handle in memory:
            self.unbind(offset, offset + nbytes)  # left of an undo that failed
            undo.callback(self.unbind, offset, offset + nbytes)
            if self._mapped < 0:
                self._early[offset] = nbytes, handle
                continue
            self._driver.bind(self._handle, offset, nbytes, handle)
            self._bound[offset] = nbytes

    def unbind(self, start: int, end: int) -> None:
        """Unbind what has a byte in [start, end)."""
        self._early = {at: each for at, each in self._early.items() if at >= end or at + each[0] <= start}
        for offset in [at for at, nbytes in self._bound.items() if at < end and at + nbytes > start]:
            self._driver.unbind(self._handle, offset, self._bound[offset])
            del self._bound[offset]

    def release(self) -> None:
        """Give everything back; a second call continues after a failure.  No kernel uses the addresses any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._mapped >= 0:
            self._driver.unmap(self._mapped, self._nbytes)
            self._mapped = -1
        if self._reserved >= 0:
            self._driver.unreserve(self._reserved, self._nbytes)
            self._reserved = -1
        self.unbind(0, self._nbytes)
        if self._handle >= 0:
            self._driver.release(self._handle)
            self._handle = -1
