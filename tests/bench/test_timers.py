"""The timers for GPUs, on a pretended one."""

import weakref

import pytest
import torch

from iris_core import bench
from iris_core.bench import runner, timers
from iris_core.bench.timers import Provider

from .fakes import FakeGPU, PretendedWorld

SECONDS = 1e-5


@pytest.fixture
def gpu(monkeypatch):
    return FakeGPU(monkeypatch)


@pytest.mark.parametrize(("timer", "warm", "timed"), [("events", 2, 4), ("graph", 5, 20)])
def test_only_the_calls_behind_the_alignment_are_timed(gpu, timer, warm, timed):
    def align():
        gpu.log.append(gpu.launches)

    provider = Provider("a", timer, lambda: gpu.launch(SECONDS), units=4)
    if timer == "graph":
        provider.capture(5)
    before = gpu.launches
    assert before == 0  # capturing runs nothing
    assert provider.time(2, align) == pytest.approx(SECONDS)  # the pause of the device is not part of it
    aligned = next(each for each in gpu.log if isinstance(each, int))
    assert aligned == warm
    assert gpu.launches - aligned == 1 + timed


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


def test_an_idle_rank_aligns_with_gpu_timers_only():
    aligned = []
    for timer in ("events", "graph", "cpu", "reported"):
        provider = Provider("a", timer, units=3)
        if timer == "graph":
            provider.capture(5)
        provider.once()
        assert provider.time(1, lambda: aligned.append(1)) == 0
    assert len(aligned) == 2


@pytest.fixture
def measure_on_gpu(gpu, monkeypatch):
    """Measure a benchmark with the pretended GPU; warming up is noted."""
    monkeypatch.setattr(runner, "warm_clocks", lambda milliseconds: gpu.log.append("warm"))

    def run(function, others=lambda rank, obj: obj):
        bench.register(function)
        (benchmark,) = bench.registered()
        options = bench.RunOptions(num_ranks=2, rounds=3)
        return runner.Runner(PretendedWorld(2, others), gpu.context(2), options).point(benchmark, {})

    return run


def test_a_graph_is_captured_after_eager_calls_and_verified_by_a_replay(gpu, measure_on_gpu):
    checked_after = []

    def call():
        gpu.log.append("call")
        gpu.launch(SECONDS)

    def check():
        checked_after.append(gpu.log[-1])
        return True

    def benchmark(state, ctx):
        state.set_timer("graph")
        state.set_repeat(40)
        state.provider("kernel", call, check=check)

    (result,) = measure_on_gpu(benchmark)
    eager, rest = gpu.log[:2], gpu.log[2:]
    assert eager == ["call", "call"]
    assert rest[:21] == ["capture", *["call"] * timers.MAX_GRAPH_CALLS]
    in_turn = ["replay", "align", "replay", "replay"]  # a warm-up, then 40 calls in graphs of 20
    assert rest[21:] == ["replay", "replay", "warm", *in_turn * 3, "reset", "barrier"]
    assert checked_after == ["replay", "replay"]
    assert result.time_us == pytest.approx(SECONDS * 1e6, rel=1e-4)
    assert (result.calls, result.timer, result.num_ranks) == (40, "graph", 2)


def test_a_rank_that_takes_no_part_aligns_as_often_as_the_others(gpu, measure_on_gpu):
    def others(rank, obj):
        """The other rank has measured 2 us in each round."""
        return ({"kernel": [2e-6] * 3}, {"kernel": ""}) if obj == ({"kernel": []}, {"kernel": ""}) else obj

    def benchmark(state, ctx):
        state.set_timer("graph")
        state.set_repeat(20)
        state.provider("kernel", None, check=lambda: True)

    (result,) = measure_on_gpu(benchmark, others)
    assert gpu.log == ["warm", *["align"] * 3, "barrier"]
    assert result.local_us == (None, 2)
    assert result.calls == 20


@pytest.mark.parametrize(("num_nodes", "barrier"), [(1, "align"), (2, "align between nodes")])
def test_the_default_on_a_gpu_is_eager_calls_between_events(gpu, measure_on_gpu, num_nodes, barrier):
    gpu.num_nodes = num_nodes

    def benchmark(state, ctx):
        state.set_bytes(1000)
        state.provider("kernel", lambda: gpu.launch(SECONDS), check=None)

    (result,) = measure_on_gpu(benchmark)
    assert result.timer == "events"
    assert result.gb_per_s == pytest.approx(0.1, rel=1e-4)
    assert gpu.log == ["warm", *[barrier] * 3, "barrier"]
