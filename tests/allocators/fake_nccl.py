"""What allocator "nccl" calls of nccl4py, on memory of the host: ranks are in one process."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import torch
from packaging.version import Version


class FakeNccl:
    """One rank's module nccl.core; those of a world share `world`, a dict.

    Attributes:
        calls: names of the calls so far.
        fail: names of calls that raise.
        gin: the network that a communicator says it has.
        separate: ranks whose windows have no address here, although they are on this node.
    """

    WindowFlag = SimpleNamespace(COLL_SYMMETRIC=1)
    NcclGinType = SimpleNamespace(NONE=0, PROXY=2)
    NcclGinConnectionType = SimpleNamespace(FULL=1)

    def __init__(self, world: dict[int, int], library: str = "2.32.3", path: str = "") -> None:
        self.world, self.library, self.bindings = world, library, "2.32.3"
        self.path = pathlib.Path(path) if path else None
        self.calls: list[str] = []
        self.fail: set[str] = set()
        self.gin, self.separate = self.NcclGinType.PROXY, set[int]()
        self.requirements: Any = None

    def _enter(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fail:
            raise RuntimeError(f"{name}: unhandled system error")

    def get_version(self) -> Any:
        library = SimpleNamespace(version=Version(self.library), path=self.path)
        return SimpleNamespace(nccl4py=Version("0.6.0"), nccl_bindings=Version(self.bindings), libnccl=library)

    def mem_alloc(self, nbytes: int, device: int) -> Any:
        self._enter("mem_alloc")
        memory = torch.zeros(nbytes + 4096, dtype=torch.uint8)
        return SimpleNamespace(handle=-(-memory.data_ptr() // 4096) * 4096, memory=memory)

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    class UniqueId:
        @staticmethod
        def from_bytes(text: bytes) -> bytes:
            assert text == bytes(range(128))
            return text

    @property
    def Communicator(self) -> Any:
        return SimpleNamespace(init=lambda count, rank, unique_id: FakeCommunicator(self, rank))

    def NCCLDevCommRequirements(self, **named: Any) -> dict[str, Any]:
        return named


class FakeCommunicator:
    """A communicator, its window and its device communicator."""

    def __init__(self, nccl: FakeNccl, rank: int) -> None:
        nccl._enter("init")
        self.nccl, self.rank, self.handle = nccl, rank, 77

    @property
    def gin_type(self) -> int:
        return self.nccl.gin

    def register_window(self, memory: Any, flags: int) -> Any:
        self.nccl._enter("register_window")
        assert flags == FakeNccl.WindowFlag.COLL_SYMMETRIC
        self.nccl.world[self.rank] = memory.handle
        return self

    def get_peer_device_pointer(self, rank: int) -> int | None:
        return None if rank in self.nccl.separate else self.nccl.world.get(rank, 4096 * (rank + 1))

    def create_dev_comm(self, requirements: Any) -> Any:
        self.nccl._enter("create_dev_comm")
        self.nccl.requirements = requirements
        return SimpleNamespace(dev_comm=bytes(range(248)))

    def abort(self) -> None:
        self.nccl._enter("abort")
