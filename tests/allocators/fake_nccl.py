"""What allocator "nccl" calls of nccl4py, on memory of the host: ranks are in one process."""

import pathlib
from types import SimpleNamespace

import torch
from packaging.version import Version


class FakeNccl:
    """One rank's module nccl.core, its communicator and its window; those of a world share `world`, a dict.

    Attributes:
        calls: names of the calls so far.
        fail: names of calls that raise.
        gin_type: the network that a communicator says it has.
        separate: ranks whose windows have no address here, although they are on this node.
        requirements: of the device communicator.
    """

    WindowFlag = SimpleNamespace(COLL_SYMMETRIC=1)
    NcclGinType = SimpleNamespace(NONE=0, PROXY=2)
    NcclGinConnectionType = SimpleNamespace(FULL=1)
    UniqueId = SimpleNamespace(from_bytes=bytes)
    NCCLDevCommRequirements = dict
    handle = 77

    def __init__(self, world=None, library="2.32.3", path=None):
        self.world = {} if world is None else world
        self.calls = []
        self.fail = set()
        self.gin_type, self.separate = self.NcclGinType.PROXY, set()
        self.requirements = None
        loaded = SimpleNamespace(version=Version(library), path=path and pathlib.Path(path)) if library else None
        self.version = SimpleNamespace(nccl4py=Version("0.6.0"), nccl_bindings=Version("2.32.3"), libnccl=loaded)
        self.Communicator = SimpleNamespace(init=self._init)

    def _enter(self, name):
        self.calls.append(name)
        if name in self.fail:
            raise RuntimeError(f"{name}: unhandled system error")

    def get_version(self):
        return self.version

    def mem_alloc(self, nbytes, device):
        self._enter("mem_alloc")
        memory = torch.empty(nbytes + 4096, dtype=torch.uint8)
        return SimpleNamespace(handle=-(-memory.data_ptr() // 4096) * 4096, memory=memory)

    def get_unique_id(self):
        return bytes(range(128))

    def _init(self, count, rank, unique_id):
        self._enter("init")
        assert unique_id == self.get_unique_id()
        self.rank = rank
        return self

    def register_window(self, memory, flags):
        self._enter("register_window")
        assert flags == self.WindowFlag.COLL_SYMMETRIC
        self.world[self.rank] = memory.handle
        return self

    def get_peer_device_pointer(self, rank):
        return None if rank in self.separate else self.world.get(rank, 4096 * (rank + 1))

    def create_dev_comm(self, requirements):
        self._enter("create_dev_comm")
        self.requirements = requirements
        return SimpleNamespace(dev_comm=bytes(range(248)))

    def abort(self):
        self._enter("abort")
