"""Who waits for whom, whatever streams, graphs and threads calls come from: on a GPU with stand-ins for streams."""

import contextlib
import threading
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tables import table

from iris_core import Iris
from iris_core.ccl import api
from iris_core.device import launch_order
from iris_core.device.barrier import _Group
from iris_core.device.launch_order import DeviceOrder, StreamWork
from iris_core.dispatch import calls
from iris_core.dispatch.bind import Launches
from iris_core.errors import DeviceError, UnsupportedError
from iris_core.heap.streams import HostStream, HostStreams
from iris_core.ops import FusedWorkspace
from iris_core.ops import api as ops_api
from iris_core.types import DeviceTarget, DeviceType


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
    ("a0n b0n a0n c0", ["", "", "", "a"]),
    ("a0 b0n a0 c7n b0n", ["", "a", "b", "", "a"]),
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
    with pytest.raises(UnsupportedError, match="IRIS_SYSTEM_SIZE"):
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
