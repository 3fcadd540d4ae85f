"""Who waits for whom, whatever streams, graphs and threads calls come from: on a GPU with stand-ins for streams."""

import contextlib
import threading

import pytest
import torch
from tables import table

from iris_core.device import launch_order
from iris_core.device.barrier import _Group
from iris_core.device.launch_order import DeviceOrder, HostOrder
from iris_core.errors import DeviceError, UnsupportedError
from iris_core.heap.streams import HostStreams


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
])  # fmt: skip
def test_a_call_waits_for_the_stream_of_the_last_one_of_its_graph(streams, calls, waits):
    (made, on), found = streams, []
    team = DeviceOrder(0, lambda tensor, stream: None)
    for each in made:
        each.capture, each.waits = 0, []
    for name, capture in calls.split():
        stream = made["abc".index(name)]
        stream.capture, before = int(capture), len(stream.waits)
        with on(stream):
            assert team.run(lambda plan: plan, "launched") == "launched"
        found.append("".join(stream.waits[before:]))
    assert found == waits


def test_every_graph_has_flags_of_its_own(monkeypatch):
    """Replays have no order with other launches.  Where a capture has no number, every barrier in it has its own."""
    group = _Group((0, 1), torch.arange(6).view(6, 1).expand(6, 3), torch.zeros(6, 2), None)
    used = []
    for capture in (0, 5, 5, 0, 9, 5, None, None):
        monkeypatch.setattr(launch_order, "current_capture", lambda index, capture=capture: capture)
        used.append(int(group._slot().words[0]))
    assert used == [0, 1, 1, 0, 2, 1, 3, 4]
    monkeypatch.setattr(launch_order, "current_capture", lambda index: 11)
    assert int(group._slot().words[0]) == 5
    monkeypatch.setattr(launch_order, "current_capture", lambda index: 12)
    with pytest.raises(UnsupportedError, match="IRIS_SYSTEM_SIZE"):
        group._slot()


# -- on the CPU -------------------------------------------------------------------------------------------------------
class FailsInBetween(HostStreams):
    """A call fails right behind a look for failures, which knows nothing of it."""

    def __init__(self):
        super().__init__()
        self.go_on = threading.Event()

    def check(self):
        super().check()
        self.go_on.set()
        for each in self._made:
            each.synchronize()


@pytest.mark.parametrize("run", ["run", "run_async"])
def test_no_call_goes_ahead_behind_one_that_fails_meanwhile(run):
    streams = FailsInBetween()
    team = HostOrder(streams, lambda tensor, stream: None)
    launched = []

    def fail(plan):
        assert streams.go_on.wait(60)
        raise RuntimeError("a peer is lost")

    team._launch("all_reduce", fail, None)
    with pytest.raises(RuntimeError, match="a peer is lost"):
        team.run(launched.append, "run") if run == "run" else team.run_async("barrier", launched.append, "run").wait()
    assert launched == []
    with contextlib.suppress(DeviceError):  # of the first call, where nobody has got it
        HostStreams.check(streams)
    assert team.run(lambda plan: plan, "launched") == "launched"
    team.close()
