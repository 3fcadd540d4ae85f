"""Pieces of physical memory mapped into a heap's addresses, and the addresses themselves.

One range of addresses holds the heaps of all ranks side by side, so that rank r's heap begins at `base + r * stride`.
A `PieceTable` knows what is mapped in one of them; `AddressSpace` has one table per rank.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from iris_allocators.driver import Transaction, VmmDriver
from iris_allocators.vmem.multicast import Multicast
from iris_core.errors import DriverError
from iris_core.logs import logger


@dataclass(slots=True, eq=False)
class Piece:
    """One mapping of physical memory."""

    offset_bytes: int  # where it lies in its rank's heap
    nbytes: int
    serial: int  # its owner's number for it, never used twice
    handle: int | None = None  # the driver's, which this piece lets go of; None if the mapping alone keeps the memory
    fd: int | None = None  # descriptor under which it is being offered to peers
    mapped: bool = True  # whether the mapping still exists
    doomed: bool = False  # whether it was to be dropped, also if that failed

    @property
    def end(self) -> int:
        return self.offset_bytes + self.nbytes

    def close_fd(self) -> None:
        if self.fd is not None:
            fd, self.fd = self.fd, None
            os.close(fd)


class PieceTable:
    """Mappings in one rank's heap, which begins at `base_ptr` in this process."""

    def __init__(self, driver: VmmDriver, base_ptr: int) -> None:
        self._driver = driver
        self._offsets: list[int] = []
        self._pieces: dict[int, Piece] = {}
        self.base_ptr = base_ptr
        self.nbytes = 0  # sum of the pieces
        self.multicast: Multicast | None = None  # to which the pieces are bound, too

    def __len__(self) -> int:
        return len(self._pieces)

    def at(self, offset_bytes: int) -> Piece | None:
        return self._pieces.get(offset_bytes)

    def within(self, start: int, end: int) -> list[Piece]:
        """Return the pieces that begin in [start, end), by offset."""
        i, j = bisect_left(self._offsets, start), bisect_left(self._offsets, end)
        return [self._pieces[offset] for offset in self._offsets[i:j]]

    def overlapping(self, start: int, end: int) -> list[Piece]:
        """Return the pieces that have a byte in [start, end), by offset."""
        i = bisect_left(self._offsets, start)
        before = [self._pieces[self._offsets[i - 1]]] if i else []
        return [piece for piece in before if piece.end > start] + self.within(start, end)

    def clear_doomed(self, start: int, end: int) -> None:
        """Finish dropping doomed pieces of [start, end), before other pieces are mapped there."""
        self.drop([piece for piece in self.overlapping(start, end) if piece.doomed])

    def map(self, pieces: Sequence[tuple[Piece, int]], undo: Transaction) -> None:
        """Map pieces, given with handles of their memory, and make them accessible; `undo` gets the steps that unmap.

        `add` follows when the transaction is committed.
        """
        ranges: list[tuple[int, int]] = []  # without gaps
        for piece, handle in pieces:
            self._driver.map(self.base_ptr + piece.offset_bytes, piece.nbytes, handle)
            undo.callback(self._undo_map, piece)
            start = ranges.pop()[0] if ranges and ranges[-1][1] == piece.offset_bytes else piece.offset_bytes
            ranges.append((start, piece.end))
        for start, end in ranges:
            self._driver.set_access(self.base_ptr + start, end - start)
        if self.multicast is not None:
            self.multicast.bind([(piece.offset_bytes, piece.nbytes, handle) for piece, handle in pieces], undo)

    def _undo_map(self, piece: Piece) -> None:
        try:
            self._driver.unmap(self.base_ptr + piece.offset_bytes, piece.nbytes)
        except DriverError:
            # The addresses are taken: remember it, or nothing could be mapped there any more.  The handle is not ours.
            self.add([Piece(piece.offset_bytes, piece.nbytes, piece.serial, doomed=True)])
            raise

    def add(self, pieces: Sequence[Piece]) -> None:
        """Add pieces that have been mapped to the table."""
        for piece in pieces:
            insort(self._offsets, piece.offset_bytes)
            self._pieces[piece.offset_bytes] = piece
            self.nbytes += piece.nbytes

    def drop(self, pieces: Sequence[Piece]) -> None:
        """Unmap pieces and release their memory; on errors continue with the others, then raise."""
        with Transaction() as each:
            for piece in reversed(pieces):
                each.callback(self._drop, piece)

    def _drop(self, piece: Piece) -> None:
        # Each step is remembered once taken, so that a second attempt continues where the first one failed.
        if self.multicast is not None:
            self.multicast.unbind(piece.offset_bytes, piece.end)
        if piece.mapped:
            self._driver.unmap(self.base_ptr + piece.offset_bytes, piece.nbytes)
            piece.mapped = False
        if piece.handle is not None:
            self._driver.release(piece.handle)
            piece.handle = None
        piece.close_fd()
        del self._pieces[piece.offset_bytes]
        self._offsets.remove(piece.offset_bytes)
        self.nbytes -= piece.nbytes


