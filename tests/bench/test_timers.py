"""The timers for GPUs, on a pretended one; do_bench: what is called when, and what becomes of the times."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch
from tables import table

from iris_core.bench import do_bench, runner, state
from iris_core.bench.state import Provider
from iris_core.dispatch import first_calls
from iris_core.errors import BenchmarkError

from .conftest import PretendedWorld

SECONDS = 1e-5


class FakeGPU:
    """In place of what the timers use of torch.cuda: launches move a clock, graphs hold launches."""

    def __init__(self, monkeypatch):
        self.clock_s, self.log, self.capturing = 0.0, [], None
        for fake in (self.Event, self.CUDAGraph, self.graph, self.synchronize, self._sleep):
            monkeypatch.setattr(torch.cuda, fake.__name__, fake)

    def Event(self, enable_timing):
        """Everything has run already when the host waits for it."""
        assert enable_timing
        event = SimpleNamespace(synchronize=lambda: None)
        event.record = lambda: setattr(event, "at_s", self.clock_s)
        event.elapsed_time = lambda end: (end.at_s - event.at_s) * 1e3
        return event

    def CUDAGraph(self):
        graph = SimpleNamespace(held=[], reset=lambda: self.log.append("reset"))
        graph.replay = lambda: (self.log.append("replay"), [self.launch(seconds) for seconds in graph.held])
        return graph

    @contextlib.contextmanager
    def graph(self, captured, capture_error_mode):
        self.log.append("capture")
        self.capturing = captured
        yield
        self.capturing = None

    def launch(self, seconds):
        """Run something that takes so long, or hold it in the graph that is being captured."""
        if self.capturing is not None:
            self.capturing.held.append(seconds)
        else:
            self.clock_s += seconds

    def _sleep(self, cycles):
        self.launch(1e-4)

    def synchronize(self):
        """Nothing runs later than it is launched; inside a capture this would be an error."""
        assert self.capturing is None

    def context(self, num_ranks):
        return SimpleNamespace(
            device="cuda:0", num_ranks=num_ranks, num_nodes=1, scope=contextlib.nullcontext,
            barrier=lambda: self.log.append("barrier"), device_barrier=lambda: self.log.append("align"),
        )  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(runner, "warm_clocks", lambda milliseconds: pretended.log.append("warm"))
    pretended = FakeGPU(monkeypatch)
    return pretended


def test_what_a_graph_uses_lives_as_long_as_its_provider(gpu):
    """A graph knows addresses only: torch unmaps free memory when the next one is captured."""
    x = torch.zeros(3)
    memory = weakref.ref(x)
    provider = Provider("a", "graph", lambda x=x: gpu.launch(x.numel() * SECONDS))
    del x
    provider.capture(5)
    assert memory() is not None
    del provider
    assert memory() is None


def test_a_graph_is_captured_after_eager_calls_and_verified_by_a_replay(gpu, measure):
    checked_after = []

    def call():
        gpu.log.append("call")
        gpu.launch(SECONDS)

    def benchmark(state, ctx):
        state.set_timer("graph")
        state.set_repeat(40)
        state.provider("kernel", call, check=lambda: checked_after.append(gpu.log[-1]))

    (result,) = measure(benchmark, world=PretendedWorld(2), ctx=gpu.context(2))
    captured = ["align", "call"] * 2 + ["capture", *["call"] * state.MAX_GRAPH_CALLS]
    in_turn = ["replay", "align", "replay", "replay"]  # a warm-up, then 40 calls in graphs of 20
    assert gpu.log == [*captured, *in_turn[:3], "warm", *in_turn * 3, "reset", "barrier"]
    assert checked_after == ["replay", "replay"]
    assert result.time_us == pytest.approx(SECONDS * 1e6, rel=1e-4)
    assert (result.calls, result.timer, result.num_ranks) == (40, "graph", 2)


@pytest.fixture
def calls(monkeypatch):
    """The names of what was called, on a machine without a GPU whose calls take 1, 2, 3, ... ms."""
    made = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(first_calls, "seconds_by_clock", lambda fn, units: (fn(), made.count("fn") / 1e3)[1])
    return made


def bench(calls, **options):
    return do_bench(*(lambda word=word: calls.append(word) for word in ("fn", "barrier", "preamble")), **options)


def test_order_of_calls(calls):
    bench(calls, n_warmup=1, n_repeat=2)
    assert calls == ["barrier", "preamble", "barrier", "fn"] * 4 + ["barrier"]


@pytest.mark.parametrize(("options", "wanted"), [
    ({}, 4.0), ({"return_mode": "min"}, 3.0), ({"return_mode": "max"}, 5.0), ({"return_mode": "median"}, 4.0),
    ({"return_mode": "all"}, [3.0, 4.0, 5.0]), ({"quantiles": [0.25, 1.0]}, [3.5, 5.0]), ({"quantiles": (0.5,)}, 4.0),
], ids=str)  # fmt: skip
def test_what_is_returned(calls, options, wanted):
    assert bench(calls, n_warmup=1, n_repeat=3, **options) == pytest.approx(wanted)


@table("options", [{"return_mode": "best"}, {"n_warmup": -1}, {"n_repeat": 0}, {"quantiles": [1.5]}])
def test_refuses(calls, options):
    with pytest.raises(BenchmarkError, match=next(iter(options))):
        bench(calls, **options)
    assert calls == []
