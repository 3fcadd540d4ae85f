"""The "nccl" allocator: windows on a pretended NCCL, what is refused, and the emulation of CPU ranks under the kit."""

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import pathlib
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from tables import table

from iris_allocators._plugin import nccl as plugin
from iris_allocators.nccl.emulated import EmulatedAllocator
from iris_allocators.nccl.window import GRANULE, NcclAllocator, load_nccl
from iris_allocators.settings import NcclSettings
from iris_core.errors import HeapClosedError, HeapError, PeerAccessError, UnsupportedError
from iris_core.testing import AllocatorConformance
from iris_core.types import CreateRequest, DeviceTarget, DeviceType, Segment

from . import fake_driver as fake_driver
from .cluster import CPU, nothing

ONE_NODE, TWO_NODES = ((0, 1),), ((0,), (1,))


class FakeNccl:
    """One rank's module nccl.core, its communicator and its window, in memory of the host.

    Ranks of a world share `world`.  Calls in `fail` raise, and windows of ranks in `separate` have no address here.
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


class TestEmulated(AllocatorConformance):
    plugin = pytest.fixture(lambda self: plugin)
    target = pytest.fixture(lambda self: CPU)


def request(nbytes=1 << 20, rank=0, device=DeviceType.CPU, **settings):
    return CreateRequest(DeviceTarget(device), rank, 2, nbytes, NcclSettings(**settings))


def make(nccl, rank=0, nbytes=1 << 20):
    return contextlib.closing(NcclAllocator(request(nbytes, rank), nccl))


class TestOnPretendedNccl(AllocatorConformance):
    """The kit, of one rank: peers need a communicator, and what runs in processes a GPU."""

    same_process_peers = False
    test_static_import_is_light = test_host_tensors_outlive_close = test_peers_in_other_processes = None
    plugin = pytest.fixture(lambda self: plugin)
    target = pytest.fixture(lambda self: CPU)

    @pytest.fixture
    def make_allocator(self):
        return lambda nbytes, rank=0, _=1: NcclAllocator(request(nbytes, rank), FakeNccl())


def connect(allocator, nodes):
    return allocator.connect([allocator.invite(), (0,) * 16], nodes)


@pytest.fixture
def library(tmp_path):
    """Where NCCL would be, with its device functions."""
    (tmp_path / "libnccl_device.bc").write_bytes(b"BC")
    return tmp_path / "libnccl.so.2"


def test_ranks_of_a_node_have_each_others_addresses():
    world = {}
    with make(FakeNccl(world)) as one, make(FakeNccl(world), rank=1) as two:
        invitations = [each.invite() for each in (one, two)]
        assert [len(each) for each in invitations] == [16, 16]
        world.update({0: one.base_ptr, 1: two.base_ptr})
        assert [each.connect(invitations, ONE_NODE) for each in (one, two)] == [None, None]
        for each, peer, rank in ((one, two, 1), (two, one, 0)):
            mapping = each.import_peer(rank, peer.export())
            assert (mapping.rank, mapping.base_ptr, mapping.nbytes) == (rank, peer.base_ptr, GRANULE)
        fd = os.open("/dev/null", os.O_RDONLY)
        with pytest.raises(HeapError, match="'nccl'"):
            one.import_peer(1, [Segment(0, GRANULE, b"other", fd)])
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_nodes_are_connected_for_kernels(library):
    nccl = FakeNccl(path=library)
    with make(nccl) as allocator:
        network = connect(allocator, TWO_NODES)
        assert network.version == (2, 32)
        assert network.bitcode == str(library.with_name("libnccl_device.bc"))
        communicator, window = network.words
        assert window == 77
        assert ctypes.string_at(communicator, 248) == bytes(range(248))
        assert nccl.requirements["gin_connection_type"] == FakeNccl.NcclGinConnectionType.FULL
    assert nccl.calls[-1] == "abort"


def test_tensors_keep_the_memory():
    with make(FakeNccl()) as allocator:
        memory = weakref.ref(allocator._memory.memory)
        view = allocator.tensor(4096, 64, nothing)[8:]
        allocator.close()
    gc.collect()
    assert memory() is not None
    del view
    gc.collect()
    assert memory() is None
    with pytest.raises(HeapClosedError):
        allocator.invite()


@table("nodes, kind, says, last, changes", [
    (ONE_NODE, PeerAccessError, "init: unhandled system error; NCCL_DEBUG=INFO", "init", {"fail": {"init"}}),
    (ONE_NODE, PeerAccessError, "register_window: .*; NCCL_DEBUG=INFO", "abort", {"fail": {"register_window"}}),
    (TWO_NODES, PeerAccessError, "create_dev_comm: .*; NCCL_DEBUG=INFO", "abort", {"fail": {"create_dev_comm"}}),
    (ONE_NODE, UnsupportedError, "no symmetric windows", "abort", {"handle": 0}),
    (ONE_NODE, PeerAccessError, r"ranks 1, .*NCCL_HOSTID", "abort", {"separate": {1}}),
    (TWO_NODES, UnsupportedError, "NCCL_GIN_TYPE=2", "abort", {"gin_type": FakeNccl.NcclGinType.NONE}),
    # functions of another version are refused before the ranks meet
    (TWO_NODES, UnsupportedError, "NCCL 2.30.7 is loaded", "mem_alloc", {"library": "2.30.7"}),
    (TWO_NODES, UnsupportedError, "libnccl_device.bc", "mem_alloc", {"path": None}),
])  # fmt: skip
def test_ranks_that_nccl_does_not_connect(library, nodes, kind, says, last, changes):
    nccl = FakeNccl(library=changes.get("library", "2.32.3"), path=changes.get("path", library))
    vars(nccl).update(changes)
    with make(nccl) as allocator, pytest.raises(kind, match=says):
        connect(allocator, nodes)
    assert nccl.calls[-1] == last


def test_no_room_is_named():
    nccl = FakeNccl()
    nccl.fail = {"mem_alloc"}
    with pytest.raises(HeapError, match="no room on cpu"):
        make(nccl)


@table("library, says", [("2.29.3", "NCCL 2.29.3 is loaded"), ("", "finds no libnccl.so.2"), (None, "pip install")])
def test_an_nccl_that_is_old_or_not_there_is_named(monkeypatch, library, says):
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    if library is not None:
        monkeypatch.setattr("importlib.import_module", lambda name: FakeNccl(library=library))
    with pytest.raises(UnsupportedError, match=says) as caught:
        load_nccl()
    assert "pip install 'iris-allocators[nccl]'" in str(caught.value)


def test_the_probe_says_what_is_lacking(monkeypatch):
    probe = plugin.iris_plugin_probe
    assert probe(CPU).ok
    assert "NVIDIA" in probe(DeviceTarget(DeviceType.HIP)).reason
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter(()))
    assert "nccl4py and nvidia-nccl-cu13" in probe(DeviceTarget(DeviceType.CUDA)).reason
    monkeypatch.setattr(importlib.metadata, "distributions", lambda name: iter([name]))
    assert probe(DeviceTarget(DeviceType.CUDA)).ok


@table("device, kind", [(DeviceType.CPU, EmulatedAllocator), (DeviceType.CUDA, NcclAllocator)])
def test_the_device_decides_which_it_is(monkeypatch, device, kind):
    monkeypatch.setattr("iris_allocators.nccl.window.load_nccl", FakeNccl)
    with contextlib.closing(plugin.iris_plugin_create(request(device=device))) as allocator:
        assert type(allocator) is kind


def test_far_memory_is_mapped_for_the_emulation():
    ranks = one, two = [EmulatedAllocator(request(rank=rank, emulated_delay=0.5)) for rank in range(2)]
    invitations = [each.invite() for each in ranks]
    network, _ = [each.connect(invitations, TWO_NODES) for each in ranks]
    two.tensor(64, 8, nothing).fill_(9)
    assert ctypes.string_at(network.far_bases[1] + 64, 8) == bytes([9] * 8)
    assert (network.far_bases[0], network.delay_s, network.bitcode) == (0, 0.5, "")
    assert one.connect(invitations, ONE_NODE) is None
    with pytest.raises(PeerAccessError, match=r"rank 1 .*IRIS_NODES"):
        one.connect([one.invite(), (1 << 30, 3)], TWO_NODES)
    for each in ranks:
        each.close()
