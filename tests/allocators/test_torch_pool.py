"""The "torch" allocator on a pretended driver: the kit, every failure, torch's settings, what is refused."""

import contextlib
import gc
import itertools

import pytest
import torch

from iris_allocators._plugin import torch_pool
from iris_allocators.torch_ipc import ALIGNMENT
from iris_core.errors import DriverError, HeapClosedError, HeapError, IrisError, PeerAccessError, UnsupportedError
from iris_core.testing import AllocatorConformance
from iris_core.testing.conformance import oracle
from iris_core.types import DeviceTarget, DeviceType

from .fake_ipc import NO_PEER_ACCESS, FakeIpc, Ranks, make
from .vmem_cluster import CPU

U8 = torch.uint8


class TestTorchOnPretendedDriver(AllocatorConformance):
    """The kit; what it runs in rank processes needs a GPU, and only a GPU's torch says OutOfMemoryError."""

    test_host_tensors_outlive_close = None
    test_peers_in_other_processes = None
    test_host_impossible_size_is_an_error = None

    @pytest.fixture
    def plugin(self):
        return torch_pool

    @pytest.fixture
    def target(self):
        return CPU

    @pytest.fixture
    def make_allocator(self):
        return make


# -- the heap inside the pool -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("nbytes", [1, 4096, 1 << 20])
def test_the_heap_does_not_begin_where_the_pool_does(monkeypatch, nbytes):
    """torch knows its blocks by address, and memory pools on the heap give it addresses of the heap."""
    empty, aligned = torch.empty, []

    def empty_aligned(size, **options):
        whole = empty(size + ALIGNMENT, **options)
        aligned.append(whole[-whole.data_ptr() % ALIGNMENT :][:size])
        return aligned[-1]

    monkeypatch.setattr(torch, "empty", empty_aligned)
    allocator = make(nbytes)
    (pool,) = aligned
    assert pool.data_ptr() % ALIGNMENT == 0
    assert allocator.base_ptr == pool.data_ptr() + ALIGNMENT
    assert allocator.base_ptr + allocator.nbytes == pool.data_ptr() + pool.numel()
    allocator.close()


def test_a_small_heap_holds_many_tensors():
    with Ranks(1) as ranks:
        (heap,) = ranks.heaps
        heap.open()
        tensors = [heap.allocate(4, torch.float32).fill_(i) for i in range(4096)]
        assert [int(t[0]) for t in tensors] == list(range(4096))
        assert heap.stats().free == 0


def test_a_device_without_room_is_an_error_of_the_heap(monkeypatch):
    def empty(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch, "empty", empty)
    with pytest.raises(HeapError, match="cpu has no room for a heap of 1048576 bytes: CUDA out of memory"):
        make(1 << 20)


# -- torch's settings -------------------------------------------------------------------------------------------------
@pytest.fixture
def settings():
    """torch's allocator settings may be changed in the test."""
    before, change = torch._C._accelerator_getAllocatorSettings(), torch._C._accelerator_setAllocatorSettings
    yield change
    change(before)


@pytest.mark.parametrize("mode", ["works", "no room", "old torch"])
def test_expandable_segments_are_off_for_the_pool_alone(monkeypatch, settings, mode):
    mine = "garbage_collection_threshold:0.75,expandable_segments:True, "
    settings(mine)
    seen = []
    empty, now = torch.empty, torch._C._accelerator_getAllocatorSettings

    def watched(*args, **options):
        seen.append(now())
        if mode == "no room":
            raise torch.OutOfMemoryError("no room")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", watched)
    if mode == "old torch":
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
        snapshot = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": mine}}
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    with pytest.raises(HeapError) if mode == "no room" else contextlib.nullcontext():
        make(1 << 20).close()
    assert seen == ["garbage_collection_threshold:0.75,expandable_segments:True,expandable_segments:False"]
    assert now() == mine, "all of them, or the threshold would be back at its default"


def test_other_settings_are_left_alone(monkeypatch, settings):
    settings("garbage_collection_threshold:0.75")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: pytest.fail(text))
    make(1 << 20).close()


# -- failures ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["ipc_export", "address_range"])
def test_a_system_without_ipc_is_refused_with_a_way_out(name):
    driver = FakeIpc()
    driver.fail_next[name] = 1
    with pytest.raises(UnsupportedError, match=rf"{name} failed with .*allocator='vmem'"):
        make(1 << 20, driver=driver)


