"""The allocator: each rank's heap is a file in a folder that all ranks know, mapped by its owner and by every peer.

The file lives until its owner closes the allocator.  The memory lives longer: pages belong to whoever has them mapped,
so a tensor that outlives the heap stays readable.  A process that is killed leaves its file behind; the allocator
"host" of Iris does not, because it sends descriptors instead of names.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from iris_core.errors import HeapClosedError, HeapError
from iris_core.types import PeerMapping, Segment
from iris_example_backend._plugin import ALLOCATOR_INFO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from iris_core.types import CreateRequest, PluginInfo


class ExampleAllocator:
    """One rank's heap in a file; satisfies `iris_core.protocols.Allocator`."""

    def __init__(self, request: CreateRequest) -> None:
        """Make the file and map it.

        Args:
            request: rank, size of the heap in bytes and `ExampleSettings`.

        Raises:
            HeapError: the system refuses the file or the mapping.
        """
        self._nbytes = -(-request.heap_nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._peers: dict[int, tuple[mmap.mmap, PeerMapping]] = {}
        directory = request.settings.directory  # type: ignore[attr-defined]  # of ExampleSettings
        try:
            # mkstemp: a name that nobody else has, and mode 0600
            self._fd, self._path = tempfile.mkstemp(prefix=f"iris-example-{request.rank}-", dir=directory)
        except OSError as error:
            raise HeapError(f"cannot make a file in {directory}: {error}; set IRIS_EXAMPLE__DIRECTORY") from error
        # also when the process ends, or the allocator is collected, without close()
        self._remove = weakref.finalize(self, _remove, self._fd, Path(self._path), os.getpid())
        try:
            os.ftruncate(self._fd, self._nbytes)
            self._map: mmap.mmap | None = mmap.mmap(self._fd, self._nbytes)
        except (OSError, ValueError, OverflowError) as error:
            self._remove()
            raise HeapError(f"cannot make a heap of {self._nbytes} bytes in {directory}: {error}") from error
        self._base_ptr = _address(self._map)

    # -- description --------------------------------------------------------------------------------------------------
    @property
    def info(self) -> PluginInfo:
        """The plugin's description."""
        return ALLOCATOR_INFO

    @property
    def base_ptr(self) -> int:
        """Address of this rank's heap; mmap gives a multiple of the page size."""
        return self._base_ptr

    @property
    def nbytes(self) -> int:
        """Size in bytes: what was asked for in whole pages."""
        return self._nbytes

    @property
    def granularity(self) -> int:
        """Bytes by which memory is committed; a power of two."""
        return mmap.PAGESIZE

    @property
    def generation(self) -> int:
        """Never grows: peers map the whole file at once."""
        return 1

    # -- memory -------------------------------------------------------------------------------------------------------
    def commit(self, offset_bytes: int, nbytes: int) -> None:
        """Back a range with memory.

        Pages would come on first touch as well, but where none is left that touch is a SIGBUS and not an exception.

        Raises:
            HeapClosedError: the allocator is closed.
            HeapError: there is no memory left in the folder.
        """
        self._opened()
        try:
            os.posix_fallocate(self._fd, offset_bytes, max(nbytes, 1))  # an empty tensor has a block, too
        except OSError as error:
            raise HeapError(
                f"no memory for {nbytes} bytes at offset {offset_bytes} of {self._path}: {error.strerror}; "
                "make room in that folder, or set IRIS_EXAMPLE__DIRECTORY to another one"
            ) from error

    def tensor(
        self,
        offset_bytes: int,
        nbytes: int,
        on_release: Callable[[], None],
    ) -> torch.Tensor:
        """Return a 1-D uint8 tensor over a range of the heap.

        Args:
            offset_bytes: where it begins.
            nbytes: its length, at least 1.
            on_release: called once, when the last tensor on this storage is gone.

        Raises:
            HeapClosedError: the allocator is closed.
        """
        part = memoryview(self._opened())[offset_bytes : offset_bytes + nbytes]
        tensor = torch.frombuffer(part, dtype=torch.uint8)
        # The storage holds `part`, and `part` holds the map: this is what keeps memory alive.
        told = weakref.finalize(part, on_release)
        told.atexit = False  # the interpreter ends: nobody wants to hear of it
        return tensor

    # -- peers --------------------------------------------------------------------------------------------------------
    def export(self) -> Sequence[Segment]:
        """Describe the heap for peers: the whole of it, by the name of its file.

        Raises:
            HeapClosedError: the allocator is closed.
        """
        self._opened()
        return (Segment(offset_bytes=0, nbytes=self._nbytes, payload=os.fsencode(self._path)),)

    def import_peer(self, rank: int, segments: Sequence[Segment]) -> PeerMapping:
        """Map a peer's heap; the same mapping again when it is repeated.

        Raises:
            HeapClosedError: the allocator is closed.
            HeapError: the segments do not come from an allocator of this kind, or the file cannot be mapped.
        """
        try:
            self._opened()
            if rank not in self._peers:
                mapped = _map_peer(rank, segments)
                self._peers[rank] = mapped, PeerMapping(rank, _address(mapped), len(mapped))
            return self._peers[rank][1]
        finally:
            for segment in segments:  # descriptors are the importer's, whatever happens; these have none unless
                if segment.fd is not None:  # another kind of allocator sent them
                    os.close(segment.fd)

    def close(self) -> None:
        """Let go of the peers' heaps, then of the own one.  Idempotent; tensors that live keep their memory."""
        # munmap by hand would pull the memory from under live tensors: drop references instead
        self._peers.clear()
        self._map = None
        self._remove()

    def _opened(self) -> mmap.mmap:
        if self._map is None:
            raise HeapClosedError("the heap is closed")
        return self._map


def _map_peer(rank: int, segments: Sequence[Segment]) -> mmap.mmap:
    if len(segments) != 1 or segments[0].fd is not None or segments[0].offset_bytes != 0:
        raise HeapError(f"rank {rank} did not send the name of one file: its allocator is not 'example'")
    path, nbytes = Path(os.fsdecode(segments[0].payload)), segments[0].nbytes
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), nbytes)
    except (OSError, ValueError) as error:  # ValueError: the file is shorter than it should be
        raise HeapError(
            f"cannot map {nbytes} bytes of rank {rank}'s heap {path}: {error}; "
            "ranks in different containers need a common IRIS_EXAMPLE__DIRECTORY"
        ) from error


def _address(mapped: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def _remove(fd: int, path: Path, pid: int) -> None:
    os.close(fd)
    if os.getpid() == pid:  # a process that was forked off ends before its parent, whose file this is
        path.unlink(missing_ok=True)
