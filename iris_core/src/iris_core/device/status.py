"""The page of host memory in which the kernels of all ranks leave their reports, and which every rank reads.

The first row holds the alarm: a word that changes with every report.  Each rank has a row after it, as the status
words in `iris_core.device.context_words` say, and another one in which its host says that a call has failed.  All ranks
of a host map the same memory; a GPU writes to it directly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from iris_core.device import context_words
from iris_core.errors import DeviceError
from iris_core.logs import logger
from iris_core.types import DeviceType, Segment
from iris_core.world.failures import on_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.types import DeviceTarget
    from iris_core.world import World

_WORD = 8
_ROW_NBYTES = context_words.STATUS_WORDS * _WORD
BASE = context_words.ROW
"""Word of a row that the host writes: where the rank's heap begins in its own address space."""
_ATTEMPTS = 1000

_PORTABLE, _MAPPED = 1, 2
_DRIVERS = {
    DeviceType.CUDA: ("libcuda.so.1", "cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuMemHostUnregister"),
    DeviceType.HIP: ("libamdhip64.so", "hipHostRegister", "hipHostGetDevicePointer", "hipHostUnregister"),
}

HOST = 24
"""Part of a stamp of the host, which no device has."""
_FAILURE = struct.Struct("<4q?H")  # the fields of a `HostFailure` but rank, stamp and text; then how long the text is
_TEXT_NBYTES = _ROW_NBYTES - _WORD - _FAILURE.size


class HostFailure(NamedTuple):
    """A call that a rank's host has not launched, or whose launch has failed."""

    rank: int
    stamp: int  # another one for every failure
    offset_bytes: int  # of the control words of the team, in the rank's heap
    number: int  # of such calls of the team that the rank has had since the last barrier of all ranks
    num_barriers: int  # of all ranks so far
    at_ns: int  # when, by time.monotonic_ns
    is_certain: bool  # the other members need the call; else all may have failed alike, or this rank tries again
    text: str  # the error; what the row has no room for is left out


