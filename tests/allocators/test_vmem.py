"""The "vmem" allocator on a pretended driver: the conformance kit, every failure, existing tensors, the end."""

import contextlib
import gc
import itertools
import os
import weakref

import pytest
import torch

from iris_allocators._plugin import vmem
from iris_allocators.driver.transaction import Transaction
from iris_allocators.info import TORCH_INFO, VMEM_INFO
from iris_allocators.vmem import lease
from iris_allocators.vmem.allocator import MAX_DEFAULT_GRANULE
from iris_core.errors import (
    DriverError,
    HeapClosedError,
    HeapError,
    HeapExhaustedError,
    IrisError,
    PeerAccessError,
    SettingsError,
    UnsupportedError,
)
from iris_core.testing import AllocatorConformance
from iris_core.testing.conformance import oracle
from iris_core.types import DeviceTarget, DeviceType, Segment

from .fake_driver import GRANULE, Expandable, FakeVmm
from .vmem_cluster import CPU, make, received

NOTHING = (0, 0, 0, 0)


def nothing():
    """A release that nobody waits for."""


class TestVmemOnPretendedDriver(AllocatorConformance):
    """The kit; what it runs in rank processes needs a GPU, and is tested by test_vmem_ranks here."""

    test_host_tensors_outlive_close = None
    test_peers_in_other_processes = None

    @pytest.fixture
    def plugin(self):
        return vmem

    @pytest.fixture
    def target(self):
        return CPU

    @pytest.fixture
    def make_allocator(self):
        return lambda nbytes, rank=0, world_size=1: make(nbytes, rank, world_size, granule=None)

    @pytest.fixture
    def make_importable(self):
        def make_one(allocator, nbytes):
            return Expandable(allocator._driver, GRANULE, GRANULE).tensor(256, (nbytes,), torch.uint8)

        return make_one


# -- addresses and granules -------------------------------------------------------------------------------------------
def test_a_heap_of_a_tebibyte_opens_and_only_what_is_used_is_committed():
    driver = FakeVmm(total=4 * MAX_DEFAULT_GRANULE)
    allocator = make(1 << 40, 3, 8, driver, granule=None)
    assert allocator.nbytes == 1 << 40
    assert allocator.granularity == MAX_DEFAULT_GRANULE
    assert driver.used == allocator.committed_bytes == 0
    allocator.commit((1 << 40) - 100, 100)
    assert driver.used == allocator.committed_bytes == MAX_DEFAULT_GRANULE
    allocator.tensor((1 << 40) - 100, 100, nothing).fill_(1)
    allocator.close()
    gc.collect()
    assert driver.counts() == NOTHING


def test_ranks_lie_side_by_side_in_one_range():
    driver = FakeVmm()
    allocators = [make(8 * GRANULE, rank, 3, driver) for rank in range(3)]
    me = allocators[1]
    for rank in (0, 2):
        mapping = me.import_peer(rank, received(allocators[rank].export()))
        assert mapping.base_ptr == me.base_ptr + (rank - 1) * me.nbytes
    assert driver.calls.count("reserve") == 3
    for allocator in allocators:
        allocator.close()
    assert driver.counts() == NOTHING


@pytest.mark.parametrize(
    ("nbytes", "granule"), [(1, GRANULE), (64 * GRANULE, GRANULE), (65 * 2 * GRANULE, 4 * GRANULE)]
)
def test_the_default_granule_grows_with_the_heap(nbytes, granule):
    allocator = make(nbytes, granule=None)
    assert allocator.granularity == granule
    assert allocator.nbytes % granule == 0
    allocator.close()


