"""The host API on a world of one."""

import gc
import logging
import os
import weakref

import numpy as np
import pytest
import torch
from tables import table

from iris_core import Iris
from iris_core.device.context_words import STATUS_WAIT_TIMEOUT, Status, stamp
from iris_core.errors import (
    DeviceError,
    DeviceTimeoutError,
    HeapClosedError,
    HeapError,
    NotOnHeapError,
    PluginNotFoundError,
    SettingsError,
)


@pytest.fixture
def ctx():
    with Iris("4MiB", device="cpu") as ctx:
        yield ctx


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


def test_who_and_where(ctx):
    assert (ctx.cur_rank, ctx.num_ranks, ctx.get_rank(), ctx.get_num_ranks()) == (0, 1, 0, 1)
    assert ctx.device == ctx.get_device() == "cpu"
    assert ctx.gpu_id == ctx.get_device_id() == 0
    assert ctx.get_cu_count() == len(os.sched_getaffinity(0))
    assert ctx.heap_size == ctx.heap.usable_nbytes == 4 << 20
    assert ctx.plugin_names == {"allocator": "host", "backend": "triton"}
    assert "host" in ctx.explain()
    assert repr(ctx) == "<Iris rank 0 of 1 on cpu, backend 'triton', allocator 'host', heap of 4194304 bytes>"


def test_the_context_tensor_begins_as_in_the_reference_system(ctx):
    context = ctx.get_device_context()
    assert context.dtype == torch.int64
    assert context[:2].tolist() == [0, 1]
    assert context[2].item() == ctx.get_heap_bases()[0].item() == ctx.heap_bases[0].item()
    assert ctx.get_device_context() is context


def test_sizes(monkeypatch):
    for size, nbytes in ((1 << 20, 1 << 20), ("1MiB", 1 << 20), ("1MB", 1_003_520)):
        with Iris(size, device="cpu") as ctx:
            assert ctx.heap_size == nbytes
    monkeypatch.setenv("IRIS_HEAP_SIZE", "3MiB")
    with Iris(device="cpu") as ctx:
        assert ctx.heap_size == 3 << 20
    with Iris("2MiB", device="cpu") as ctx:  # an argument beats the environment
        assert ctx.heap_size == 2 << 20


@table("size", [0, -1, 100, "1KiB", True, "many", "1XB", 1.5])
def test_impossible_sizes(size):
    with pytest.raises(SettingsError, match="heap_size"):
        Iris(size, device="cpu")


def test_unknown_plugins_list_what_is_installed():
    with pytest.raises(PluginNotFoundError, match="host"):
        Iris("1MiB", device="cpu", allocator="hots")
    with pytest.raises(PluginNotFoundError, match="triton"):
        Iris("1MiB", device="cpu", backend="tritn")


def test_options():
    with Iris("1MiB", device="cpu", options={"triton": {"bounds_check": False}}):
        pass
    with pytest.raises(SettingsError, match="huge_pages"):
        Iris("1MiB", device="cpu", options={"host": {"hugepages": True}})
    with pytest.raises(SettingsError, match="tritonn"):
        Iris("1MiB", device="cpu", options={"tritonn": {}})


def test_devices():
    with pytest.raises(DeviceError, match="no device of torch"):
        Iris("1MiB", device="cpuu")
    with pytest.raises(DeviceError, match="not supported"):
        Iris("1MiB", device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="no GPU"):
            Iris("1MiB", device="cuda")


def test_a_failed_open_leaves_nothing():
    before = descriptors()
    for bad in ({"heap_size": "1EiB"}, {"allocator": "hots"}, {"device": "cuda:77"}):
        with pytest.raises((HeapError, PluginNotFoundError, DeviceError)):
            Iris(**{"device": "cpu", **bad})
    assert descriptors() == before


def uses_of(ctx, tensor):
    """Everything that a closed context must refuse."""
    return (
        ctx.barrier, ctx.get_device_context, ctx.get_heap_bases, ctx.stats, ctx.scope,
        lambda: ctx.zeros(1), lambda: ctx.free(tensor), lambda: ctx.broadcast(1), lambda: ctx.as_symmetric(tensor),
        lambda: ctx.is_symmetric(tensor), lambda: ctx.allocate_symmetric(1),
    )  # fmt: skip


def test_close_is_idempotent_and_final():
    gc.collect()  # what other tests have left must not go meanwhile
    before = descriptors()
    ctx = Iris("1MiB", device="cpu")
    t = ctx.ones(3)
    ctx.close()
    ctx.close()
    assert t.sum() == 3
    assert repr(ctx) == "<Iris, closed>"
    for use in uses_of(ctx, t):
        with pytest.raises(HeapClosedError):
            use()
    del t, use  # the last tensor takes the memory with it
    gc.collect()
    assert descriptors() == before


def test_a_closed_context_cannot_be_entered():
    ctx = Iris("1MiB", device="cpu")
    ctx.close()
    with pytest.raises(HeapClosedError), ctx:
        pass


def test_what_is_no_tensor_is_refused(ctx):
    for use in (ctx.free, ctx.is_symmetric, ctx.as_symmetric):
        with pytest.raises(TypeError, match="takes a torch tensor, not list"):
            use([1])
    with pytest.raises(TypeError, match="stream must be a torch stream"):
        ctx.barrier(stream=5)


def test_a_forked_child_leaves_the_context_to_its_parent(ctx):
    x = ctx.zeros(4)
    pid = os.fork()
    if pid == 0:
        x += 1  # the memory is shared
        ctx.close()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert status == 0
    assert x.sum() == 4
    ctx.barrier()


