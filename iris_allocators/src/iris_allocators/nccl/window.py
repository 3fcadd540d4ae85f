"""Heaps of GPUs that are windows of NCCL's: peers of the node by address, ranks of other nodes by device functions.

NCCL finds its own way between the ranks: a communicator is made of an id that rank 0 has drawn, and the heap, which
NCCL has allocated, is registered with it.  Kernels that reach other nodes need a device communicator, which lies in the
GPU's memory, and NCCL's device functions of the same version (`iris_triton.language.gin`).
"""

from __future__ import annotations

import importlib
import struct
from collections.abc import Sequence
from typing import Any

import torch

from iris_allocators.info import NCCL_INFO
from iris_allocators.ranges import GpuHeap
from iris_core.errors import HeapError, PeerAccessError, UnsupportedError
from iris_core.types import CreateRequest, Network, PeerMapping, Segment
from iris_core.world.exchange import close_all

GRANULE = 2 << 20
"""Bytes of which the heap's size is a multiple."""

OLDEST = 2, 30, 7
"""The oldest NCCL with the windows that are used here."""

_ID = struct.Struct("<16q")  # the id of a communicator, 128 bytes
_PAYLOAD = b"nccl"  # of a segment


class NcclAllocator(GpuHeap):
    """One rank's heap in a window of NCCL's; satisfies `iris_core.protocols.Allocator` and `SupportsNetwork`.

    `nccl` is the module nccl.core of nccl4py; found by `load_nccl` by default.

    Raises:
        UnsupportedError: nccl4py or NCCL is not installed, or too old.
        HeapError: NCCL cannot allocate the heap.
    """

    info = NCCL_INFO

    def __init__(self, request: CreateRequest, nccl: Any = None) -> None:
        super().__init__(request, GRANULE)
        self._nccl = nccl or load_nccl()
        try:
            self._memory = self._nccl.mem_alloc(self.nbytes, request.target.index)  # frees itself
        except Exception as e:  # the module's error class is private
            raise HeapError(f"NCCL has no room on {self._device} for a heap of {self.nbytes} bytes: {e}") from e
        self.base_ptr = int(self._memory.handle)
        self._communicator: Any = None
        self._device_communicator: torch.Tensor | None = None
        self._pointers: dict[int, int] = {}

    # -- the network --------------------------------------------------------------------------------------------------
    def invite(self) -> Sequence[int]:
        """Return the id of the communicator; only that of rank 0 counts."""
        self._check_open()
        return _ID.unpack(bytes(self._nccl.get_unique_id())) if self._rank == 0 else (0,) * 16

    def connect(self, invitations: Sequence[Sequence[int]], nodes: Sequence[Sequence[int]]) -> Network | None:
        """Make the communicator, register the heap, and find the peers of the node in it.  Collective, by NCCL."""
        nccl = self._nccl
        network_version = None if len(nodes) == 1 else self._network_version()
        try:
            unique_id = nccl.UniqueId.from_bytes(_ID.pack(*invitations[0]))
            self._communicator = nccl.Communicator.init(len(invitations), self._rank, unique_id)
            window = self._communicator.register_window(self._memory, nccl.WindowFlag.COLL_SYMMETRIC)
        except Exception as e:  # the module's error class is private
            raise PeerAccessError(f"NCCL cannot connect the ranks: {e}; NCCL_DEBUG=INFO says more") from e
        if not window.handle:
            raise UnsupportedError(f"NCCL has no symmetric windows on {self._device}: choose another allocator")
        near = next(node for node in nodes if self._rank in node)
        found = {rank: window.get_peer_device_pointer(rank) for rank in near}
        lost = [rank for rank, pointer in found.items() if not pointer]
        if lost:
            raise PeerAccessError(
                f"NCCL does not map the memory of ranks {', '.join(map(str, lost))}, which are on this node: its own "
                "view of the nodes is another one; look at NCCL_HOSTID and NCCL_P2P_DISABLE"
            )
        self._pointers = found
        return None if network_version is None else self._open_network(window.handle, *network_version)

    def _network_version(self) -> tuple[tuple[int, int], str]:
        """Return NCCL's version and the path of its device functions."""
        installed = self._nccl.get_version()
        library, bindings = installed.libnccl.version, installed.nccl_bindings
        if (library.major, library.minor) != (bindings.major, bindings.minor):
            raise UnsupportedError(
                f"nccl4py {installed.nccl4py} makes device communicators of NCCL {bindings}, but NCCL {library} is "
                "loaded: install the two that belong together"
            )
        bitcode = installed.libnccl.path and installed.libnccl.path.with_name("libnccl_device.bc")
        if not bitcode or not bitcode.exists():
            raise UnsupportedError(
                f"NCCL's device functions, libnccl_device.bc, do not lie beside {installed.libnccl.path}: install "
                "nvidia-nccl-cu13, and let it be the one that is loaded"
            )
        return (library.major, library.minor), str(bitcode)

    def _open_network(self, window: int, version: tuple[int, int], bitcode: str) -> Network:
        nccl, communicator = self._nccl, self._communicator
        if communicator.gin_type == nccl.NcclGinType.NONE:
            raise UnsupportedError(
                "NCCL has no network on which kernels can put (GIN): it needs InfiniBand or RoCE, or for sockets NCCL "
                "2.32.3 and NCCL_GIN_TYPE=2; NCCL_DEBUG=INFO says more. Without it, allocator='vmem' and ctx.ccl"
            )
        try:
            made = communicator.create_dev_comm(
                nccl.NCCLDevCommRequirements(
                    gin_force_enable=True, gin_connection_type=nccl.NcclGinConnectionType.FULL, gin_context_count=1
                )
            )
        except Exception as e:  # the module's error class is private
            raise PeerAccessError(f"NCCL cannot connect the nodes for kernels: {e}; NCCL_DEBUG=INFO says more") from e
        words = torch.frombuffer(bytearray(bytes(made.dev_comm)), dtype=torch.uint8)
        self._device_communicator = words.to(self._device)
        return Network((self._device_communicator.data_ptr(), window), version, bitcode)

    # -- peers --------------------------------------------------------------------------------------------------------
    def export(self) -> Sequence[Segment]:
        """Return the heap as one segment; NCCL has published where it is."""
        self._check_open()
        return (Segment(offset_bytes=0, nbytes=self.nbytes, payload=_PAYLOAD),)

    def import_peer(self, rank: int, segments: Sequence[Segment]) -> PeerMapping:
        """Return where a peer's heap is; HeapError if it is not one of NCCL's."""
        try:
            self._check_open()
            if [segment.payload for segment in segments] != [_PAYLOAD] or rank not in self._pointers:
                raise HeapError(f"rank {rank} has no heap of NCCL's: its allocator is not 'nccl'")
            return PeerMapping(rank, self._pointers[rank], segments[0].nbytes)
        finally:
            close_all(each.fd for each in segments if each.fd is not None)

    def close(self) -> None:
        """Leave the communicator, without waiting for other ranks; live tensors keep the memory.  Idempotent."""
        communicator, self._communicator = self._communicator, None
        self._memory = self._device_communicator = None
        self._pointers = {}
        if communicator is not None:
            communicator.abort()  # and not destroy(), which waits for the ranks of the node


def load_nccl() -> Any:
    """Return the module nccl.core of nccl4py; UnsupportedError if it or NCCL is not installed, or NCCL is too old."""
    install = "pip install 'iris-allocators[nccl]'"
    try:
        nccl: Any = importlib.import_module("nccl.core")
    except ImportError as e:
        raise UnsupportedError(f"allocator 'nccl' needs nccl4py, which cannot be imported ({e}): {install}") from e
    library = nccl.get_version().libnccl
    if library is None:
        raise UnsupportedError(f"allocator 'nccl' needs NCCL, and nccl4py finds no libnccl.so.2: {install}")
    if library.version.release < OLDEST:
        raise UnsupportedError(
            f"NCCL {library.version} is loaded ({library.path}), and allocator 'nccl' needs "
            f"{'.'.join(map(str, OLDEST))}: {install}; where torch has loaded its own first, name the new one in "
            "LD_PRELOAD"
        )
    return nccl
