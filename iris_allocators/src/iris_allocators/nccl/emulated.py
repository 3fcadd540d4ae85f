"""Heaps of CPU ranks that IRIS_NODES divides, which the emulated network reaches on all "nodes" of one machine."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from iris_allocators.host import MemoryFile, address_of
from iris_allocators.info import NCCL_INFO
from iris_allocators.settings import NcclSettings
from iris_core.errors import PeerAccessError
from iris_core.types import CreateRequest, Network

_VERSION = 2, 32  # of the NCCL whose functions are emulated


class EmulatedAllocator(MemoryFile):
    """One rank's heap in a memfd; satisfies `SupportsNetwork` as well.

    The memory of ranks on other nodes is mapped for the emulation alone; kernels do not know where.
    """

    info = NCCL_INFO

    def __init__(self, request: CreateRequest) -> None:
        super().__init__(request)
        settings = request.settings
        self._delay_s = settings.emulated_delay if isinstance(settings, NcclSettings) else 0.0
        self._far: dict[int, mmap.mmap] = {}

    def invite(self) -> Sequence[int]:
        """Return this process's id and the heap's descriptor in it."""
        return os.getpid(), self._opened()[0]

    def connect(self, invitations: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> Network | None:
        """Map the heaps of ranks on other nodes; PeerAccessError if they are no processes of this user and machine."""
        if len(nodes) == 1:
            return None
        bases = [0] * len(invitations)
        for node in nodes:
            for rank in () if self._rank in node else node:
                process, number = invitations[rank]
                try:
                    fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
                except OSError as e:
                    raise PeerAccessError(
                        f"the network to rank {rank} is emulated, which needs its memory file: {e}; on the CPU, "
                        "allocator 'nccl' is for the ranks of one machine, which IRIS_NODES divides"
                    ) from e
                try:
                    self._far[rank] = self._map_fd(fd, self.nbytes)
                finally:
                    os.close(fd)
                bases[rank] = address_of(self._far[rank])
        return Network((self.base_ptr, self.base_ptr), _VERSION, far_bases=tuple(bases), delay_s=self._delay_s)

    def close(self) -> None:
        """Drop all mappings; live tensors keep that of this rank.  Idempotent."""
        self._far.clear()
        super().close()