class StatusPage:
    """The page, as one rank maps it; its first word is the alarm.  Collective: every rank of the world makes it."""

    def __init__(self, world: World) -> None:
        self.world_size = world.world_size
        self.nbytes = -(-(1 + 2 * world.world_size) * _ROW_NBYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes = memoryview(mmap.mmap(-1, self.nbytes) if world.world_size == 1 else self._share(world))
        self.words = self._bytes.cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._unregister: Callable[[], int] | None = None

    def _share(self, world: World) -> mmap.mmap:
        """Map the memory that rank 0 makes."""
        made: list[Segment] = []

        def make() -> None:
            if world.rank == 0:
                made.append(Segment(0, self.nbytes, fd=os.memfd_create("iris-status", os.MFD_CLOEXEC)))
                os.ftruncate(made[0].fd or -1, self.nbytes)

        on_all_ranks(world, "could not make the page for reports", make, DeviceError)
        (page,) = world.exchange_segments(made)[0]
        assert page.fd is not None
        try:
            return mmap.mmap(page.fd, self.nbytes)
        finally:
            os.close(page.fd)

    def first(self, rank: int) -> int:
        """Return the index of the first word of a rank's row."""
        return (1 + rank) * context_words.STATUS_WORDS

    def read(self, rank: int, part: int) -> tuple[int, ...]:
        """Return a rank's row when the part is complete, or all zero if it is not."""
        first = self.first(rank)
        for _ in range(_ATTEMPTS):
            stamp = self.words[first + part]
            row = tuple(self.words[first : first + context_words.STATUS_WORDS])
            if context_words.code_of(stamp) == 0:
                break
            if row[part] == stamp == self.words[first + part]:
                return row
            time.sleep(0)  # it is being written
        return (0,) * context_words.STATUS_WORDS

    def write(self, rank: int, part: int, values: list[int]) -> None:
        """Write a part that the device keeps in its own memory, and raise the alarm."""
        begin = self.first(rank) + part
        stamp = context_words.stamp(time.monotonic_ns(), rank, part, context_words.code_of(values[0]))
        self.words[begin] = context_words.CLAIMED
        for place, value in enumerate(values[1:], begin + 1):
            self.words[place] = value
        self.words[begin] = self.words[0] = stamp

    def say(self, rank: int, offset_bytes: int, number: int, num_barriers: int, text: str, *, is_certain: bool) -> None:
        """Write what has failed on this rank's host, and raise the alarm; see `HostFailure`."""
        first, at_ns = self.first(self.world_size + rank), time.monotonic_ns()
        said = text.encode()[:_TEXT_NBYTES]
        row = _FAILURE.pack(offset_bytes, number, num_barriers, at_ns, is_certain, len(said)) + said
        begin = (first + 1) * _WORD
        self.words[first] = context_words.CLAIMED
        self._bytes[begin : begin + len(row)] = row
        self.words[first] = self.words[0] = context_words.stamp(at_ns, rank, HOST, 1)

    def withdraw(self, rank: int) -> None:
        """Take back what this rank's host has said."""
        self.words[self.first(self.world_size + rank)] = 0

    def said(self, rank: int) -> HostFailure | None:
        """Return what has failed last on a rank's host; None if nothing, or if it is being written."""
        first = self.first(self.world_size + rank)
        stamp = self.words[first]
        if context_words.code_of(stamp) == 0:
            return None
        row = bytes(self._bytes[(first + 1) * _WORD :][: _ROW_NBYTES - _WORD])
        *fields, nbytes = _FAILURE.unpack_from(row)
        text = row[_FAILURE.size :][:nbytes].decode(errors="ignore")
        return HostFailure._make((rank, stamp, *fields, text)) if self.words[first] == stamp else None

    def register(self, target: DeviceTarget) -> int:
        """Let a device write to the page; returns the address of the page as its kernels see it."""
        if target.type is DeviceType.CPU:
            return self.address
        library, register, locate, unregister = _DRIVERS[target.type]
        try:
            driver = ctypes.CDLL(library)
        except OSError as error:
            raise DeviceError(f"cannot load {library}: {error}") from error
        address = ctypes.c_void_p(self.address)
        found = ctypes.c_uint64()
        if code := getattr(driver, register)(address, ctypes.c_size_t(self.nbytes), ctypes.c_uint(_PORTABLE | _MAPPED)):
            raise DeviceError(f"{register} failed with code {code}")
        self._unregister = partial(getattr(driver, unregister), address)
        if code := getattr(driver, locate)(ctypes.byref(found), address, ctypes.c_uint(0)):
            raise DeviceError(f"{locate} failed with code {code}")
        return found.value

    def close(self) -> None:
        """Take the page away from the device, where nothing runs any more."""
        if self._unregister is not None:
            if code := self._unregister():
                logger.debug("the page for reports stays registered with the device: code %d", code)
            self._unregister = None


# -- kernels of CPU ranks ---------------------------------------------------------------------------------------------
STANDSTILL_NBYTES = 16
"""Size of a rank's row of a `Standstill`."""

_ROUNDS = (1 << 32) - 1


class Standstill:
    """Whether the kernels of all ranks wait for words that none of them will ever change, as one rank sees it.

    Each rank has a row in memory that all of them reach: how often something has moved there, and how many rounds of
    polls have found nothing since.  A rank writes its row only while all its programs wait, so a rank that computes, or
    whose host is in Python, is never counted.

    Let a rank look twice, see no rank move, and two more rounds of each.  Each of these ranks has polled all its
    words once after the first look, in vain, while none stored; so none of them will move unless another one does
    first.
    """

    def __init__(self, rows: Sequence[int], rank: int) -> None:
        self._rows = [(ctypes.c_uint64 * 2).from_address(row) for row in rows]
        self._own = self._rows[rank]
        self._first: list[int] | None = None

    def report(self, quiet: bool) -> bool:
        """Say that programs of this rank have polled all their words, and return whether all ranks stand still."""
        own = self._own
        moves = own[0] >> 32
        if not quiet:
            own[0] = moves + 1 << 32
            self._first = None
            return False
        own[0] += 1
        if moves and own[1] == moves:
            return True
        now = [row[0] for row in self._rows]
        if self._first is None or any(a >> 32 != b >> 32 for a, b in zip(self._first, now, strict=True)):
            self._first = now
        elif all((b & _ROUNDS) >= (a & _ROUNDS) + 2 for a, b in zip(self._first, now, strict=True)):
            for row, word in zip(self._rows, now, strict=True):
                row[1] = word >> 32
            return True
        return False