class AddressSpace:
    """Address range of all ranks' heaps in this process, and the mappings in it.

    Each heap has `stride` bytes and begins at a multiple of `alignment`, which divides `stride`.  DriverError if the
    process has no free address range of that size.
    """

    def __init__(self, driver: VmmDriver, world_size: int, stride: int, alignment: int) -> None:
        self._driver = driver
        self._nbytes = world_size * stride
        self._reserved: int | None = driver.reserve(self._nbytes, alignment)
        base = self._reserved
        self.tables = [PieceTable(driver, base + rank * stride) for rank in range(world_size)]

    def release(self) -> None:
        """Unmap everything and give the addresses back; a second call continues after a DriverError."""
        with Transaction() as each:
            each.callback(self._unreserve)
            for table in reversed(self.tables):
                each.callback(table.drop, table.within(0, self._nbytes))
            for table in self.tables:
                if table.multicast is not None:
                    each.callback(table.multicast.release)

    def _unreserve(self) -> None:
        mapped = any(piece.mapped for table in self.tables for piece in table.within(0, self._nbytes))
        if self._reserved is not None and not mapped:
            self._driver.unreserve(self._reserved, self._nbytes)
            self._reserved = None


# -- their lifetime ---------------------------------------------------------------------------------------------------
IDLE_TIMEOUT_S = 5.0  # how long closing waits for the device; a kernel that takes longer counts as one without an end


class Lease:
    """Held by the allocator and by every storage on the heap; when it is gone, everything is unmapped."""

    def __init__(self, driver: VmmDriver, space: AddressSpace, device: str) -> None:
        self._pid = os.getpid()
        weakref.finalize(self, _release, driver, space, device, self._pid).atexit = False

    @property
    def is_ours(self) -> bool:
        """Whether this process created the heap; a forked one has its objects, but not the device."""
        return os.getpid() == self._pid


def idle(driver: VmmDriver, device: str) -> bool:
    """Wait until the device is idle; return False after IDLE_TIMEOUT_S: then no memory may be unmapped."""
    done = threading.Event()

    def wait() -> None:
        try:
            driver.synchronize()
        except DriverError as e:  # the device has failed: nothing runs there any more
            logger.warning("%s: %s", device, e)
        done.set()

    try:  # in another thread: the driver's own wait is unbounded, and cannot be interrupted
        threading.Thread(target=wait, name="iris-vmem-idle", daemon=True).start()
    except RuntimeError as e:  # the process ends, where Python 3.12 starts no thread
        logger.debug("%s: memory of a heap that was not closed stays: %s", device, e)
        return False
    if done.wait(IDLE_TIMEOUT_S):
        return True
    logger.warning(
        "%s is still busy after %g s: memory of a closed heap stays until the process ends", device, IDLE_TIMEOUT_S
    )
    return False


def _release(driver: VmmDriver, space: AddressSpace, device: str, pid: int) -> None:
    """Release the address space after the last lease.  Called by a finalizer, whose errors no caller could catch."""
    if os.getpid() != pid or not idle(driver, device):
        return
    try:
        space.release()
    except DriverError as e:
        logger.warning("%s: memory of a closed heap stays until the process ends: %s", device, e)
