"""The host API on a world of one."""

import weakref
from unittest.mock import Mock

import pytest
import torch
from tables import raises

from iris_core import Iris, errors
from iris_core.device.context_words import STATUS_WAIT_TIMEOUT, Status, stamp
from iris_core.testing.conformance.oracle import open_descriptors


@pytest.fixture
def ctx():
    with Iris("4MiB", device="cpu") as ctx:
        yield ctx


def opened(size="1MiB", **options):
    return Iris(size, **{"device": "cpu", **options})


def test_a_failed_open_leaves_nothing():
    before = open_descriptors()
    for bad, error, key in (
        ({"allocator": "hots"}, errors.PluginNotFoundError, "any"), ({"size": "1EiB"}, errors.HeapError, "any"),
        ({"backend": "tritn"}, errors.PluginNotFoundError, "any"),
        ({"device": "cpuu"}, errors.SettingsError, "any"),
        *(({"device": f"cuda:{index}"}, errors.DeviceError, "any") for index in (9**20, 77)),
    ):  # fmt: skip
        with raises(error, key) as caught:
            opened(**bad)
        assert getattr(caught.value, "name", None) in (None, *bad.values())
    assert open_descriptors() == before


def test_close_is_idempotent_and_final():
    before = open_descriptors()
    ctx = opened()
    t, heap = ctx.ones(3), ctx.heap
    ctx.close()
    ctx.close()
    assert t.sum() == 3
    for use, *given in (
        (ctx.barrier,), (ctx.get_device_context,), (ctx.get_heap_bases,), (ctx.stats,), (ctx.scope,), (ctx.__enter__,),
        (ctx.zeros, 1), (ctx.broadcast, 1), (ctx.is_symmetric, t), (ctx.free, t), (heap.allocate, 1, torch.int8),
        (heap.free, t), (heap.barrier_agreement,), (heap.stats,), (heap.is_symmetric, t), (heap.translate, 0, 0, 0),
        (heap.as_symmetric, t), (heap.scope,), (heap.refresh_peer_access,), (heap.allocate_symmetric, 1),
    ):  # fmt: skip
        with pytest.raises(errors.HeapClosedError):
            use(*given)
    del t, use, given, heap  # the last tensor takes the memory with it
    assert open_descriptors() == before


def test_what_is_no_tensor_is_refused(ctx):
    for use in (ctx.free, ctx.is_symmetric, ctx.as_symmetric):
        with pytest.raises(TypeError):
            use([1])
    with pytest.raises(TypeError):
        ctx.barrier(stream=5)


def test_a_forgotten_context_gives_everything_back():
    before = open_descriptors()
    ctx = opened()
    x = ctx.zeros(4)
    ctx.ccl.all_reduce(x, x, async_op=True).wait()
    alive = weakref.ref(ctx)
    del ctx, x
    assert open_descriptors() == before
    assert alive() is None


def test_symmetry_of_tensors_and_many_contexts_at_once(ctx):
    x = ctx.zeros(8, 8)
    with opened() as other:
        found = [c.is_symmetric(t) for c in (ctx, other) for t in (x[3:, ::2], other.ones(2), x + 1)]
        assert found == [True, False, False, False, True, False]
    with ctx.scope():
        t, bases = ctx.allocate_symmetric(2, 3, dtype=torch.bfloat16)
        assert bases.tolist() == [t.data_ptr()]
    reused = ctx.zeros(2, 3)
    assert reused.data_ptr() == t.data_ptr()
    into = [lambda t: ctx.put(t, 0), lambda t: ctx.as_remote(t, 0), lambda t: ctx.zeros(2, 3, out=t)]
    for use in (ctx.free, ctx.as_symmetric, *into):
        with raises(errors.HeapError, "heap.freed", offset=256):
            use(t)
    with pytest.raises(errors.NotOnHeapError):
        ctx.put(torch.eye(2).to_sparse(), 0)
    ctx.free(reused)
    again = ctx.zeros(2, 3)
    del reused
    ctx.as_remote(torch.from_dlpack(again), 0)  # its storage may have the identity of one that is gone
    ctx.zeros(1)
    assert len(ctx.heap._state.blocks._freed) == 1  # t, which is still there


def late(ctx):
    """Leave on the page of reports what a wait writes that has reached its bound."""
    words, first = ctx._reports._page.words, ctx._reports._page.first(0)
    for place, value in enumerate([0, 3, 0x1000, 42, 7, 3, 0], first + 1):
        words[place] = value
    words[first + Status.CODE] = words[0] = stamp(1, 0, Status.CODE, STATUS_WAIT_TIMEOUT)


def test_a_device_error_is_raised_once_by_a_barrier_or_by_closing(monkeypatch):
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "1")
    with opened() as ctx:
        late(ctx)
        with raises(errors.DeviceTimeoutError, "device.late"):
            ctx.barrier()
        ctx.barrier()
    with raises(errors.DeviceTimeoutError, "device.late"), opened() as ctx:
        late(ctx)
    ctx = opened()
    late(ctx)
    with raises(errors.DeviceTimeoutError, "device.late"):
        ctx.close()
    ctx.close()
    with pytest.raises(errors.HeapClosedError):
        ctx.barrier()


@pytest.mark.parametrize(("device", "reported"), [("cpu", False), ("cuda:0", False), ("cuda:0", True)])
def test_what_a_barrier_raises_of_a_device_that_failed_keeps_its_cause(ctx, monkeypatch, device, reported):
    """The driver's error; and what a kernel has reported, where the device has stopped."""
    stopped, cause = errors.DeviceError("could not finish"), RuntimeError("illegal memory access")
    stopped.__cause__, said = cause, errors.DeviceError("by a kernel") if reported or device == "cpu" else None
    monkeypatch.setattr(ctx, "device", device)
    monkeypatch.setattr(ctx.heap, "barrier_agreement", Mock(side_effect=stopped))
    monkeypatch.setattr(ctx._reports, "error", Mock(return_value=said))
    with pytest.raises(errors.DeviceError) as caught:
        ctx.barrier()
    assert (caught.value, caught.value.__cause__) == ((said, stopped) if reported else (stopped, cause))
    monkeypatch.undo()


def test_what_closing_raises_is_logged_behind_another_error(monkeypatch, log):
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "1")

    def in_a_block():
        with opened() as ctx:
            late(ctx)
            _ = 1 / 0

    def with_memory_that_cannot_be_given_back():
        with opened() as ctx:
            lost = errors.DeviceError("the device is lost")
            monkeypatch.setattr(type(ctx.heap._state.allocator), "close", Mock(side_effect=lost))
            _ = 1 / 0

    for fail in (in_a_block, with_memory_that_cannot_be_given_back):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert sum("program 3" in record.getMessage() for record in log.records) == 1
    assert "is lost" in log.text
    with pytest.raises(errors.DeviceError, match="is lost"), opened():
        pass
