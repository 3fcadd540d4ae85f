"""The "nccl" allocator: windows on a pretended NCCL, what is refused, and the emulation of CPU ranks under the kit."""

import gc
import os

import pytest
import torch

from iris_allocators import nccl as room
from iris_allocators._plugin import nccl as plugin
from iris_allocators.nccl.emulated import EmulatedAllocator
from iris_allocators.nccl.window import GRANULE, NcclAllocator, load_nccl
from iris_allocators.settings import NcclSettings
from iris_core.errors import HeapClosedError, HeapError, PeerAccessError, UnsupportedError
from iris_core.testing import AllocatorConformance
from iris_core.types import CreateRequest, DeviceTarget, DeviceType, Segment

from .fake_driver import as_bytes
from .fake_nccl import FakeNccl
from .vmem_cluster import CPU

ONE_NODE, TWO_NODES = ((0, 1),), ((0,), (1,))


class TestEmulated(AllocatorConformance):
    """The kit, on CPU ranks."""

    @pytest.fixture
    def plugin(self):
        return plugin

    @pytest.fixture
    def target(self):
        return CPU


def request(nbytes=1 << 20, rank=0, device=DeviceType.CPU, **settings):
    return CreateRequest(DeviceTarget(device), rank, 2, nbytes, NcclSettings(**settings))


def make(nccl, rank=0, nbytes=1 << 20):
    return NcclAllocator(request(nbytes, rank), nccl, as_bytes)


@pytest.fixture
def bitcode(tmp_path):
    """Where NCCL would be, with its device functions."""
    (tmp_path / "libnccl_device.bc").write_bytes(b"BC")
    return tmp_path / "libnccl.so.2"


# -- windows ----------------------------------------------------------------------------------------------------------
def test_ranks_of_a_node_have_each_others_addresses():
    world = {}
    ranks = [make(FakeNccl(world), rank) for rank in range(2)]
    invitations = [each.invite() for each in ranks]
    assert [len(each) for each in invitations] == [16, 16]
    world.update({rank: each.base_ptr for rank, each in enumerate(ranks)})
    assert [each.connect(invitations, ONE_NODE) for each in ranks] == [None, None]
    for rank, each in enumerate(ranks):
        peer = 1 - rank
        mapping = each.import_peer(peer, ranks[peer].export())
        assert (mapping.rank, mapping.base_ptr, mapping.nbytes) == (peer, ranks[peer].base_ptr, GRANULE)
    for each in ranks:
        each.close()


def test_nodes_are_connected_for_kernels(bitcode):
    nccl = FakeNccl({}, path=str(bitcode))
    allocator = make(nccl)
    network = allocator.connect([allocator.invite(), (0,) * 16], TWO_NODES)
    assert network.version == (2, 32)
    assert network.bitcode == str(bitcode.with_name("libnccl_device.bc"))
    communicator, window = network.words
    assert window == 77
    assert bytes(as_bytes_at(communicator, 248)) == bytes(range(248))
    assert nccl.requirements["gin_connection_type"] == FakeNccl.NcclGinConnectionType.FULL
    allocator.close()
    assert nccl.calls[-1] == "abort"


def as_bytes_at(address, nbytes):
    import ctypes

    return (ctypes.c_ubyte * nbytes).from_address(address)


def test_tensors_keep_the_memory_and_tell_when_they_are_gone():
    allocator, released = make(FakeNccl({})), []
    x = allocator.tensor(4096, 64, lambda: released.append(1))
    assert (x.data_ptr(), x.numel(), x.dtype) == (allocator.base_ptr + 4096, 64, torch.uint8)
    view = x.fill_(3)[8:]
    allocator.close()
    allocator.close()
    assert view.unique().tolist() == [3]
    del x
    assert released == []
    del view
    gc.collect()
    assert released == [1]
    for call in (allocator.invite, allocator.export, lambda: allocator.tensor(0, 1, lambda: None)):
        with pytest.raises(HeapClosedError):
            call()


def test_sizes_are_whole_granules():
    assert [make(FakeNccl({}), nbytes=n).nbytes for n in (1, GRANULE, GRANULE + 1)] == [GRANULE, GRANULE, 2 * GRANULE]