def test_a_granule_that_the_device_cannot_have_is_refused():
    driver = FakeVmm()
    with pytest.raises(SettingsError, match="IRIS_VMEM__GRANULE"):
        make(driver=driver, granule=GRANULE // 2)
    assert driver.counts() == NOTHING


def test_addresses_beyond_any_device_are_refused():
    with pytest.raises(HeapError, match="smaller heap_size"):
        make(1 << 50, world_size=8)
    with pytest.raises(HeapError, match="cannot reserve"):
        make(1 << 47)


# -- commit, decommit -------------------------------------------------------------------------------------------------
def test_commit_backs_whole_granules_once():
    driver = FakeVmm()
    allocator = make(driver=driver)
    allocator.commit(GRANULE - 1, 2)
    assert driver.used == 2 * GRANULE
    generation = allocator.generation
    allocator.commit(0, 2 * GRANULE)
    assert allocator.generation == generation
    allocator.commit(0, 4 * GRANULE)
    assert allocator.generation > generation
    assert driver.calls.count("create") == 4
    assert driver.calls.count("set_access") == 2, "one call for pieces that follow each other"
    allocator.decommit(GRANULE, 2 * GRANULE)
    assert driver.used == allocator.committed_bytes == 2 * GRANULE
    allocator.close()
    assert driver.counts() == NOTHING


def test_a_device_without_room_is_an_exhausted_heap_and_what_was_got_is_given_back():
    driver = FakeVmm(total=3 * GRANULE)
    allocator = make(driver=driver)
    allocator.commit(0, GRANULE)
    with pytest.raises(HeapExhaustedError, match=r"rank 0: cpu has no room for 262144 more .*CUDA_ERROR_OUT") as caught:
        allocator.commit(0, 5 * GRANULE)
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (4 * GRANULE, 2 * GRANULE)
    assert driver.used == GRANULE
    allocator.commit(GRANULE, 2 * GRANULE)
    allocator.tensor(0, 3 * GRANULE, nothing).fill_(1)
    allocator.close()
    assert driver.counts() == NOTHING


def test_memory_is_free_when_the_last_rank_has_let_go():
    drivers = FakeVmm(), FakeVmm()
    one, two = (make(rank=rank, world_size=2, driver=driver) for rank, driver in enumerate(drivers))
    one.commit(0, 2 * GRANULE)
    mapping = two.import_peer(0, received(one.export()))
    one.exchanged()
    one.tensor(0, 2 * GRANULE, nothing).fill_(7)
    assert oracle.read_bytes(mapping.base_ptr + GRANULE - 1, 3) == b"\7\7\7"
    assert drivers[1].counts()[:2] == (0, 2), "the mapping alone keeps a peer's memory"
    two.decommit(GRANULE, GRANULE)
    assert drivers[1].counts()[:2] == (0, 1)
    assert oracle.read_bytes(mapping.base_ptr, 1) == b"\7"
    one.decommit(GRANULE, GRANULE)
    one.commit(GRANULE, GRANULE)  # other memory
    segments = one.export()
    assert [segment.offset_bytes for segment in segments] == [GRANULE], "what peers have is not described again"
    two.import_peer(0, received(segments))
    one.tensor(GRANULE, 1, nothing).fill_(9)
    assert oracle.read_bytes(mapping.base_ptr + GRANULE, 1) == b"\x09"
    for allocator in (one, two):
        allocator.close()
    assert [driver.counts() for driver in drivers] == [NOTHING] * 2


def test_a_failed_decommit_is_finished_when_the_range_is_committed_again():
    driver = FakeVmm()
    allocator = make(driver=driver)
    allocator.commit(0, 2 * GRANULE)
    for name in ("unmap", "release"):
        driver.fail_at = len(driver.calls) + 1 + (name == "release")
        with pytest.raises(DriverError, match=name):
            allocator.decommit(0, 2 * GRANULE)
        allocator.commit(0, 2 * GRANULE)
        assert driver.counts() == (2, 2, 1, 2 * GRANULE)
        allocator.tensor(0, 2 * GRANULE, nothing).fill_(1)
    allocator.close()
    assert driver.counts() == NOTHING


# -- descriptors ------------------------------------------------------------------------------------------------------
def test_descriptors_are_open_from_export_until_all_peers_have_mapped():
    before = oracle.open_descriptors()
    one, two = make(rank=0, world_size=2), make(rank=1, world_size=2)
    one.commit(0, 3 * GRANULE)
    mine = oracle.open_descriptors()
    two.import_peer(0, received(one.export()))
    assert len(oracle.open_descriptors() - mine) == 6, "three offered; three memfds of the pretended driver"
    one.exchanged()
    assert len(oracle.open_descriptors() - mine) == 3
    assert list(one.export()) == []
    one.commit(3 * GRANULE, GRANULE)
    one.export()
    one.decommit(3 * GRANULE, GRANULE)
    assert len(oracle.open_descriptors() - mine) == 3, "a descriptor goes with its memory"
    one.close()
    two.close()
    assert oracle.open_descriptors() == before


def test_a_large_growth_is_exported_in_parts():
    one = make(300 * GRANULE, 0, 2)
    one.commit(0, 300 * GRANULE)
    seen, parts = [], 0
    while True:
        segments = one.export()
        assert sum(segment.fd is not None for segment in segments) <= 128
        assert list(one.export()) == list(segments)
        seen += [segment.offset_bytes for segment in segments]
        parts += 1
        more = one.has_more
        one.exchanged()
        if not more:
            break
    assert parts == 3
    assert seen == [i * GRANULE for i in range(300)]
    one.close()


def test_nobody_to_export_to_means_no_descriptors():
    one = make()
    one.commit(0, GRANULE)
    before = oracle.open_descriptors()
    assert [segment.fd for segment in one.export()] == [None]
    assert oracle.open_descriptors() == before
    one.close()


def test_heaps_that_do_not_fit_are_refused():
    one, larger, other = make(8 * GRANULE, 0, 2), make(16 * GRANULE, 1, 2), make(8 * GRANULE, 1, 2, granule=2 * GRANULE)
    one.commit(0, GRANULE)
    for two in (larger, other):
        with pytest.raises(HeapError, match=r"IRIS_VMEM__GRANULE"):
            two.import_peer(0, received(one.export()))
    with pytest.raises(HeapError, match="no rank 2"):
        one.import_peer(2, [])
    outside = received(one.export())
    outside = [Segment(8 * GRANULE, GRANULE, outside[0].payload, outside[0].fd)]
    with pytest.raises(HeapError, match="outside"):
        make(8 * GRANULE, 1, 2).import_peer(0, outside)
    for allocator in (one, larger, other):
        allocator.close()


# -- every step fails -------------------------------------------------------------------------------------------------
def life(driver, stack, peer, source):
    """A life with everything in it; what it leaves open is closed by `stack`."""
    allocator = make(rank=0, world_size=2, driver=driver)
    stack.callback(allocator.close)
    allocator.commit(0, 3 * GRANULE)
    allocator.export()
    allocator.import_peer(1, received(peer.export()))
    allocator.exchanged()
    size, start, _ = allocator.import_extent(source)
    assert (size, start) == (3 * GRANULE, GRANULE // 2)
    shared = allocator.import_tensor(4 * GRANULE, source, nothing)
    assert allocator.import_extent(source)[2] == 4 * GRANULE + GRANULE // 2
    allocator.export()
    allocator.exchanged()
    allocator.tensor(0, 100, nothing)
    del shared
    allocator.decommit(4 * GRANULE, size)
    allocator.decommit(0, 2 * GRANULE)


def live_and_fail(number):
    """One life whose call `number` fails: that call (None if there is none), the kind of error, and what is left."""
    driver = FakeVmm()
    with contextlib.ExitStack() as stack:
        external = Expandable(driver, GRANULE, 2 * GRANULE)
        stack.callback(external.close)
        peer = make(rank=1, world_size=2, driver=driver)
        stack.callback(peer.close)
        peer.commit(0, 2 * GRANULE)
        source = external.tensor(GRANULE // 2, (GRANULE // 2,))
        error = None
        first = len(driver.calls)
        driver.fail_at = first + number
        try:
            life(driver, stack, peer, source)
        except IrisError as e:
            error = type(e)  # its traceback would keep tensors alive
        name = driver.calls[driver.fail_at - 1] if len(driver.calls) >= driver.fail_at else None
        driver.fail_at = None
    return name, error, driver.counts()


def test_every_driver_call_may_fail_and_nothing_leaks():
    failed, left = set(), {}
    for number in itertools.count(1):
        before = oracle.open_descriptors()
        name, error, counts = live_and_fail(number)
        if name is None:
            assert error is None
            assert counts == NOTHING
            break
        assert error is not None, f"call {number}, {name}: no error"
        failed.add(name)
        if name != "release" and (counts != NOTHING or oracle.open_descriptors() != before):  # a handle is lost then
            left[number] = name, counts
    assert failed == {
        "granularity", "reserve", "create", "map", "set_access", "export_fd", "import_fd", "retain", "address_range",
        "unmap", "release",
    }  # fmt: skip
    assert left == {}


def test_two_failures_leave_nothing_and_no_place_unusable():
    """The undo of a step fails as well: of a growth, of an import, of a peer's memory."""
    driver, peer = FakeVmm(), make(rank=1, world_size=2)
    peer.commit(0, GRANULE)
    external = Expandable(driver, 2 * GRANULE)
    source = external.tensor(0, (8,))
    allocator = make(rank=0, world_size=2, driver=driver)
    steps = {
        "commit": lambda: allocator.commit(0, 2 * GRANULE),
        "import": lambda: allocator.import_tensor(4 * GRANULE, source, nothing),
        "peer": lambda: allocator.import_peer(1, received(peer.export())),
    }
    for name, step in steps.items():
        driver.fail_next |= {"set_access": 1, "unmap": 1}
        with pytest.raises(IrisError, match="set_access"):
            step()
        assert not driver.fail_next, name
        step()
    allocator.tensor(0, 2 * GRANULE, nothing).fill_(1)
    allocator.close()
    peer.close()
    gc.collect()
    external.close()
    assert driver.counts() == NOTHING


def test_memory_that_should_be_gone_makes_room_wherever_it_lies():
    """Its unmapping has failed; it begins before, in and behind what comes there, here and on a peer."""
    driver = FakeVmm()
    one, two = make(rank=0, world_size=2, driver=driver), make(rank=1, world_size=2, driver=driver)
    externals = [Expandable(driver, size * GRANULE) for size in (3, 2)]
    large, small = (external.tensor(0, (8,)) for external in externals)

    def exchange():
        two.import_peer(0, received(one.export()))
        one.exchanged()

    def fail(allocator, offset, nbytes):
        driver.fail_next["unmap"] = 1
        with pytest.raises(DriverError, match="unmap"):
            allocator.decommit(offset, nbytes)

    one.import_tensor(0, large, nothing)
    exchange()
    for allocator in (one, two):
        fail(allocator, 0, 3 * GRANULE)
    one.import_tensor(GRANULE, small, nothing)  # begins within the larger piece
    exchange()
    for allocator in (one, two):
        fail(allocator, GRANULE, 2 * GRANULE)
    one.import_tensor(0, large, nothing)  # begins before the smaller piece
    exchange()
    for allocator in (one, two):
        fail(allocator, 0, 3 * GRANULE)
    one.commit(2 * GRANULE, GRANULE)
    exchange()
    assert one.committed_bytes == GRANULE
    for allocator in (one, two):
        allocator.close()
    gc.collect()
    for external in externals:
        external.close()
    assert driver.counts() == NOTHING


def test_an_undo_that_fails_is_noted_and_does_not_stop_the_others():
    done = []

    def fail():
        with Transaction() as undo:
            undo.add(done.append, 1)
            undo.add(lambda: 1 / 0)
            undo.add(done.append, 2)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first") as caught:
        fail()
    assert done == [2, 1]
    assert caught.value.__notes__ == ["while undoing: division by zero"]
    with pytest.raises(ZeroDivisionError), Transaction() as undo:
        undo.add(lambda: 1 / 0)
    with Transaction() as undo:
        undo.add(done.clear)
        undo.commit()
    assert done == [2, 1]


# -- existing tensors -------------------------------------------------------------------------------------------------
@pytest.fixture
def external():
    """An allocator, and memory of three pieces that is not its own."""
    driver = FakeVmm()
    pieces = Expandable(driver, GRANULE, 2 * GRANULE, GRANULE)
    allocator = make(16 * GRANULE, driver=driver)
    yield allocator, pieces
    allocator.close()
    gc.collect()
    pieces.close()
    assert driver.counts() == NOTHING


def test_an_imported_tensor_shares_its_memory(external):
    allocator, pieces = external
    source = pieces.tensor(GRANULE - 8, (3, 4))  # over the end of the first piece
    assert allocator.import_extent(source)[:2] == (3 * GRANULE, GRANULE - 8)
    told = []
    out = allocator.import_tensor(2 * GRANULE, source, lambda: told.append(1))
    assert out.data_ptr() == allocator.base_ptr + 2 * GRANULE + GRANULE - 8
    assert (out.shape, out.dtype, out.stride()) == (source.shape, source.dtype, source.stride())
    source.copy_(torch.arange(12.0).view(3, 4))
    assert out.tolist() == source.tolist()
    out[2, 3] = 50
    assert source[2, 3] == 50
    assert 0 <= out.data_ptr() - allocator.base_ptr < allocator.nbytes
    assert allocator.committed_bytes == 3 * GRANULE
    del out
    assert told == [1]
    allocator.decommit(2 * GRANULE, 3 * GRANULE)
    assert allocator.committed_bytes == 0
    assert source[2, 3] == 50


@pytest.mark.parametrize(
    "view", [lambda t: t[2:3], lambda t: t.t(), lambda t: t[:, 1::2], lambda t: t.flatten()[5:], lambda t: t[1, 2]]
)
def test_views_are_imported_as_they_are(external, view):
    allocator, pieces = external
    whole = pieces.tensor(256, (4, 6)).copy_(torch.arange(24.0).view(4, 6))
    part = view(whole)
    assert allocator.import_extent(part)[:2] == (GRANULE, part.data_ptr() - pieces.base)
    out = allocator.import_tensor(0, part, nothing)
    assert out.tolist() == part.tolist()
    assert out.stride() == part.stride()
    last = sum((n - 1) * s for n, s in zip(part.shape, part.stride(), strict=True))
    assert out.untyped_storage().nbytes() == 4 * (last + 1)


def test_memory_that_is_there_already_is_found_and_not_mapped_again(external):
    allocator, pieces = external
    big = pieces.tensor(100 * 4, (GRANULE // 2,))  # in the first two pieces
    small = pieces.tensor(GRANULE + 64, (5,)).fill_(3)  # in the second
    beyond = pieces.tensor(2 * GRANULE + 512, (GRANULE // 4,))  # in the second and the third
    assert allocator.import_extent(big)[2] == -1
    first = allocator.import_tensor(4 * GRANULE, big, nothing)
    maps = allocator._driver.calls.count("map")
    generation = allocator.generation
    assert allocator.import_extent(small)[2] == 5 * GRANULE + 64
    second = allocator.import_tensor(4 * GRANULE, small, nothing)
    assert second.tolist() == [3.0] * 5
    assert second.data_ptr() == allocator.base_ptr + 5 * GRANULE + 64
    assert allocator._driver.calls.count("map") == maps
    assert allocator.generation == generation, "there is nothing new for peers"
    assert allocator.import_extent(beyond)[2] == -1, "its end is not there"
    third = allocator.import_tensor(8 * GRANULE, beyond, nothing)
    assert allocator.import_extent(pieces.tensor(3 * GRANULE, (1,)))[2] == 10 * GRANULE
    allocator.decommit(8 * GRANULE, 3 * GRANULE)
    assert allocator.import_extent(pieces.tensor(3 * GRANULE, (1,)))[2] == -1
    assert first[0] == big[0]
    del first, second, third


def test_blocks_that_happen_to_be_neighbours_are_not_one(external):
    allocator, pieces = external
    _one = allocator.import_tensor(0, pieces.tensor(0, (1,)), nothing)
    _two = allocator.import_tensor(GRANULE, pieces.tensor(GRANULE, (1,)), nothing)
    assert allocator.import_extent(pieces.tensor(GRANULE - 4, (2,)))[2] == -1


def test_the_source_lives_as_long_as_the_result(external):
    allocator, pieces = external
    source = pieces.tensor(0, (4,))
    gone = weakref.ref(source)
    out = allocator.import_tensor(0, source, nothing)
    del source
    gc.collect()
    assert gone() is not None
    del out
    gc.collect()
    assert gone() is None


def test_memory_that_cannot_be_shared_says_what_would_help(external):
    allocator, pieces = external
    message = r"PYTORCH_ALLOC_CONF=expandable_segments:True.*PYTORCH_HIP_ALLOC_CONF.*ctx.use_mem_pool\(\)"
    with pytest.raises(UnsupportedError, match=message):
        allocator.import_extent(torch.ones(4))
    allocator._driver.exportable = False
    with pytest.raises(UnsupportedError, match=message):
        allocator.import_extent(pieces.tensor(0, (4,)))
    allocator._driver.exportable = True
    with pytest.raises(HeapError, match="do not fit"):
        allocator.import_tensor(15 * GRANULE, pieces.tensor(0, (GRANULE,)), nothing)


# -- the end ----------------------------------------------------------------------------------------------------------
def test_tensors_outlive_close_and_the_last_one_gives_everything_back():
    driver = FakeVmm()
    allocator = make(rank=0, world_size=2, driver=driver)
    allocator.commit(0, 2 * GRANULE)
    peer = make(rank=1, world_size=2)
    peer.commit(0, GRANULE)
    allocator.import_peer(1, received(peer.export()))
    told = []
    tensors = [allocator.tensor(i * GRANULE, 64, lambda: told.append(1)).fill_(i) for i in range(2)]
    assert driver.counts()[1] == 3
    allocator.close()
    peer.close()
    assert driver.counts() == (2, 2, 1, 2 * GRANULE), "peers' memory goes at once"
    assert [t[0].item() for t in tensors] == [0, 1]
    tensors.pop()
    assert driver.counts() == (2, 2, 1, 2 * GRANULE)
    tensors.pop()
    assert told == [1, 1]
    assert driver.counts() == NOTHING


def test_nothing_is_unmapped_while_the_device_is_busy(monkeypatch, caplog):
    monkeypatch.setattr(lease, "IDLE_TIMEOUT_S", 0.05)
    driver = FakeVmm()
    allocator = make(driver=driver)
    allocator.commit(0, GRANULE)
    driver.busy = True
    with caplog.at_level("WARNING", logger="iris"):
        allocator.close()
    driver.busy = False
    assert driver.counts()[:3] == (1, 1, 1)
    assert "still busy" in caplog.text
    with pytest.raises(HeapClosedError):
        allocator.commit(0, 1)


def test_a_device_that_has_failed_does_not_keep_the_heap_open(caplog):
    driver = FakeVmm()
    allocator = make(driver=driver)
    allocator.commit(0, GRANULE)
    driver.fail_at = len(driver.calls) + 1  # synchronize
    allocator.close()
    assert "synchronize failed" in caplog.text
    assert driver.counts() == NOTHING


def test_what_the_driver_does_not_take_back_is_reported(caplog):
    driver = FakeVmm()
    allocator = make(driver=driver)
    allocator.commit(0, GRANULE)
    driver.fail_at = len(driver.calls) + 2  # the first unmap
    allocator.close()
    assert "stays until the process ends" in caplog.text


def test_a_forked_process_leaves_the_device_alone():
    driver = FakeVmm()
    one, two = make(rank=0, world_size=2, driver=driver), make(rank=1, world_size=2)
    one.commit(0, GRANULE)
    two.commit(0, GRANULE)
    one.import_peer(1, received(two.export()))
    calls = len(driver.calls)
    child = os.fork()
    if child == 0:
        one.close()
        del one
        gc.collect()
        os._exit(len(driver.calls) != calls)
    assert os.waitpid(child, 0)[1] == 0
    one.close()
    two.close()
    assert driver.counts() == NOTHING


def test_a_peer_that_cannot_be_reached_is_named():
    one, two = make(rank=0, world_size=2), make(rank=1, world_size=2)
    one.commit(0, GRANULE)
    two._driver.fail_at = len(two._driver.calls) + 3  # import, map, set_access
    with pytest.raises(PeerAccessError, match=r"cannot map the memory of rank 0 .*set_access"):
        two.import_peer(0, received(one.export()))
    assert two._driver.counts()[:2] == (0, 0)
    two.import_peer(0, received(one.export()))
    one.close()
    two.close()


# -- the plugin -------------------------------------------------------------------------------------------------------
def test_the_probe_says_what_is_missing(monkeypatch):
    probe = vmem.iris_plugin_probe
    assert "not of cpu" in probe(CPU).reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "cuda-bindings" in probe(DeviceTarget(DeviceType.CUDA)).reason
    assert "iris-allocators[rocm]" in probe(DeviceTarget(DeviceType.HIP)).reason
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert probe(DeviceTarget(DeviceType.CUDA))
    assert probe(DeviceTarget(DeviceType.HIP))


def test_torch_stays_the_default():
    assert VMEM_INFO.priority < TORCH_INFO.priority
