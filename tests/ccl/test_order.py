"""Who waits for whom, whatever streams, graphs and threads calls come from: on a GPU with stand-ins for streams."""

import contextlib
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tables import raises, table

from iris_core import Iris
from iris_core.ccl import api
from iris_core.device import launch_order
from iris_core.device.barrier import _Group
from iris_core.device.launch_order import DeviceOrder, SideStream, StreamWork
from iris_core.dispatch import calls
from iris_core.dispatch.bind import Launches
from iris_core.errors import DeviceError, UnsupportedError
from iris_core.heap.streams import HostStream, HostStreams
from iris_core.ops import FusedWorkspace
from iris_core.ops import api as ops_api
from iris_core.types import DeviceTarget, DeviceType
from iris_gluon.gemm.gather_product import beside_copies
from iris_triton.collectives.parts.side import Side
from iris_triton.gemm import copy_engine_product
from iris_triton.gemm.copy_engine_product import carry_products, multiply_shards
from iris_triton.gemm.parts.shards import Shards


class Stream:
    """Knows what it waits for; `capture` is the number of the capture that it is part of."""

    def __init__(self, name, raw):
        self.name, self.cuda_stream, self.capture, self.waits = name, raw, 0, []

    def wait_event(self, event):
        other = event.recorded
        assert other.capture == self.capture, f"{self.name} cannot wait for {other.name} across the edge of a capture"
        self.waits.append(other.name)


class Event:
    def record(self, stream):
        self.recorded = stream


@pytest.fixture
def streams(monkeypatch):
    """Three streams, and a function that makes one of them the current one."""
    made = [Stream(name, number) for number, name in enumerate("abc")]
    current = [made[0]]

    @contextlib.contextmanager
    def on(stream):
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=None: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[-1].cuda_stream, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launch_order, "capture_of", lambda stream: stream.capture)
    monkeypatch.setattr(launch_order, "current_capture", lambda index: current[-1].capture)
    return made, on


@table(("calls", "waits"), [  # of streams, with the number of the capture; what each waits for
    ("a0 a0 b0 b0 a0", ["", "", "a", "", "b"]),
    ("a0 b7 b0", ["", "", "a"]),  # b is captured in between: what was launched on a has still to be waited for
    ("a0 a7 c8 b7 a7 c8", ["", "", "", "a", "b", ""]),  # also a graph that is captured on the last call's stream
    # n: by an engine that orders its own; e: likewise, and ends on a stream of the engine
    ("a0n b0n a0n c0", ["", "", "", "a"]), ("a0 b0n a0 c7n b0n", ["", "a", "b", "", "a"]),
    ("a0e b0e a0 a0", ["", "", "eb", ""]),
    ("a0e b7 a0 b0n", ["", "", "e", "a"]),
])  # fmt: skip
def test_a_call_waits_for_the_stream_of_the_last_one_of_its_graph(streams, calls, waits):
    (made, on), found = streams, []
    team = DeviceOrder(0, lambda tensor, stream: None)
    for each in made:
        each.capture, each.waits = 0, []
    for name, capture, *engine in calls.split():
        stream = made["abc".index(name)]
        stream.capture, before = int(capture), len(stream.waits)
        work = SimpleNamespace(wait=lambda: launch_order.torch.cuda.current_stream().waits.append("e"))
        result = work if engine == ["e"] else None
        with on(stream):
            assert team.run(lambda plan: plan, result, engine="engine" if engine else None) is result
        found.append("".join(stream.waits[before:]))
    assert found == waits


def test_every_graph_has_flags_of_its_own(monkeypatch):
    """Replays have no order with other launches.  Where a capture has no number, every barrier in it has its own."""
    group = _Group((0, 1), torch.arange(6).view(6, 1).expand(6, 3), torch.zeros(6, 2), None)
    captures = mock.Mock(side_effect=[5, 5, 9, 5, None, None, 11, 12])
    monkeypatch.setattr(launch_order, "current_capture", captures)
    assert [int(group._slot().words[0]) for _ in range(7)] == [1, 1, 2, 1, 3, 4, 5]
    with raises(UnsupportedError, name="IRIS_SYSTEM_SIZE"):
        group._slot()