def test_another_allocators_segment_is_refused():
    allocator = make(FakeNccl({}))
    allocator.connect([allocator.invite(), (0,) * 16], ONE_NODE)
    fd = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(HeapError, match="'nccl'"):
        allocator.import_peer(1, [Segment(0, GRANULE, b"other", fd)])
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "nodes", "kind"),
    [
        ("init", ONE_NODE, PeerAccessError), ("register_window", ONE_NODE, PeerAccessError),
        ("create_dev_comm", TWO_NODES, PeerAccessError),
    ],
)  # fmt: skip
def test_errors_of_nccl_are_named(bitcode, call, nodes, kind):
    nccl = FakeNccl({}, path=str(bitcode))
    allocator = make(nccl)
    nccl.fail = {call}
    with pytest.raises(kind, match=f"{call}: unhandled system error; NCCL_DEBUG=INFO"):
        allocator.connect([allocator.invite(), (0,) * 16], nodes)
    allocator.close()
    assert ("abort" in nccl.calls) == (call != "init")


def test_no_room_is_named():
    nccl = FakeNccl({})
    nccl.fail = {"mem_alloc"}
    with pytest.raises(HeapError, match="no room on cpu"):
        make(nccl)


def test_nodes_that_nccl_sees_otherwise_are_named():
    nccl = FakeNccl({})
    nccl.separate = {1}
    allocator = make(nccl)
    with pytest.raises(PeerAccessError, match=r"ranks 1, .*NCCL_HOSTID"):
        allocator.connect([allocator.invite(), (0,) * 16], ONE_NODE)
    allocator.close()


def test_without_a_network_for_kernels(bitcode):
    nccl = FakeNccl({}, path=str(bitcode))
    nccl.gin = FakeNccl.NcclGinType.NONE
    allocator = make(nccl)
    with pytest.raises(UnsupportedError, match="NCCL_GIN_TYPE=2"):
        allocator.connect([allocator.invite(), (0,) * 16], TWO_NODES)
    allocator.close()


@pytest.mark.parametrize(
    ("library", "has_path", "part"), [("2.30.7", True, "NCCL 2.30.7 is loaded"), ("2.32.3", False, "libnccl_device.bc")]
)
def test_functions_of_another_version_are_refused_before_the_ranks_meet(bitcode, library, has_path, part):
    nccl = FakeNccl({}, library, str(bitcode) if has_path else "")
    allocator = make(nccl)
    with pytest.raises(UnsupportedError, match=part):
        allocator.connect([allocator.invite(), (0,) * 16], TWO_NODES)
    assert "init" not in nccl.calls
    allocator.close()


@pytest.mark.parametrize(("library", "part"), [("2.29.3", "NCCL 2.29.3 is loaded"), (None, "finds no libnccl.so.2")])
def test_an_old_nccl_is_named(monkeypatch, library, part):
    nccl = FakeNccl({}, library or "0")
    if library is None:
        version = nccl.get_version()
        version.libnccl = None
        nccl.get_version = lambda: version
    monkeypatch.setattr("importlib.import_module", lambda name: nccl)
    with pytest.raises(UnsupportedError, match=part):
        load_nccl()


def test_without_nccl4py(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "nccl.core", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'iris-allocators\[nccl\]'"):
        load_nccl()


def test_the_probe_says_what_is_lacking(monkeypatch):
    import importlib.metadata

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    probe = plugin.iris_plugin_probe
    assert probe(CPU).ok
    assert "NVIDIA" in probe(DeviceTarget(DeviceType.HIP)).reason
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert "nccl4py and nvidia-nccl-cu13" in probe(DeviceTarget(DeviceType.CUDA)).reason
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1")
    assert probe(DeviceTarget(DeviceType.CUDA)).ok


# -- the emulation ----------------------------------------------------------------------------------------------------
def test_the_device_decides_which_it_is(monkeypatch):
    monkeypatch.setattr("iris_allocators.nccl.window.load_nccl", lambda: FakeNccl({}))
    for device, kind in ((DeviceType.CPU, EmulatedAllocator), (DeviceType.CUDA, NcclAllocator)):
        allocator = room.make(request(device=device))
        assert type(allocator) is kind
        allocator.close()


def test_far_memory_is_mapped_for_the_emulation():
    ranks = [EmulatedAllocator(request(rank=rank, emulated_delay=0.5)) for rank in range(2)]
    invitations = [each.invite() for each in ranks]
    networks = [each.connect(invitations, TWO_NODES) for each in ranks]
    ranks[1].tensor(64, 8, lambda: None).fill_(9)
    assert bytes(as_bytes_at(networks[0].far_bases[1] + 64, 8)) == bytes([9] * 8)
    assert (networks[0].far_bases[0], networks[0].delay_s, networks[0].bitcode) == (0, 0.5, "")
    assert ranks[0].connect(invitations, ONE_NODE) is None
    for each in ranks:
        each.close()


def test_a_rank_of_another_machine_is_named():
    rank = EmulatedAllocator(request())
    with pytest.raises(PeerAccessError, match=r"rank 1 .*IRIS_NODES"):
        rank.connect([rank.invite(), (1 << 30, 3)], TWO_NODES)
    rank.close()