def test_a_forgotten_context_gives_everything_back():
    before = descriptors()
    ctx = Iris("1MiB", device="cpu")
    ctx.zeros(4)
    alive = weakref.ref(ctx)
    del ctx
    gc.collect()
    assert alive() is None
    assert descriptors() == before


def test_many_contexts_at_once():
    contexts = [Iris("1MiB", device="cpu") for _ in range(3)]
    tensors = [c.full((2,), float(i)) for i, c in enumerate(contexts)]
    assert [c.is_symmetric(t) for c in contexts for t in tensors] == [
        True, False, False, False, True, False, False, False, True
    ]  # fmt: skip
    for c in contexts:
        c.close()


def test_free_and_scope(ctx):
    a = ctx.zeros(100)
    ctx.free(a)
    with pytest.raises(HeapError, match="freed"):
        ctx.free(a)
    with pytest.raises(NotOnHeapError):
        ctx.free(torch.zeros(4))
    with ctx.scope() as scope:
        ctx.zeros(10)
        kept = scope.keep(ctx.ones(10))
    assert ctx.stats().num_blocks == 1
    assert kept.sum() == 10


def test_an_error_in_a_scope_frees(ctx):
    def fail():
        with ctx.scope():
            ctx.zeros(10)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert ctx.stats().num_blocks == 0


def test_symmetry_of_tensors(ctx):
    x = ctx.zeros(8, 8)
    assert ctx.is_symmetric(x)
    assert ctx.is_symmetric(x[3:, ::2])
    assert not ctx.is_symmetric(x + 1)
    inside = ctx.as_symmetric(torch.arange(6).view(2, 3))
    assert ctx.is_symmetric(inside)
    assert inside.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ctx.as_symmetric(inside) is inside
    t, bases = ctx.allocate_symmetric(2, 3, dtype=torch.bfloat16)
    assert bases.tolist() == [t.data_ptr()]
    assert ctx.heap.translate(t.data_ptr(), 0, 0) == t.data_ptr()


def test_broadcast_of_one(ctx):
    assert isinstance(ctx.broadcast(torch.ones(2)), np.ndarray)
    assert ctx.broadcast([1, 2.5]).tolist() == [1.0, 2.5]
    assert ctx.broadcast(["a", 1]) == ["a", 1]
    assert ctx.broadcast([True]).tolist() == [True]
    assert ctx.broadcast([]) == []
    with pytest.raises(ValueError, match="no rank 3"):
        ctx.broadcast(1, src=3)


def test_logging_has_the_rank_in_the_record(ctx, caplog):
    with caplog.at_level(logging.DEBUG, logger="iris"):
        logging.getLogger("iris").propagate = True
        ctx.info("hello")
    record = next(r for r in caplog.records if r.getMessage() == "hello")
    assert (record.iris_rank, record.iris_num_ranks) == (0, 1)


def test_a_device_error_is_raised_once(monkeypatch):
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "1")
    with Iris("1MiB", device="cpu") as ctx:
        late(ctx)
        with pytest.raises(DeviceTimeoutError, match=r"program 3: a wait for the word at 0x1000 to be >= 42 .* was 7"):
            ctx.barrier()
        ctx.barrier()


def late(ctx):
    """Leave on the page of reports what a wait writes that has reached its bound."""
    words, first = ctx._reports._page.words, ctx._reports._page.first(0)
    for place, value in enumerate([0, 3, 0x1000, 42, 7, 3, 0], first + 1):
        words[place] = value
    words[first + Status.CODE] = words[0] = stamp(1, 0, Status.CODE, STATUS_WAIT_TIMEOUT)


def test_closing_raises_what_no_barrier_has(monkeypatch):
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "1")
    with pytest.raises(DeviceTimeoutError, match="program 3"), Iris("1MiB", device="cpu") as ctx:
        late(ctx)
    ctx = Iris("1MiB", device="cpu")
    late(ctx)
    with pytest.raises(DeviceTimeoutError, match="program 3"):
        ctx.close()
    ctx.close()
    with pytest.raises(HeapClosedError):
        ctx.barrier()


def test_memory_that_cannot_be_given_back_does_not_hide_the_error_before(monkeypatch, caplog):
    def lose(self):
        raise DeviceError("the device is lost")

    def fail():
        with Iris("1MiB", device="cpu") as ctx:
            monkeypatch.setattr(type(ctx.heap._state.allocator), "close", lose)
            _ = 1 / 0

    monkeypatch.setattr(logging.getLogger("iris"), "propagate", True)
    with pytest.raises(ZeroDivisionError):
        fail()
    assert "is lost" in caplog.text
    with pytest.raises(DeviceError, match="is lost"), Iris("1MiB", device="cpu"):
        pass


def test_closing_behind_another_error_logs_it(monkeypatch, caplog):
    monkeypatch.setenv("IRIS_DEVICE_TIMEOUT", "1")
    monkeypatch.setattr(logging.getLogger("iris"), "propagate", True)

    def in_a_block():
        with Iris("1MiB", device="cpu") as ctx:
            late(ctx)
            _ = 1 / 0

    def in_a_finally():
        ctx = Iris("1MiB", device="cpu")
        late(ctx)
        try:
            _ = 1 / 0
        finally:
            ctx.close()

    for fail in (in_a_block, in_a_finally):
        with pytest.raises(ZeroDivisionError):
            fail()
    assert sum("program 3" in record.getMessage() for record in caplog.records) == 2