@pytest.mark.parametrize("run", ["run", "run_async"])
def test_no_call_goes_ahead_behind_one_that_fails_meanwhile(monkeypatch, run):
    streams, launched, go_on = HostStreams(), [], threading.Event()
    team = HostStream(streams, lambda tensor, stream: None)

    def check():  # and right behind it the call fails
        HostStreams.check(streams)
        go_on.set()
        for made in list(streams.made):
            made().synchronize()

    def fail(plan):
        assert go_on.wait(60)
        raise RuntimeError("a peer is lost")

    monkeypatch.setattr(streams, "check", check)
    team.launch("all_reduce", fail, None)
    with pytest.raises(RuntimeError, match="a peer is lost"):
        team.run(launched.append, "run") if run == "run" else team.run_async("barrier", launched.append, "run").wait()
    assert launched == []
    with contextlib.suppress(DeviceError):  # of the first call, where nobody has got it
        HostStreams.check(streams)
    assert team.run(lambda plan: plan, "launched") == "launched"
    team.close()


@pytest.mark.parametrize("current", [0, 1])
def test_a_call_runs_with_the_contexts_device_current(monkeypatch, current):
    devices, target, x, here = [], DeviceTarget(DeviceType.CUDA, 1), torch.zeros(4, 4), [current]

    @contextlib.contextmanager
    def device(index):
        here.append(index)
        yield
        here.pop()

    def noted(found=None):
        return mock.Mock(side_effect=lambda *given: devices.append(here[-1]) or found)

    call = mock.Mock(run=noted(), workspace=FusedWorkspace())
    binder = mock.Mock(gpu=1, target=target, held={}, bind=noted(call), barrier=noted())
    binder.here.heap, binder.workspaces = (0, 1), weakref.WeakSet()
    binder.bound, binder.fused = Launches(), Launches()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: here[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for module in (api, ops_api, calls):
        monkeypatch.setattr(module, "current_device", lambda: here[-1])
    collectives, operations = api.Collectives(binder), ops_api.Operations(binder)
    collectives.all_reduce(x, x)
    operations.matmul_all_reduce(torch.zeros(4, 4), x, x)
    operations.matmul_all_reduce_preamble(torch.zeros(4, 4), x, x)
    collectives.bind("all_reduce", x, x)()
    collectives.barrier()
    context = mock.Mock(_reports=mock.Mock(alarm=[0], heard=0), target=target)
    context._device_barriers.launch = noted()
    Iris.device_barrier(context)
    assert (devices, here) == ([1] * 9, [current])


def test_a_handle_lets_the_stream_of_its_own_device_wait(monkeypatch):
    waited = []
    stream = lambda device=None: SimpleNamespace(wait_event=lambda event: waited.append((device, event)))
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    event = SimpleNamespace(device=torch.device("cuda", 1))
    StreamWork(event, "all_reduce", ()).wait()
    assert waited == [(event.device, event)]


RAW = 7
OTHERS = [(11, 101), (12, 102)]
"""Places of the rows and of the word at two others; addresses are numbers."""


class Streams:
    """A main stream, which is the current one, and a second one; what is asked for is written down."""

    def __init__(self, patch):
        self.log = []
        self.main, self.second = (SimpleNamespace(name=n, device="cuda:0", device_index=0) for n in ("main", "side"))
        real = copy_engine_product.multiply

        def multiply(left, *rest):
            self.log.append(("main", "multiplies", left.storage_offset() // 3))  # the first row
            real(left, *rest)

        patch.setattr(torch.cuda, "current_stream", lambda device: self.main)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: RAW + 1, raising=False)
        patch.setattr(torch.cuda, "Stream", lambda index, priority: self.second)
        patch.setattr(torch.cuda, "Event", lambda: self.event("ready"))
        patch.setattr(copy_engine_product, "multiply", multiply)
        self.side = Side(self.kernel("waits for all"), self._copy, self._write, int, SideStream(0), self.second, RAW)

    def event(self, name):
        does = lambda what: lambda stream: self.log.append((stream.name, what, name))
        return SimpleNamespace(name=name, record=does("records"), wait=does("waits for"))

    def kernel(self, what):
        """A kernel that writes down on which stream it is launched, and what with."""
        return lambda stream, *tensors: self.log.append(((stream or self.main).name, what, len(tensors)))

    def _copy(self, target, source, nbytes, stream):
        assert (nbytes, stream) == (80 if source < 10 else 48, RAW)
        self.log.append(("side", "copies", (target, source) if source < 10 else "own"))

    def _write(self, address, value, flags, stream):
        assert (value, flags, stream) == (1, 0, RAW)
        self.log.append(("side", "writes", address))

    def shards(self, matrix):
        return Shards(matrix, matrix[:4], torch.zeros(4, dtype=torch.int32), OTHERS, self.side)


@pytest.fixture
def side_streams(monkeypatch):
    return Streams(monkeypatch)


BEGIN = [("main", "records", "ready"), ("side", "waits for", "ready"), ("side", "waits for all", 0)]
PUSHES = [
    *BEGIN, ("side", "copies", "own"), ("side", "writes", 101), ("side", "copies", "own"), ("side", "writes", 102)
]  # fmt: skip

JOIN = ("side", "records", "ready"), ("main", "waits for", "ready")


def test_products_begin_when_their_rows_are_there(side_streams):
    a, b, bias, others = torch.randn(4, 3), torch.randn(3, 5), torch.randn(12, 1), torch.randn(8, 3)
    matrix, out = torch.cat([torch.zeros(4, 3), others]), torch.zeros(12, 5)
    order = [(0, None), *((member, side_streams.kernel(f"waits for {member}")) for member in (1, 2))]
    multiply_shards(side_streams.shards(matrix), order, False)(None, out, a, b, bias)
    assert side_streams.log == [
        *PUSHES, ("main", "multiplies", 0), ("main", "waits for 1", 0), ("main", "multiplies", 4),
        ("main", "waits for 2", 0), ("main", "multiplies", 8), *JOIN,
    ]  # fmt: skip
    torch.testing.assert_close(out, torch.cat([a, others]) @ b + bias)


def test_words_are_written_before_the_product_that_waits_for_them_is_launched(side_streams):
    run = beside_copies(side_streams.shards(torch.zeros(12, 3)), side_streams.kernel("multiplies"))
    run(None, torch.zeros(12, 5), torch.randn(4, 3), torch.randn(3, 5))
    assert side_streams.log == [*PUSHES, ("main", "multiplies", 3), *JOIN]


def test_products_are_carried_beside_the_next_one(side_streams):
    a, b = torch.randn(12, 3), torch.randn(3, 5)
    product, slots, out = torch.zeros(12, 5), torch.zeros(3, 4, 5), torch.zeros(4, 5)
    carried = [(4, 8, product[4:8], 11, 1), (8, 12, product[8:], 12, 2)]
    carry_products(side_streams.side, carried, (0, slots[0]), side_streams.kernel("adds"), True, False)(None, out, a, b)
    assert side_streams.log == [
        *BEGIN, ("main", "multiplies", 4), *BEGIN[:2], ("side", "copies", (11, 1)), ("main", "multiplies", 8),
        *BEGIN[:2], ("side", "copies", (12, 2)), ("main", "multiplies", 0), ("side", "waits for all", 0), *JOIN,
        ("main", "adds", 1),
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat([slots[0], product[4:]]), a @ b)
