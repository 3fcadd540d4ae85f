"""The page of host memory in which the ranks report what went wrong, and which every rank reads.

The first row holds the alarm; each rank has a row after it for its kernels (`iris_core.device.context_words`).  All
ranks of a node map the same memory; a GPU writes to it directly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Sequence

from iris_core.device import context_words
from iris_core.errors import DeviceError
from iris_core.logs import logger
from iris_core.types import DeviceTarget, DeviceType, Segment
from iris_core.world import World
from iris_core.world.exchange import close_all
from iris_core.world.failures import on_all_ranks

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
_registered: dict[int, memoryview] = {}
"""Mappings by address that a device may write to: they stay, else the next mapping at the address is refused (712)."""


class StatusPage:
    """The page, as one rank maps it; its first word is the alarm.  Collective: every rank of the world makes it."""

    def __init__(self, world: World) -> None:
        self.world_size = world.world_size
        self.nbytes = -(-(1 + world.world_size) * _ROW_NBYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._bytes = memoryview(mmap.mmap(-1, self.nbytes) if world.world_size == 1 else self._share(world))
        self.words = self._bytes.cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._driver: tuple[str, ...] = ()

    def _share(self, world: World) -> mmap.mmap:
        """Map the memory that the first rank of the node makes."""
        made: list[Segment] = []
        first = world.local_members[0]

        def make() -> None:
            if world.rank == first:
                made.append(Segment(0, self.nbytes, fd=os.memfd_create("iris-status", os.MFD_CLOEXEC)))
                os.ftruncate(made[0].fd or -1, self.nbytes)

        try:
            on_all_ranks(world, "could not make the page for reports", make, DeviceError)
            made = world.exchange_segments(made)[first]
            return mmap.mmap(made[0].fd or -1, self.nbytes)
        finally:
            close_all(each.fd for each in made if each.fd is not None)

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

    def register(self, target: DeviceTarget) -> int:
        """Let a device write to the page; return the address of the page as its kernels see it."""
        if target.type is DeviceType.CPU:
            return self.address
        self._driver = _DRIVERS[target.type]
        self._call(1, ctypes.c_size_t(self.nbytes), ctypes.c_uint(_PORTABLE | _MAPPED))
        _registered[self.address] = self._bytes
        found = ctypes.c_uint64()
        self._call(2, ctypes.c_uint(0), first=[ctypes.byref(found)])
        return found.value

    def close(self) -> None:
        """Unregister the page from the device, where nothing runs any more."""
        if self.address in _registered:
            try:
                self._call(3)
            except DeviceError as error:
                logger.debug("the page for reports stays registered with the device: %s", error)
            else:
                del _registered[self.address]

    def _call(self, number: int, *more: object, first: Sequence[object] = ()) -> None:
        """Call a function of the driver with the page's address; DeviceError if it fails."""
        name = self._driver[number]
        try:
            driver = ctypes.CDLL(self._driver[0])
        except OSError as error:
            raise DeviceError(f"cannot load {self._driver[0]}: {error}") from error
        if code := getattr(driver, name)(*first, ctypes.c_void_p(self.address), *more):
            raise DeviceError(f"{name} failed with code {code}")


# -- kernels of CPU ranks ---------------------------------------------------------------------------------------------
STANDSTILL_NBYTES = 16
"""Size of a rank's row of a `Standstill`."""

_ROUNDS = (1 << 32) - 1
_SILENT = 8  # reports of this rank, about five in a second, in which another one whose kernels wait reports, too


class Standstill:
    """Whether the kernels of all ranks wait for words that none of them will ever change, as one rank sees it.

    Each rank has a row in memory that all of them reach: how often something has moved there, and how many rounds of
    polls have found nothing since.  A rank writes its row only while all its programs wait, so a rank that computes, or
    whose host is in Python, is never counted.  Let a rank look twice, see no rank move, and two more rounds of each:
    then each has polled all its words after the first look, in vain, while none stored, so none will move.
    """

    def __init__(self, rows: Sequence[int], rank: int) -> None:
        self._rows = [(ctypes.c_uint64 * 2).from_address(row) for row in rows]
        self._own = self._rows[rank]
        self._first: list[int] | None = None
        self._last, self._unchanged = [0] * len(rows), [0] * len(rows)

    def report(self, quiet: bool) -> bool:
        """Say that programs of this rank have polled all their words, and return whether all ranks stand still."""
        own = self._own
        moves = own[0] >> 32
        before, self._last = self._last, [row[0] for row in self._rows]
        same = (old == new for old, new in zip(before, self._last, strict=True))
        self._unchanged = [count + 1 if is_same else 0 for count, is_same in zip(self._unchanged, same, strict=True)]
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

    def elsewhere(self) -> list[int]:
        """Return the places of ranks that have not reported for long, while this one did again and again."""
        return [place for place, count in enumerate(self._unchanged) if count >= _SILENT]