@pytest.mark.parametrize(("rank", "which"), [(0, 1), (1, 2), (2, 1), (2, 2)])
def test_no_access_to_one_peer_is_the_same_error_everywhere_and_no_handle_stays_open(rank, which):
    """With which = k, this rank has opened k - 1 peers before."""
    with Ranks(3) as ranks:
        ranks.drivers[rank].fail_with = NO_PEER_ACCESS
        ranks.drivers[rank].fail_next["ipc_open"] = which
        errors = ranks.attempt(lambda heap: heap.open())
        assert [type(e) for e in errors] == [PeerAccessError] * 3
        peer = [p for p in range(3) if p != rank][which - 1]
        cause = str(errors[rank])
        assert cause.startswith(
            f"rank {rank} could not map the heap of a peer: cpu cannot map the memory of rank {peer} "
        )
        assert "PEER_ACCESS_UNSUPPORTED" in cause
        assert "nvidia-smi topo -p2p r" in cause
        assert "--ipc=host" in cause
        assert {str(e) for e in errors} == {cause}
        assert ranks.opened[rank] == which - 1
        for heap in ranks.heaps:
            heap.close()
        assert ranks.opened == [0, 0, 0]


def test_ranks_that_fail_together_are_told_together():
    with Ranks(3) as ranks:
        for rank in (0, 2):
            ranks.drivers[rank].fail_next["ipc_open"] = 1
        errors = ranks.attempt(lambda heap: heap.open())
        assert [type(e) for e in errors] == [PeerAccessError] * 3
        assert len({str(e) for e in errors}) == 1
        one, two = str(errors[0]).splitlines()
        assert one.startswith("rank 0 could not map the heap of a peer: cpu cannot map the memory of rank 1 (")
        assert two.startswith("rank 2 could not map the heap of a peer: cpu cannot map the memory of rank 0 (")
        assert str(errors[2].__cause__) in two


def live_and_fail(number):
    """A life whose call `number` of the driver fails: that call (None if there is none), the error, handles left."""
    driver, error = FakeIpc(), None
    with contextlib.ExitStack() as stack:
        peers = [make(1 << 16, rank, 4) for rank in range(3)]
        for peer in peers:
            stack.callback(peer.close)
        driver.fail_at = number
        try:
            mine = make(1 << 16, 3, 4, driver)
            stack.callback(mine.close)
            mine.export()
            for rank, peer in enumerate(peers):
                mine.import_peer(rank, peer.export())
            mine.tensor(0, 100, lambda: None).fill_(1)
            mine.close()
        except IrisError as e:
            error = e
        name = driver.calls[number - 1] if len(driver.calls) >= number else None
    return name, error, driver.num_opened


def test_every_driver_call_may_fail_and_nothing_leaks():
    failed = []
    for number in itertools.count(1):
        before = oracle.open_descriptors()
        name, error, opened = live_and_fail(number)
        if name is None:
            assert error is None
            assert opened == 0
            break
        assert error is not None, f"call {number}, {name}: no error"
        assert opened == (name == "ipc_close"), f"call {number}, {name}: more than the one that would not close"
        assert oracle.open_descriptors() == before
        failed.append(name)
    assert failed == ["ipc_export", "address_range", *["ipc_open"] * 3, *["ipc_close"] * 3]


def test_a_peer_that_cannot_be_unmapped_does_not_keep_the_others():
    driver = FakeIpc()
    mine, peers = make(1 << 16, 2, 3, driver), [make(1 << 16, rank, 3) for rank in range(2)]
    for rank, peer in enumerate(peers):
        mine.import_peer(rank, peer.export())
    driver.fail_next["ipc_close"] = 1
    with pytest.raises(DriverError, match="ipc_close"):
        mine.close()
    assert driver.num_opened == 1
    mine.close()
    with pytest.raises(HeapClosedError):
        mine.export()


def test_the_pool_lives_as_long_as_the_last_tensor():
    allocator = make(1 << 16)
    told = []
    tensor = allocator.tensor(256, 100, lambda: told.append(1))
    pool = allocator._pool.untyped_storage()._weak_ref()
    allocator.close()
    gc.collect()
    tensor.fill_(3)
    assert not torch.UntypedStorage._expired(pool)
    del tensor
    gc.collect()
    assert told == [1]
    assert torch.UntypedStorage._expired(pool)
    torch.UntypedStorage._free_weak_ref(pool)


# -- the plugin -------------------------------------------------------------------------------------------------------
def test_the_probe_says_what_is_missing(monkeypatch):
    probe = torch_pool.iris_plugin_probe
    assert "not of cpu" in probe(CPU).reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "cuda-bindings" in probe(DeviceTarget(DeviceType.CUDA)).reason
    assert "iris-allocators[rocm]" in probe(DeviceTarget(DeviceType.HIP)).reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert probe(DeviceTarget(DeviceType.CUDA))
    assert probe(DeviceTarget(DeviceType.HIP))
