"""The "vmem" allocator on a pretended driver: the conformance kit, every failure, existing tensors, the end."""

import functools
import gc
import os
import threading
from unittest.mock import Mock

import pytest
import torch
from tables import raises, table

from iris_allocators._plugin import vmem
from iris_allocators.vmem import pieces
from iris_core.errors import DriverError, HeapClosedError, HeapError, IrisError, SettingsError, UnsupportedError
from iris_core.testing import AllocatorConformance
from iris_core.testing.conformance.plugin_jobs import received
from iris_core.types import Segment

from .cluster import CPU, make, nothing
from .fake_driver import GRANULE, FakeVmm, make_importable


class TestVmemOnPretendedDriver(AllocatorConformance):
    """The kit; what it runs in rank processes needs a GPU, and is tested by test_ranks here."""

    test_host_tensors_outlive_close = test_peers_in_other_processes = None
    num_cycles = 300  # an arena of 64 MiB, which the C library makes for threads, is no leak
    plugin = pytest.fixture(lambda self: vmem)
    target = pytest.fixture(lambda self: CPU)
    make_allocator = pytest.fixture(lambda self: functools.partial(make, granule=None))
    make_importable = pytest.fixture(lambda self: make_importable)


@table("nbytes, granule", [(1, GRANULE), (64 * GRANULE, GRANULE), (65 * 2 * GRANULE, 4 * GRANULE)])
def test_the_default_granule_grows_with_the_heap(made, nbytes, granule):
    allocator = made.allocator(nbytes, granule=None)
    assert (allocator.granularity, allocator.nbytes % granule) == (granule, 0)


@table("error, key, options, fails", [
    (SettingsError, "names", {"granule": GRANULE // 2}, {}), (HeapError, "allocators.reserve", {"nbytes": 1 << 47}, {}),
    (HeapError, "allocators.smaller", {"nbytes": 1 << 50, "world_size": 8}, {}),
    (DriverError, "allocators.failed", {}, {"granularity": 1}), (HeapError, "allocators.failed", {}, {"reserve": 1}),
])  # fmt: skip
def test_what_no_device_has_is_refused(made, error, key, options, fails):
    driver = made.driver()
    driver.fail_next |= fails
    with raises(error, key, name=next(iter(fails), "IRIS_VMEM__GRANULE")):
        make(driver=driver, **options)


def test_heaps_that_do_not_fit_are_refused(made):
    one, two = (made.allocator(8 * GRANULE, rank, 2) for rank in range(2))
    one.commit(0, GRANULE)
    for options in ({"nbytes": 16 * GRANULE}, {"granule": 2 * GRANULE}):
        other = make(rank=1, world_size=2, driver=made.driver(), **options)
        with raises(HeapError, name="IRIS_VMEM__GRANULE"):
            other.import_peer(0, received(one.export()))
        other.close()
    with raises(HeapError, "no rank", rank=2, size=2):
        one.import_peer(2, [])
    (segment,) = received(one.export())
    with raises(HeapError, "allocators.outside"):
        two.import_peer(0, [Segment(8 * GRANULE, GRANULE, segment.payload, segment.fd)])


def test_two_failures_leave_nothing_and_no_place_unusable(made):
    """The undo of a step fails as well: of a growth, of an import, of a peer's memory."""
    driver = made.driver()
    allocator, peer = made.allocator(8 * GRANULE, 0, 2, driver=driver), made.allocator(8 * GRANULE, 1, 2)
    peer.commit(0, GRANULE)
    source = made.pieces(driver, 2).tensor(0, (8,))
    for step in (
        lambda: allocator.commit(0, 2 * GRANULE),
        lambda: allocator.import_tensor(4 * GRANULE, source, nothing),
        lambda: allocator.import_peer(1, received(peer.export())),
    ):
        driver.fail_next |= {"set_access": 1, "unmap": 1}
        with raises(IrisError, name="set_access") as caught:
            step()
        assert not driver.fail_next
        notes = getattr(caught.value.__cause__ or caught.value, "__notes__", ())
        assert "while undoing: unmap failed" in "".join(notes)
        step()
    allocator.tensor(0, 2 * GRANULE, nothing).fill_(1)


def test_memory_that_cannot_be_shared_says_what_would_help(made):
    allocator = made.allocator(16 * GRANULE)
    pieces = made.pieces(allocator._driver, 1, 2, 1)
    with raises(UnsupportedError, "allocators.expandable"):
        allocator.import_extent(torch.ones(4))
    allocator._driver.exportable = False
    with raises(UnsupportedError, "allocators.expandable"):
        allocator.import_extent(pieces.tensor(0, (4,)))
    allocator._driver.exportable = True
    with raises(HeapError, "allocators.fit"):
        allocator.import_tensor(15 * GRANULE, pieces.tensor(0, (GRANULE,)), nothing)


@table("how, says, left", [
    ("busy", "still busy", (1, 1, 1)),
    ("synchronize", "synchronize failed", (0, 0, 0)),  # a device that has failed
    ("unmap", "stays until the process ends", (1, 1, 1)),
    ("end of the process", "", (1, 1, 1)),  # Python 3.12 starts no thread there, so nothing can wait for the device
])  # fmt: skip
def test_a_device_that_fails_or_is_busy_does_not_keep_the_heap_open(monkeypatch, caplog, how, says, left):
    """Nothing is unmapped while a kernel may use it."""
    driver = FakeVmm()
    allocator = make(driver=driver)
    allocator.commit(0, GRANULE)
    driver.busy = how == "busy"
    monkeypatch.setattr(pieces, "IDLE_TIMEOUT_S", 0.05 if driver.busy else 60.0)
    if how == "end of the process":
        refused = RuntimeError("can't create new thread at interpreter shutdown")
        monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=refused))
    driver.fail_next[how] = 1
    caplog.clear()
    with caplog.at_level("WARNING", logger="iris"):
        allocator.close()
    driver.busy = False
    assert driver.counts()[:3] == left
    assert says in caplog.text
    with pytest.raises(HeapClosedError):
        allocator.commit(0, 1)


def test_a_forked_process_leaves_the_device_alone(made):
    one, two = (made.allocator(8 * GRANULE, rank, 2) for rank in range(2))
    one.commit(0, GRANULE)
    two.commit(0, GRANULE)
    one.import_peer(1, received(two.export()))
    calls = len(one._driver.calls)
    child = os.fork()
    if child == 0:
        driver = one._driver
        one.close()
        made._closing.clear()
        del one
        gc.collect()
        os._exit(len(driver.calls) != calls)
    assert os.waitpid(child, 0)[1] == 0
