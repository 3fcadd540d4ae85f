"""The network between nodes, emulated: what `iris_triton.language.gin` asks of NCCL, on CPU ranks of one machine.

As on a network, nothing has happened when a call returns.  A put arrives later, at a random time in the last three
quarters of the delay of `iris_core.types.Network`, and its source is read only then, so that a kernel that does not
wait, or that changes a source without `flush`, gets wrong values here as well; so does a get.  Both may overtake each
other.  A signal comes after the puts to the same rank that were started before it.
"""

import ctypes
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl

from iris_core.errors import ArgumentError, UnsupportedError
from iris_core.protocols import MemoryMap
from iris_core.types import Network
from iris_triton import _compat
from iris_triton.interpreter.memory import accesses
from iris_triton.interpreter.memory.regions import Array, registered_heaps
from iris_triton.interpreter.state import ProgramInfo, current

_lock = threading.Lock()


class _Carrier:
    """Puts that one rank has on their way; a thread carries it out, which ends when nothing is left."""

    def __init__(self, memory: MemoryMap, network: Network) -> None:
        self.memory, self.delay_s = memory, network.delay_s
        self.bases = [far or near for far, near in zip(network.far_bases, memory.heap_bases, strict=True)]
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._arrival: dict[int, float] = {}  # by peer, of the last put so far
        self._changed = threading.Condition()
        self._running = False

    def _start(self, peer: Any, step: Callable[[], object], *, kind: str) -> None:
        """Let a step happen later: a "put" or "get" at any time, a "signal" after the puts before it."""
        peer = int(peer)
        with self._changed:
            at = time.monotonic() + random.uniform(self.delay_s / 4, self.delay_s)
            last = self._arrival.get(peer, 0.0)
            if kind == "signal":
                at = max(at, last)
            elif kind == "put":
                self._arrival[peer] = max(at, last)
            heapq.heappush(self._due, (at, next(self._numbers), step))
            if not self._running:
                self._running = True
                # Its name does not begin with "iris-": a rank with something on its way does not stand still.
                threading.Thread(target=self._carry, name="emulated-network", daemon=True).start()
            self._changed.notify_all()
        current.program.progress()

    def _carry(self) -> None:
        with self._changed:
            while self._due:
                at, _, step = self._due[0]
                left = at - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    continue
                heapq.heappop(self._due)
                step()
            self._running = False
            self._changed.notify_all()

    def _address(self, rank: Any, offset: Any, nbytes: Any) -> int:
        rank, offset, nbytes, most = int(rank), int(offset), int(nbytes), self.memory.nbytes
        if not 0 <= rank < len(self.bases):
            raise ArgumentError(f"gin: rank {rank} is not in a world of {len(self.bases)}")
        if offset < 0 or nbytes < 0 or offset + nbytes > most:
            raise ArgumentError(
                f"gin: {nbytes} bytes at offset {offset} of rank {rank}'s heap do not lie in its {most}"
            )
        return self.bases[rank] + offset

    def put_bytes(self, peer: Any, to_offset: Any, from_offset: Any, nbytes: Any) -> None:
        """Start a put."""
        target, source = self._address(peer, to_offset, nbytes), self._address(self.memory.rank, from_offset, nbytes)
        self._start(peer, lambda: ctypes.memmove(target, source, int(nbytes)), kind="put")

    def get_bytes(self, peer: Any, from_offset: Any, to_offset: Any, nbytes: Any) -> None:
        """Start a get, which comes as late as a put."""
        source, target = self._address(peer, from_offset, nbytes), self._address(self.memory.rank, to_offset, nbytes)
        self._start(peer, lambda: ctypes.memmove(target, source, int(nbytes)), kind="get")

    def put_bytes_signal(self, peer: Any, to_offset: Any, from_offset: Any, nbytes: Any, word: Any, value: Any) -> None:
        """Start a put, and a signal after it."""
        self.put_bytes(peer, to_offset, from_offset, nbytes)
        self.add_to_word(peer, word, value)

    def add_to_word(self, peer: Any, word: Any, value: Any) -> None:
        """Start a signal."""
        place = np.array([self._address(peer, word, 8)], np.uint64)
        if int(word) % 8:
            raise ArgumentError(f"gin: a signal changes 8 aligned bytes, not those at offset {int(word)}")
        addition = np.array([int(value)], np.int64)
        order, operation = _compat.ir.MEM_SEMANTIC.ACQUIRE_RELEASE, _compat.ir.ATOMIC_OP.ADD
        step = lambda: accesses.native_rmw(operation, place, addition, tl.int64, sem=order)
        self._start(peer, step, kind="signal")

    def flush(self) -> None:
        """Wait until nothing is on its way: sources of puts were read, and gets are there."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)


_carriers: dict[int, _Carrier] = {}  # by the device communicator, the first word of a network


def run(function: str, program: ProgramInfo, network: Any = None, *args: Any, **named: Any) -> None:
    """Run what a function of `iris_triton.language.gin` is on the CPU; CPU entry, but for the function's name."""
    if function == "lsa_pointer":
        raise UnsupportedError(
            "gin.lsa_pointer: the CPU has no windows of NCCL's; kernels reach ranks of the node as usual"
        )
    getattr(_carrier(network), function)(*args, **named)


def _carrier(network: Any) -> _Carrier:
    """Return the carrier that the words of a network name."""
    communicator = ctypes.c_int64.from_address(int(network)).value
    with _lock:
        found = _carriers.get(communicator)
        if found is None:
            for heap in registered_heaps():
                if heap.network is not None and heap.network.words[0] == communicator:
                    found = _carriers[communicator] = _Carrier(heap, heap.network)
    if found is None:
        raise ArgumentError(f"gin: the words at {int(network):#x} are those of no open context's network")
    return found


def forget(communicator: int) -> None:
    """Wait for what is on its way, and forget the network: its memory may be unmapped then."""
    with _lock:
        found = _carriers.pop(communicator, None)
    if found is not None:
        found.flush()


def check_run(
    program: ProgramInfo, pointer: Any, mask: Any, itemsize: int, heap_bases: Any, rank: Any, what: str
) -> None:
    """Check that the elements that a mask leaves lie on this rank's heap, one after the other."""
    flat: Array = np.atleast_1d(pointer).astype(np.uint64)
    if mask is not None:
        flat = flat[np.broadcast_to(np.asarray(mask, bool), flat.shape)]
    flat = flat.reshape(-1)
    if not flat.size:
        return
    base = ctypes.c_int64.from_address(int(heap_bases) + 8 * int(rank)).value
    end, _ = current.launch.checker.heaps.get(base, (0, None))
    if int(flat.min()) < base or int(flat.max()) + itemsize > end:
        raise ArgumentError(
            f"the {what} of a put, get or signal between nodes lies outside of the heap, at {int(flat[0]):#x}: pass a "
            "tensor on the symmetric heap (ctx.zeros, ctx.as_symmetric)"
        )
    if (np.diff(flat.view(np.int64)) != itemsize).any():
        raise ArgumentError(
            f"the {what} of a put or get between nodes must be one run of memory, each element {itemsize} bytes behind "
            f"the one before it; these {flat.size} are not: put them row by row"
        )
    if current.launch.refuse:
        accesses.check(flat, None, itemsize, f"copy between nodes ({what})")
