"""The "torch" allocator on a pretended driver: the kit, every failure, torch's settings, what is refused."""

import contextlib
import ctypes
import sys

import pytest
import torch
from tables import raises, table

from iris_allocators import ranges
from iris_allocators._plugin import torch_pool
from iris_allocators.ranges import Range
from iris_allocators.torch_ipc import ALIGNMENT
from iris_core.errors import DriverError, HeapClosedError, HeapError, PeerAccessError, UnsupportedError
from iris_core.testing import AllocatorConformance

from .cluster import CPU, make_torch, nothing
from .fake_driver import FakeIpc, as_tensor


class TestTorchOnPretendedDriver(AllocatorConformance):
    """The kit; what it runs in rank processes needs a GPU, and only a GPU's torch says OutOfMemoryError."""

    test_host_tensors_outlive_close = test_peers_in_other_processes = test_host_impossible_size_is_an_error = None
    plugin = pytest.fixture(lambda self: torch_pool)
    target = pytest.fixture(lambda self: CPU)
    make_allocator = pytest.fixture(lambda self: make_torch)


@table("kept", [0, 1, 3])
def test_tensors_leave_nothing_that_torch_keeps(monkeypatch, kept):
    """torch takes references to the tuples of `__cuda_array_interface__` and drops none: pytorch/pytorch#194877."""
    memory = torch.empty(64, dtype=torch.uint8)
    part, released = Range(memory.data_ptr(), 64, memory), []
    tuples = [part.__cuda_array_interface__[name] for name in ("shape", "data")]

    def keeping(part, device):
        for each in tuples * kept:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
        return as_tensor(part, device)

    before = [sys.getrefcount(each) for each in tuples]
    monkeypatch.setattr(ranges.torch, "as_tensor", keeping)
    tensor = part.tensor("cpu", lambda: released.append(True))
    assert [sys.getrefcount(each) for each in tuples] == before
    assert (tensor.data_ptr(), tensor.numel(), released) == (memory.data_ptr(), 64, [])
    del tensor, part
    assert released == [True]


@table("nbytes", [1, 4096, 1 << 20])
def test_the_heap_does_not_begin_where_the_pool_does(monkeypatch, nbytes):
    """torch knows its blocks by address, and memory pools on the heap give it addresses of the heap."""
    empty, aligned = torch.empty, []

    def empty_aligned(size, **options):
        whole = empty(size + ALIGNMENT, **options)
        aligned.append(whole[-whole.data_ptr() % ALIGNMENT :][:size])
        return aligned[-1]

    monkeypatch.setattr(torch, "empty", empty_aligned)
    allocator = make_torch(nbytes)
    (pool,) = aligned
    assert pool.data_ptr() % ALIGNMENT == 0
    assert allocator.base_ptr == pool.data_ptr() + ALIGNMENT
    assert allocator.base_ptr + allocator.nbytes == pool.data_ptr() + pool.numel()
    allocator.close()


@pytest.fixture
def settings():
    """torch's allocator settings may be changed in the test."""
    if not hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        pytest.skip("this torch cannot say what its allocator's settings are")
    before, change = torch._C._accelerator_getAllocatorSettings(), torch._C._accelerator_setAllocatorSettings
    yield change
    change(before)


@pytest.mark.parametrize("mode", ["works", "no room", "old torch", "others"])
def test_expandable_segments_are_off_for_the_pool_alone(monkeypatch, settings, mode):
    others = "garbage_collection_threshold:0.75"
    mine = others if mode == "others" else f"{others},expandable_segments:True, "
    settings(mine)
    seen = []
    empty, now = torch.empty, torch._C._accelerator_getAllocatorSettings

    def watched(*args, **options):
        seen.append(now())
        if mode == "no room":
            raise torch.OutOfMemoryError("no more")
        return empty(*args, **options)

    monkeypatch.setattr(torch, "empty", watched)
    if mode == "old torch":
        monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings")
        snapshot = {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": mine}}
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot)
    no_room = raises(HeapError, "heap.no room")
    with no_room if mode == "no room" else contextlib.nullcontext():
        make_torch(1 << 20).close()
    assert seen == [mine if mode == "others" else f"{others},expandable_segments:True,expandable_segments:False"]
    assert now() == mine, "each of them, or the threshold would be back at its default"


def life(driver):
    """Open a heap, map three peers', use and close it."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(contextlib.closing(make_torch(1 << 16, rank, 4))) for rank in range(3)]
        mine = make_torch(1 << 16, 3, 4, driver)
        stack.callback(mine.close)
        for rank, peer in enumerate(peers):
            mine.import_peer(rank, peer.export())
        mine.tensor(0, 100, nothing).fill_(1)
        mine.close()
        with pytest.raises(HeapClosedError):
            mine.export()


def test_every_driver_call_may_fail_and_nothing_leaks():
    names = ["ipc_export", "address_range", *["ipc_open"] * 3, *["ipc_close"] * 3]
    for number, name in enumerate(names, start=1):
        driver = FakeIpc()
        driver.fail_at = number
        kind = {"ipc_open": PeerAccessError, "ipc_close": DriverError}.get(name, UnsupportedError)
        with raises(kind, "allocators.failed", "allocators.vmem" if kind is UnsupportedError else "any", name=name):
            life(driver)
        assert driver.counts() == (name == "ipc_close",), "more than the one that would not close"
    driver = FakeIpc()
    life(driver)
    assert (driver.calls, driver.counts()) == (names, (0,))
