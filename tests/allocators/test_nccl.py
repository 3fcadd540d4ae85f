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
from unittest.mock import MagicMock

import pytest
import torch
from packaging.version import Version
from tables import raises, table

from iris_allocators._plugin import nccl as plugin
from iris_allocators.nccl.emulated import EmulatedAllocator
from iris_allocators.nccl.window import GRANULE, NcclAllocator, load_nccl
from iris_allocators.settings import NcclSettings
from iris_core.errors import HeapClosedError, HeapError, PeerAccessError, UnsupportedError
from iris_core.testing import AllocatorConformance
from iris_core.types import CreateRequest, DeviceTarget, DeviceType, Segment

from . import fake_driver as fake_driver
from .cluster import CPU, make_torch, nothing

ONE_NODE, TWO_NODES = ((0, 1),), ((0,), (1,))


_COMMUNICATOR = "Communicator.init.return_value"
_WINDOW = f"{_COMMUNICATOR}.register_window.return_value"
UNIQUE_ID = bytes(range(128))


def fake_nccl(world=(), library="2.32.3", path=None, **changes):
    """One rank's module nccl.core, in memory of the host; a `world` has addresses by rank."""
    loaded = SimpleNamespace(version=Version(library), path=path and pathlib.Path(path)) if library else None
    version = SimpleNamespace(nccl4py=Version("0.6.0"), nccl_bindings=Version("2.32.3"), libnccl=loaded)

    def allocate(nbytes, device):
        memory = torch.empty(nbytes + 4096, dtype=torch.uint8)
        return SimpleNamespace(handle=-(-memory.data_ptr() // 4096) * 4096, memory=memory)

    return MagicMock(**{
        "get_version.return_value": version, "mem_alloc.side_effect": allocate,
        "get_unique_id.return_value": UNIQUE_ID, "UniqueId.from_bytes": bytes, "NcclGinType.NONE": 0,
        f"{_COMMUNICATOR}.gin_type": 2, f"{_COMMUNICATOR}.create_dev_comm.return_value.dev_comm": bytes(range(248)),
        f"{_WINDOW}.handle": 77, f"{_WINDOW}.get_peer_device_pointer": lambda rank: dict(world).get(rank, 4096),
        **changes,
    })  # fmt: skip


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
        return lambda nbytes, rank=0, _=1: NcclAllocator(request(nbytes, rank), fake_nccl())


def connect(allocator, nodes):
    return allocator.connect([allocator.invite(), (0,) * 16], nodes)


@pytest.fixture
def library(tmp_path):
    (tmp_path / "libnccl_device.bc").write_bytes(b"BC")
    return tmp_path / "libnccl.so.2"


def test_ranks_of_a_node_have_each_others_addresses():
    world = {}
    with make(fake_nccl(world)) as one, make(fake_nccl(world), rank=1) as two:
        invitations = [each.invite() for each in (one, two)]
        assert [len(each) for each in invitations] == [16, 16]
        world.update({0: one.base_ptr, 1: two.base_ptr})
        assert [each.connect(invitations, ONE_NODE) for each in (one, two)] == [None, None]
        for each, peer, rank in ((one, two, 1), (two, one, 0)):
            mapping = each.import_peer(rank, peer.export())
            assert (mapping.rank, mapping.base_ptr, mapping.nbytes) == (rank, peer.base_ptr, GRANULE)
        fd = os.open("/dev/null", os.O_RDONLY)
        with raises(HeapError, name="'nccl'"):
            one.import_peer(1, [Segment(0, GRANULE, b"other", fd)])
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_nodes_are_connected_for_kernels(library):
    nccl = fake_nccl(path=library)
    joined = nccl.Communicator.init.return_value
    with make(nccl) as allocator:
        network = connect(allocator, TWO_NODES)
        nccl.Communicator.init.assert_called_once_with(2, 0, UNIQUE_ID)
        joined.register_window.assert_called_once_with(allocator._memory, nccl.WindowFlag.COLL_SYMMETRIC)
        assert (network.version, network.bitcode) == ((2, 32), str(library.with_name("libnccl_device.bc")))
        communicator, window = network.words
        assert (ctypes.string_at(communicator, 248), window) == (bytes(range(248)), 77)
        required = nccl.NCCLDevCommRequirements.call_args.kwargs
        assert required["gin_connection_type"] is nccl.NcclGinConnectionType.FULL
        assert not joined.abort.called
    joined.abort.assert_called_once_with()


@table("make", [lambda: NcclAllocator(request(), fake_nccl()), lambda: make_torch(1 << 20)])
def test_tensors_keep_the_memory(make):
    allocator = make()
    memory = weakref.ref(getattr(allocator._memory, "memory", allocator._memory))
    view = allocator.tensor(4096, 64, nothing)[8:]
    allocator.close()
    gc.collect()
    assert memory() is not None
    del view
    gc.collect()
    assert memory() is None, "although the allocator lives"
    with pytest.raises(HeapClosedError):
        allocator.export()


def failing(name):
    return {f"{name}.side_effect": RuntimeError("unhandled system error")}


@table("nodes, kind, key, calls, changes", [  # how many there are of joining the communicator and leaving it
    (ONE_NODE, PeerAccessError, "unhandled", 1, failing("Communicator.init")),
    (ONE_NODE, PeerAccessError, "unhandled", 2, failing(f"{_COMMUNICATOR}.register_window")),
    (TWO_NODES, PeerAccessError, "for kernels", 2, failing(f"{_COMMUNICATOR}.create_dev_comm")),
    (ONE_NODE, UnsupportedError, "windows", 2, {f"{_WINDOW}.handle": 0}),
    (ONE_NODE, PeerAccessError, "host", 2, {f"{_WINDOW}.get_peer_device_pointer": {0: 4096}.get}),
    (TWO_NODES, UnsupportedError, "proxy", 2, {f"{_COMMUNICATOR}.gin_type": 0}),
    # functions of another version are refused before the ranks meet
    (TWO_NODES, UnsupportedError, "loaded", 0, {"library": "2.30.7"}),
    (TWO_NODES, UnsupportedError, "functions", 0, {"path": None}),
])  # fmt: skip
def test_ranks_that_nccl_does_not_connect(library, nodes, kind, key, calls, changes):
    nccl = fake_nccl(**{"path": library, **changes})
    with make(nccl) as allocator, raises(kind, f"allocators.{key}", version="2.30.7"):
        connect(allocator, nodes)
    assert nccl.Communicator.init.call_count + nccl.Communicator.init.return_value.abort.call_count == calls


@table("library, key", [("2.29.3", "allocators.loaded"), ("", "allocators.not found"), (None, "any")])
def test_an_nccl_that_is_old_or_not_there_is_named(monkeypatch, library, key):
    monkeypatch.setitem(sys.modules, "nccl.core", None)
    if library is not None:
        monkeypatch.setattr("importlib.import_module", lambda name: fake_nccl(library=library))
    with raises(UnsupportedError, key, "allocators.install", version=library):
        load_nccl()


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
    monkeypatch.setattr("iris_allocators.nccl.window.load_nccl", fake_nccl)
    with contextlib.closing(plugin.iris_plugin_create(request(device=device))) as allocator:
        assert type(allocator) is kind


def test_far_memory_is_mapped_for_the_emulation():
    with contextlib.closing(EmulatedAllocator(request(emulated_delay=0.5))) as one:
        network = one.connect([one.invite(), one.invite()], TWO_NODES)
        assert (network.far_bases[0], network.delay_s, network.bitcode) == (0, 0.5, "")
        assert one.connect([one.invite(), one.invite()], ONE_NODE) is None
        with raises(PeerAccessError, "allocators.far"):
            one.connect([one.invite(), (1 << 30, 3)], TWO_NODES)
