"""The heaps that backends are attached to: which addresses a kernel may touch, one lock for all ranks, and waiting.

Device functions get addresses and nothing else, so they look here for what belongs to an address.
"""

from __future__ import annotations

import bisect
import contextlib
import fcntl
import os
import threading
import time
from typing import TYPE_CHECKING

from iris_core.errors import DeviceTimeoutError, HeapError, NotOnHeapError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from iris_core.protocols import MemoryMap

_POLL_S = 0.0002  # long enough to leave the core to the rank that is waited for

_attached: list[AttachedHeap] = []


class AttachedHeap:
    """One symmetric heap while a backend is attached to it.

    Args:
        memory: what the core tells about the heap.
        timeout_ns: bound of waits in nanoseconds; 0 and less mean unbounded (IRIS_DEVICE_TIMEOUT).
        directory: folder for the lock's file, the same for all ranks.

    Raises:
        HeapError: the lock's file cannot be opened.
    """

    def __init__(self, memory: MemoryMap, timeout_ns: int, directory: Path) -> None:
        self.memory = memory
        self.timeout_ns = timeout_ns
        self._threads = threading.Lock()
        # One lock for all ranks of all worlds of a user: unfair to nobody, and the file need not be agreed on.  It is
        # never removed, because another rank could be about to open it.
        path = directory / f"iris-example-{os.getuid()}.lock"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HeapError(f"cannot open the lock {path}: {error}; set IRIS_EXAMPLE__DIRECTORY") from error
        _attached.append(self)

    def detach(self) -> None:
        """Forget the heap; kernels can no longer touch it."""
        _attached.remove(self)
        os.close(self._fd)

    def check(self, address: int, nbytes: int) -> None:
        """Raise unless a range lies in one live block of some rank's heap.

        Raises:
            NotOnHeapError: it does not.
        """
        rank, base = next(pair for pair in enumerate(self.memory.heap_bases) if self._has(pair[1], address))
        begin = address - base
        blocks = self.memory.live_blocks()  # the same offsets on every rank, so this says what peers have, too
        number = bisect.bisect_right(blocks, begin, key=lambda block: block.offset_bytes) - 1
        if number < 0 or begin + nbytes > blocks[number].offset_bytes + blocks[number].nbytes:
            raise NotOnHeapError(
                f"{nbytes} bytes at offset {begin} of rank {rank}'s heap are not in one allocated block: "
                "the tensor was freed, or it is longer than its block"
            )

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep all other ranks out: what makes an atomic operation of several reads and writes.

        It also orders memory: who takes the lock sees everything that its last owner had written.
        """
        with self._threads:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def wait_until(self, done: Callable[[], bool], what: Callable[[], str], timeout_ns: int | None = None) -> None:
        """Poll until something holds that another rank brings about under the lock.

        Args:
            done: whether it holds; reads memory anew at each call.
            what: says for a message what was waited for.
            timeout_ns: bound in nanoseconds, 0 for none; that of the context by default.

        Raises:
            DeviceTimeoutError: it took longer than the bound.
            PeerLostError: a peer's process has ended.
        """
        bound = self.timeout_ns if timeout_ns is None else timeout_ns
        begin = time.monotonic_ns()
        while not done():
            if 0 < bound < time.monotonic_ns() - begin:
                raise DeviceTimeoutError(f"rank {self.memory.rank} waited {bound / 1e9:g} s for {what()}")
            self.memory.check_peers()
            time.sleep(_POLL_S)
        with self.locked():
            pass  # and now everything that came before it can be seen, too

    def _has(self, base: int, address: int) -> bool:
        return base <= address < base + self.memory.nbytes

    def has(self, address: int) -> bool:
        """Whether an address lies in the heap of any of its ranks."""
        return any(self._has(base, address) for base in self.memory.heap_bases)


def heap_at(address: int) -> AttachedHeap:
    """Return the heap, of whichever rank, that an address lies in.

    Raises:
        NotOnHeapError: it lies in none.
    """
    for heap in _attached:
        if heap.has(address):
            return heap
    raise NotOnHeapError(
        f"address {address:#x} lies on no symmetric heap: other ranks can reach only what ctx.empty, ctx.zeros, ... "
        "have made, while the context is open"
    )
